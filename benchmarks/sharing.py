"""Members that share weights: what they hold, what they compute, and how long a training step is, beside one network.

Ways: full copies; LoRA (rank 8 on the attention's layers) and heads on a frozen network; heads on features that were
computed once (`dissensus.SharedTrunk.of`); BatchEnsemble, which trains what is shared. A step is that of
`dissensus.fit`: forward pass, objective, backward pass and AdamW; on a GPU under bf16 autocast, replayed from a CUDA
graph. All of the following are multiples of those of one network that is trained whole:

- weights: numbers of weights, gradients and the two moments of Adam;
- activations: bytes that autograd keeps for the backward pass;
- operations: what torch counts in the matrix products of a forward and a backward pass. A frozen trunk that is
  computed once for all members costs a third of a network's, however many members there are;
- products and kernels: how often matrix products are called, and (on a GPU) how many kernels the pass launches;
- step: the median time of a step.

On a GPU the peak memory of training is recorded too. Networks come from timm and transformers. Where a package is not
installed, a transformer of the same size in plain torch stands in, and its name says so. Rows are written as they come.
With a budget, rows that would begin after it are left out and named; rows that matter most come first, and
``--resume`` measures those that a file does not have yet. ``--rounds 3 --budget 400`` ends within 8 minutes where no
row takes longer than 80 seconds.

Usage: python benchmarks/sharing.py [--rounds 5] [--members 20 1 5] [--only NAME] [--budget SECONDS] [--json FILE]
       [--resume]
"""

import argparse
import copy
import gc
import importlib
import json
import logging
import os
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from provenance import how_made
from third_party import bert, drawn, tokens, versions, vit
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry

import dissensus as ds

independent = partial(ds.objectives.independent, loss="cross_entropy")
CHEAP = ("LoRA", "heads", "heads on features")
WAYS = (*CHEAP, "BatchEnsemble", "full copies")
CLASSES = 10
VARYING = ("command", "operations a second of a large product")
"""What may differ between calls that measure rows of one file."""
WARM_UP = 2
"""Epochs before the first that is timed: they choose a backend, and capture."""
Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """A network, a batch for it, and how its layers are called."""

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    head: str
    """The name of the last layer."""
    attention: tuple[str, ...]
    """The layers of attention that LoRA adapts."""
    output: str | None = None
    package: str = ""


class Attention(nn.Module):
    """Self-attention of several heads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in self.layers())
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2))

    def layers(self) -> tuple[nn.Linear, nn.Linear, nn.Linear]:
        return self.query, self.key, self.value


class Block(nn.Module):
    """A block of a transformer, with norms first."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention, self.norms = Attention(width, heads), nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


class Patches(nn.Module):
    """Pictures as sequences of patches."""

    def __init__(self, width: int, size: int, patch: int) -> None:
        super().__init__()
        self.project = nn.Conv2d(3, width, patch, patch)
        self.position = nn.Parameter(0.02 * torch.randn((size // patch) ** 2, width))

    def forward(self, x: Tensor) -> Tensor:
        return self.project(x).flatten(2).transpose(1, 2) + self.position


class Words(nn.Module):
    """Tokens and their positions as vectors."""

    def __init__(self, width: int, vocabulary: int, longest: int) -> None:
        super().__init__()
        self.word = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(0.02 * torch.randn(longest, width))

    def forward(self, x: Tensor) -> Tensor:
        return self.word(x) + self.position[: x.shape[1]]


class Transformer(nn.Module):
    """An encoder in plain torch, with a classifier on the mean of its states."""

    def __init__(self, first: nn.Module, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.first, self.blocks = first, nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.first(x))).mean(1))


def plain_vit(width: int, layers: int, heads: int, size: int, patch: int) -> nn.Module:
    return Transformer(Patches(width, size, patch), width, layers, heads)


def plain_bert(width: int, layers: int, heads: int) -> nn.Module:
    return Transformer(Words(width, 1000, 128), width, layers, heads)


def pictures(batch: int, size: int, name: str = "x") -> Batch:
    return {name: drawn(batch, 3, size, size)}


def available(package: str) -> bool:
    try:
        importlib.import_module(package)
    except Exception:  # a package that is there may fail to load
        return False
    return True


def timm_vit(name: str) -> nn.Module:
    library: Any = importlib.import_module("timm")
    return library.create_model(name, pretrained=False, num_classes=CLASSES)


def vit_case(name: str, width: int, heads: int, has_timm: bool) -> Case:
    """A ViT of 12 layers on patches of 16."""
    batch = partial(pictures, 32, 224)
    if has_timm:
        return Case(f"timm {name}", partial(timm_vit, name), batch, "head", ("qkv",), package="timm")
    size = f"ViT, width {width}, 12 layers, 224x224 (plain torch)"
    return Case(size, partial(plain_vit, width, 12, heads, 224, 16), batch, "head", ("query", "value"))


def bert_case(width: int, layers: int, heads: int, batch: Callable[[], Batch], has_transformers: bool) -> Case:
    name = f"BERT, width {width}, {layers} layers"
    if has_transformers:
        build, of = bert(width, layers, heads), ("query", "value")
        return Case(name, build, batch, "classifier", of, "logits", package="transformers")
    plain = partial(plain_bert, width, layers, heads)
    return Case(f"{name} (plain torch)", plain, lambda: {"x": batch()["input_ids"]}, "head", ("query", "value"))


def cases(device: torch.device) -> list[Case]:
    """Networks with new weights, and a batch for each; larger ones on a GPU."""
    has_timm, has_transformers = available("timm"), available("transformers")
    if device.type == "cuda":
        return [
            vit_case("vit_small_patch16_224", 384, 6, has_timm),
            bert_case(512, 8, 8, partial(tokens, 32, 128), has_transformers),
            vit_case("vit_tiny_patch16_224", 192, 3, has_timm),
        ]
    return [
        small_pictures(192, 6, 3, has_transformers),
        bert_case(128, 4, 4, partial(tokens, 16, 32), has_transformers),
        small_pictures(384, 12, 6, has_transformers),  # the layers of ViT-small
    ]


def small_pictures(width: int, layers: int, heads: int, has_transformers: bool) -> Case:
    """A ViT on 16 patches of 8."""
    name, of = f"ViT, width {width}, {layers} layers, 32x32", ("query", "value", "q_proj", "v_proj")
    if has_transformers:
        build, batch = vit(width, layers, heads, 32), partial(pictures, 16, 32, "pixel_values")
        return Case(name, build, batch, "classifier", of, "logits", package="transformers")
    plain = partial(plain_vit, width, layers, heads, 32, 8)
    return Case(f"{name} (plain torch)", plain, partial(pictures, 16, 32), "head", of)


def ensemble(case: Case, base: nn.Module, way: str, members: int) -> ds.Ensemble:
    """Members made in one of the ways from one network; each has a last layer of its own."""

    def with_new_head(frozen: bool) -> nn.Module:
        network = copy.deepcopy(base).requires_grad_(not frozen)
        head: Any = network.get_submodule(case.head)
        head.reset_parameters()
        head.requires_grad_(True)
        return network

    targets = [name for name, _ in base.named_modules() if name.rpartition(".")[2] in case.attention]
    tables = [f"{name}.weight" for name, layer in base.named_modules() if isinstance(layer, nn.Embedding)]
    make: dict[str, tuple[Callable[[], nn.Module], Any]] = {
        "full copies": (partial(with_new_head, False), None),
        "LoRA": (lambda: ds.adapters.lora(base, 8, targets, trained=[f"{case.head}.*"]), "frozen"),
        "heads": (partial(with_new_head, True), "frozen"),
        "heads on features": (partial(with_new_head, True), "frozen"),
        "BatchEnsemble": (lambda: ds.adapters.batch_ensemble(base), [ds.adapters.SHARED, *tables]),
    }
    network, shared = make[way]
    return ds.Ensemble(network, members, output=case.output, shared=shared)


def held(ens: ds.Ensemble) -> int:
    """Numbers that weights take, with gradients and two moments of those that are trained."""
    return sum(p.numel() * (4 if p.requires_grad else 1) for p in ens.parameters())


def autocast(device: torch.device) -> Any:
    return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext()


def positional(case: Case, batch: Batch) -> tuple[tuple[Tensor, ...], Batch]:
    """Networks of transformers take their inputs by name, others take one without."""
    return ((), batch) if case.package == "transformers" else (tuple(batch.values()), {})


class Products(TorchDispatchMode):
    """Counts matrix products, convolutions and attention products."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func._overloadpacket in flop_registry
        return func(*args, **(kwargs or {}))


def work(case: Case, ens: ds.Ensemble, batch: Batch, backend: str) -> dict[str, float | None]:
    """What a pass keeps and computes with the backend that training has chosen."""
    device = next(iter(batch.values())).device
    args, kwargs = positional(case, batch)
    own = {p.untyped_storage().data_ptr() for p in ens.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        memory = tensor.untyped_storage()
        if memory.data_ptr() not in own:
            kept[memory.data_ptr()] = memory.nbytes()
        return tensor

    def step() -> None:
        with autocast(device):
            outputs = ens(*args, **kwargs)
        (len(ens) * outputs.float().square().mean()).backward()
        ens.zero_grad()

    before, ens.backend = ens.backend, backend
    ens.train()
    step()  # the backend is tried, and the network's first pass is over
    with autocast(device), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        outputs = ens(*args, **kwargs)
    del outputs
    with FlopCounterMode(display=False) as operations, Products() as products:
        step()
    kernels = launched(step) if device.type == "cuda" else None
    ens.backend = before
    return {
        "kept": sum(kept.values()),
        "operations": operations.get_total_flops(),
        "products": products.count,
        "kernels": kernels,
    }


def launched(step: Callable[[], None]) -> int | None:
    """How many kernels a step launches; None where the profiler sees none."""
    from torch.profiler import ProfilerActivity, profile

    try:
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            step()
            torch.cuda.synchronize()
        on_gpu = [event for event in profiled.events() or [] if event.device_type.name == "CUDA"]
    except Exception:  # a container may not let the profiler read counters
        return None
    return sum("Memset" not in event.name and "Memcpy" not in event.name for event in on_gpu) or None


def timed(ens: ds.Ensemble, case: Case, batch: Batch, labels: Tensor, steps: int, rounds: int) -> dict[str, Any]:
    """The median time of a step, the backend, and on a GPU the peak memory of training, in bytes.

    The first training chooses the backend, which takes memory for all of them.
    """
    on_gpu = labels.is_cuda
    repeated = {name: tensor.repeat(steps, *[1] * (tensor.ndim - 1)) for name, tensor in batch.items()}
    data: Any = repeated if case.package == "transformers" else next(iter(repeated.values()))
    marks: dict[int, float] = {}

    def clock(moment: ds.Progress) -> None:
        if moment.step % steps == 0 and moment.step >= WARM_UP * steps:
            if on_gpu:
                torch.cuda.synchronize()
            marks[moment.step] = time.perf_counter()  # the last report of an epoch counts

    def train(epochs: int, progress: Callable[[ds.Progress], None] | None) -> ds.History:
        return ds.fit(
            ens,
            (data, labels.repeat(steps)),
            independent,
            epochs=epochs,
            batch_size=len(labels),
            lr=1e-4,
            precision="bf16" if on_gpu else "float32",
            progress=progress,
        )

    if on_gpu:
        train(1, None)
        clean()
        torch.cuda.reset_peak_memory_stats()
    history = train(rounds + WARM_UP, clock)
    between = [(b - a) / steps for a, b in pairwise(marks.values())]
    peak = torch.cuda.max_memory_allocated() if on_gpu else None
    return {"seconds": median(between), "backend": history.backend, "peak": peak}


def product_rate(device: torch.device, size: int = 2048, times: int = 5) -> float:
    """Operations a second, in units of 10^9, of a large product of square matrices: more than any network reaches."""
    size = 4 * size if device.type == "cuda" else size
    a = torch.randn(size, size, device=device, dtype=torch.bfloat16 if device.type == "cuda" else torch.float32)
    seconds: list[float] = []
    for _ in range(times + 1):
        started = time.perf_counter()
        _ = a @ a
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return 2 * size**3 / min(seconds[1:]) / 1e9


def clean() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def measured(
    case: Case, base: nn.Module, way: str, members: int, device: torch.device, steps: int, rounds: int
) -> dict[str, Any]:
    """Everything that is measured of one ensemble."""
    batch = {name: tensor.to(device) for name, tensor in case.batch().items()}
    labels = torch.arange(len(next(iter(batch.values()))), device=device) % CLASSES
    clean()
    before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
    ens = ensemble(case, base, way, members).to(device)
    if way == "heads on features":
        args, kwargs = positional(case, batch)
        trunk = ds.SharedTrunk.of(ens, kwargs or args[0])
        features = trunk.features(*args, **kwargs)
        assert isinstance(features, Tensor)  # the networks here pass one value
        ens, case, batch = trunk.heads, replace(case, package=""), {"x": features}
    try:
        result = {"held": held(ens), **timed(ens, case, batch, labels, steps, rounds)}
        result["peak"] = None if result["peak"] is None else result["peak"] - before
        return result | work(case, ens, batch, result["backend"])
    finally:
        del ens


def row(case: Case, way: str, members: int, result: dict[str, Any], one: dict[str, Any]) -> dict[str, Any]:
    """One ensemble beside one network."""

    def ratio(name: str) -> float | None:
        return result[name] / one[name] if result[name] and one[name] else None

    return {
        "network": case.name,
        "way": way,
        "members": members,
        "numbers": one["held"],
        "held": ratio("held"),
        "kept": result["kept"] / max(1, one["kept"]),
        "operations": ratio("operations"),
        "one_operations": one["operations"],
        "products": result["products"],
        "one_products": one["products"],
        "kernels": result["kernels"],
        "one_kernels": one["kernels"],
        "peak_mebibytes": None if result["peak"] is None else result["peak"] / 2**20,
        "one_peak_mebibytes": None if one["peak"] is None else one["peak"] / 2**20,
        "milliseconds": 1e3 * result["seconds"],
        "one_milliseconds": 1e3 * one["seconds"],
        "backend": result["backend"],
        "load": os.getloadavg()[0],
    }


class Record:
    """Rows on the screen and in a file, which is whole after every row.

    With ``resume`` it begins with the rows of that file, which must be of the same machine and source.
    """

    def __init__(self, made: dict[str, Any], file: Path | None, resume: bool = False) -> None:
        self.made, self.file = made, file
        self.rows: list[dict[str, Any]] = []
        self.left_out: list[dict[str, Any]] = []
        if resume and file is not None and file.exists():
            earlier = json.loads(file.read_text())
            differing = [key for key in made if key not in VARYING and made[key] != earlier["made"].get(key)]
            if differing:
                raise SystemExit(f"{file} is of another {', '.join(differing)}: measure anew, without --resume.")
            self.made, self.rows = earlier["made"], earlier["rows"]

    def has(self, entry: dict[str, Any]) -> bool:
        """Whether a row was measured earlier."""
        return any(all(row[key] == value for key, value in entry.items()) for row in self.rows)

    def add(self, entry: dict[str, Any]) -> None:
        (self.left_out if "reason" in entry else self.rows).append(entry)
        shown = {key: round(value, 3) if isinstance(value, float) else value for key, value in entry.items()}
        print(json.dumps(shown), flush=True)
        if self.file is not None:
            part = self.file.with_name(f".{self.file.name}.unfinished")
            part.write_text(
                json.dumps({"made": self.made, "rows": self.rows, "left_out": self.left_out}, indent=1) + "\n"
            )
            part.replace(self.file)


def measure(
    networks: Sequence[Case],
    members: Sequence[int],
    rounds: int,
    steps: int,
    budget: float | None,
    device: torch.device,
    record: Record,
) -> None:
    """All rows: first the ways that matter most, in all networks and numbers of members; then those that cost most."""
    started = time.perf_counter()
    bases = {case.name: case.build() for case in networks}
    ones: dict[str, dict[str, Any]] = {}
    first = [(count, case, way) for count in members for case in networks for way in CHEAP]
    last = [(count, case, way) for count in sorted(members) for case in networks for way in WAYS if way not in CHEAP]
    for count, case, way in [*first, *last]:
        entry = {"network": case.name, "way": way, "members": count}
        if record.has(entry):
            continue
        if budget is not None and time.perf_counter() - started > budget:
            record.add({**entry, "reason": "no time was left"})
            continue
        try:
            if case.name not in ones:
                ones[case.name] = measured(case, bases[case.name], "full copies", 1, device, steps, rounds)
            one = ones[case.name]
            alone = way == "full copies" and count == 1
            result = one if alone else measured(case, bases[case.name], way, count, device, steps, rounds)
            record.add(row(case, way, count, result, one))
        except (RuntimeError, MemoryError, ValueError) as reason:  # the machine may be too small for it
            record.add({**entry, "reason": f"{type(reason).__name__}: {str(reason).splitlines()[0]}"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--members", type=int, nargs="+", default=[20, 1, 5], help="in the order of their measurement")
    parser.add_argument("--only", default="", help="networks whose name contains this")
    parser.add_argument("--budget", type=float, help="seconds after which no further row begins")
    parser.add_argument("--json", type=Path, help="also write the numbers here, after every row")
    parser.add_argument("--resume", action="store_true", help="keep the rows of the file, and measure the others")
    options = parser.parse_args()
    logging.getLogger("dissensus").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = device.type == "cuda"
    made = {
        **how_made(),
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "precision": "bf16" if on_gpu else "float32",
        "threads": str(torch.get_num_threads()),
        **{name: version for name, version in versions().items() if name != "peft"},
        "rounds": str(options.rounds),
        "operations a second of a large product": f"{product_rate(device):.0f}e9",
    }
    print(json.dumps(made), flush=True)
    networks = [case for case in cases(device) if options.only in case.name]
    record = Record(made, options.json, options.resume)
    measure(networks, options.members, options.rounds, 10 if on_gpu else 1, options.budget, device, record)


if __name__ == "__main__":
    main()
