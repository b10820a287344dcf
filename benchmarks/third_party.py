"""Networks of torch and of other libraries as members: which backends run them, and how fast a training step is.

A step is forward pass, loss, backward pass and AdamW. By hand these are M modules and M optimisers in a Python loop.
The others are one `Ensemble` under one optimiser. One process, interleaved rounds, medians. On a GPU all compute
in bf16 autocast, and "fit" is a step of `dissensus.fit`, which captures it. Before that, outputs and gradients of every
backend are compared with those of the separate modules, in float32 and without dropout.

Rows whose package or device is not there are recorded with the reason. Numbers that were taken beside other work are
not clean, so every row has the load of the machine (the number of processes that wanted to run, in the last minute).

Usage: python benchmarks/third_party.py [--rounds 9] [--members 5] [--gpu-only] [--json FILE]
"""

import argparse
import contextlib
import gc
import importlib
import importlib.metadata
import json
import logging
import os
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from provenance import how_made
from torch import Tensor, nn
from torch.nn import functional as F

import dissensus as ds

BACKENDS = ("loop", "vmap", "batched", "auto")
STEPS, EPOCHS = 20, 6
"""How `fit` is timed on a GPU: the first epochs measure backends and capture the step."""
PACKAGES = ("transformers", "peft", "timm")
Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """A network, a batch for it, and what it needs."""

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    output: str | int | Callable[[Any], Tensor] | None = None
    packages: tuple[str, ...] = ()
    on_gpu_only: bool = False

    def missing(self, device: torch.device) -> str:
        """Why the case cannot run here; empty if it can."""
        for package in self.packages:
            try:
                importlib.import_module(package)
            except Exception as reason:  # a package that is there may fail to load
                return f"{package}: {str(reason).splitlines()[0]}"
        return "needs a GPU" if self.on_gpu_only and device.type != "cuda" else ""


class LastState(nn.Module):
    """A recurrent layer and a head on its last state."""

    def __init__(self, kind: Callable[..., nn.RNNBase], **settings: Any) -> None:
        super().__init__()
        self.layer = kind(16, 32, batch_first=True, **settings)
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x)[0][:, -1])


class MeanState(nn.Module):
    """A transformer encoder and a head on the mean of its states."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.first, self.head = nn.Linear(16, 32), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.first(x)).mean(1))


def spectral() -> nn.Module:
    norm = nn.utils.parametrizations.spectral_norm
    layers = norm(nn.Linear(16, 64)), nn.ReLU(), norm(nn.Linear(64, 64)), nn.ReLU(), norm(nn.Linear(64, 10))
    return nn.Sequential(*layers)


def weight_normed() -> nn.Module:
    norm = nn.utils.parametrizations.weight_norm
    return nn.Sequential(norm(nn.Linear(16, 64)), nn.ReLU(), norm(nn.Linear(64, 10)))


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def sequences() -> Batch:
    return {"x": drawn(32, 12, 16)}


def tokens(batch: int = 16, length: int = 32, vocabulary: int = 1000) -> Batch:
    ids = torch.randint(0, vocabulary, (batch, length), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def pixels(batch: int = 16, size: int = 32) -> Batch:
    return {"pixel_values": drawn(batch, 3, size, size)}


def of_transformers(model: str, config: str, **settings: Any) -> Callable[[], nn.Module]:
    """A model from a config, with new weights; nothing is downloaded."""

    def build() -> nn.Module:
        library: Any = importlib.import_module("transformers")
        return getattr(library, model)(getattr(library, config)(**settings))

    return build


def sizes(width: int, layers: int, heads: int) -> dict[str, int]:
    return {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": 4 * width,
    }


def bert(width: int, layers: int, heads: int) -> Callable[[], nn.Module]:
    rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    settings = {"vocab_size": 1000, "num_labels": 10, **sizes(width, layers, heads), **rates}
    return of_transformers("BertForSequenceClassification", "BertConfig", **settings)


def gpt2(width: int, layers: int, heads: int) -> Callable[[], nn.Module]:
    rates = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    words = {"vocab_size": 1000, "bos_token_id": 0, "eos_token_id": 0, "n_positions": 128}
    settings = {"n_embd": width, "n_layer": layers, "n_head": heads, **words, **rates}
    return of_transformers("GPT2LMHeadModel", "GPT2Config", **settings)


def vit(width: int, layers: int, heads: int, size: int) -> Callable[[], nn.Module]:
    settings = {"image_size": size, "patch_size": 8, "num_labels": 10, **sizes(width, layers, heads)}
    rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return of_transformers("ViTForImageClassification", "ViTConfig", **settings, **rates)


def lora(width: int, layers: int, heads: int) -> Callable[[], nn.Module]:
    """A frozen BERT with trainable adapters and a trainable head."""

    def build() -> nn.Module:
        peft: Any = importlib.import_module("peft")
        settings = {"target_modules": ["query", "value"], "modules_to_save": ["classifier"], "lora_dropout": 0.0}
        return peft.get_peft_model(bert(width, layers, heads)(), peft.LoraConfig(r=4, **settings))

    return build


def of_timm(name: str) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        library: Any = importlib.import_module("timm")
        return library.create_model(name, pretrained=False, num_classes=10)

    return build


def image() -> Batch:
    return {"x": drawn(32, 3, 224, 224)}


def small_image() -> Batch:
    return {"x": drawn(128, 3, 32, 32)}


TRANSFORMERS = ("transformers",)
CASES = [
    Case("nn.LSTM 16-32", lambda: LastState(nn.LSTM), sequences),
    Case("nn.GRU 16-32, 2 layers", lambda: LastState(nn.GRU, num_layers=2), sequences),
    Case("nn.TransformerEncoder, width 32", MeanState, sequences),
    Case("spectral norm, MLP 16-64-64-10", spectral, lambda: {"input": drawn(32, 16)}),
    Case("weight norm, MLP 16-64-10", weight_normed, lambda: {"input": drawn(32, 16)}),
    Case("BERT, width 64, 2 layers", bert(64, 2, 4), tokens, "logits", TRANSFORMERS),
    Case("GPT-2, width 64, 2 layers", gpt2(64, 2, 4), tokens, "logits", TRANSFORMERS),
    Case("ViT, width 64, 2 layers, 32x32", vit(64, 2, 4, 32), pixels, "logits", TRANSFORMERS),
    Case("LoRA on BERT, width 64, 2 layers", lora(64, 2, 4), tokens, "logits", ("transformers", "peft")),
    Case("timm ResNet-18, 32x32", of_timm("resnet18"), small_image, None, ("timm",), on_gpu_only=True),
    Case("timm ResNet-18, 224x224", of_timm("resnet18"), image, None, ("timm",), on_gpu_only=True),
    Case("timm ViT-Ti/16, 224x224", of_timm("vit_tiny_patch16_224"), image, None, ("timm",), on_gpu_only=True),
    Case("timm ConvNeXt-T, 224x224", of_timm("convnext_tiny"), image, None, ("timm",), on_gpu_only=True),
    Case("BERT base", bert(768, 12, 12), lambda: tokens(32, 128), "logits", TRANSFORMERS, on_gpu_only=True),
    Case("GPT-2 small", gpt2(768, 12, 12), lambda: tokens(8, 128), "logits", TRANSFORMERS, on_gpu_only=True),
    Case("LoRA on BERT base", lora(768, 12, 12), tokens, "logits", ("transformers", "peft"), on_gpu_only=True),
]


def loss_of(outputs: Tensor) -> Tensor:
    """Cross-entropy of a member's logits against class 1, at every place of a dense output."""
    flat = outputs.flatten(0, -2)
    return F.cross_entropy(flat, torch.ones(len(flat), dtype=torch.int64, device=flat.device))


def objective(outputs: Tensor, _targets: Tensor) -> ds.LossParts:
    """The loss of the other ways, summed over members."""
    total = len(outputs) * loss_of(outputs)
    return ds.LossParts(total, {})


def autocast(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """What networks are trained in: bf16 where they run on a GPU."""
    return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else contextlib.nullcontext()


def part(case: Case, output: Any) -> Tensor:
    return output if case.output is None else output.logits


def ensemble_of(case: Case, members: int, backend: str, device: torch.device) -> ds.Ensemble:
    return ds.Ensemble(case.build, members, backend=backend, output=case.output).to(device)


def positional(case: Case, batch: Batch) -> tuple[tuple[Tensor, ...], Batch]:
    """Networks of torch take their input without a name."""
    return ((), batch) if case.output is not None else (tuple(batch.values()), {})


def by_hand(case: Case, modules: list[nn.Module], batch: Batch) -> Callable[[], None]:
    """M modules and M optimisers in a Python loop."""
    trained = [[p for p in module.parameters() if p.requires_grad] for module in modules]
    optimisers = [torch.optim.AdamW(parameters, lr=1e-4) for parameters in trained]
    args, kwargs = positional(case, batch)
    device = next(iter(batch.values())).device

    def step() -> None:
        for module, optimiser in zip(modules, optimisers, strict=True):
            optimiser.zero_grad()
            with autocast(device):
                loss = loss_of(part(case, module(*args, **kwargs)))
            loss.backward()
            optimiser.step()

    return step


def stacked(case: Case, ens: ds.Ensemble, batch: Batch) -> Callable[[], None]:
    """One ensemble and one optimiser."""
    optimiser = torch.optim.AdamW([p for p in ens.parameters() if p.requires_grad], lr=1e-4)
    args, kwargs = positional(case, batch)
    device = next(iter(batch.values())).device

    def step() -> None:
        optimiser.zero_grad()
        with autocast(device):
            outputs = ens(*args, **kwargs)
            loss = len(ens) * loss_of(outputs)
        loss.backward()  # the mean over members and examples, times members
        optimiser.step()

    return step


def fitted(case: Case, members: int, batch: Batch, device: torch.device) -> dict[str, Any]:
    """Median milliseconds of a step of `fit` on one repeated batch, and the backend that it chose."""
    rows = len(next(iter(batch.values())))
    inputs = {name: tensor.repeat(STEPS, *[1] * (tensor.ndim - 1)) for name, tensor in batch.items()}
    data = (
        inputs if case.output is not None else next(iter(inputs.values())),
        torch.zeros(rows * STEPS, device=device),
    )
    ends: list[float] = []

    def mark(moment: ds.Progress) -> None:
        if moment.step % STEPS == 0:
            torch.cuda.synchronize()
            ends.append(time.perf_counter())

    settings = {"optimizer": "adamw", "lr": 1e-4, "precision": "bf16"}
    ens = ensemble_of(case, members, "auto", device)
    history = ds.fit(ens, data, objective, epochs=EPOCHS, batch_size=rows, progress=mark, **settings)
    times = [1e3 * (b - a) / STEPS for a, b in pairwise(ends[2:])]
    return {"milliseconds": median(times), "backend": history.backend}


def largest_difference(case: Case, ens: ds.Ensemble, batch: Batch) -> float:
    """The largest difference between outputs and gradients of a backend and those of separate modules, relatively."""
    modules = [ens.member(i).train() for i in range(len(ens))]
    args, kwargs = positional(case, batch)
    outputs = ens.train()(*args, **kwargs)
    separate = torch.stack([part(case, module(*args, **kwargs)) for module in modules])
    (len(ens) * loss_of(outputs)).backward()
    torch.stack([loss_of(output) for output in separate]).sum().backward()
    gradients = {name: p.grad for name, p in ens.body.tensors().items() if isinstance(p, nn.Parameter)}
    pairs = [(outputs, separate)]
    for name in gradients:
        alone = [dict(module.named_parameters())[name].grad for module in modules]
        grads = [grad for grad in alone if grad is not None]
        stacked_grad = gradients[name]
        if stacked_grad is not None and grads:
            pairs.append((stacked_grad, torch.stack(grads)))
    scale = [reference.detach().abs().amax().clamp_min(1e-3) for _, reference in pairs]
    ens.zero_grad()
    return max(float((a - b).detach().abs().amax() / size) for (a, b), size in zip(pairs, scale, strict=True))


def measured(candidates: dict[str, Callable[[], None]], rounds: int, device: torch.device) -> dict[str, float]:
    """Median milliseconds of each candidate, taken in turns."""
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for turn in range(rounds + 2):
        for name, run in candidates.items():
            start = time.perf_counter()
            run()
            if device.type == "cuda":
                torch.cuda.synchronize()
            if turn > 1:
                times[name].append(1e3 * (time.perf_counter() - start))
    return {name: median(values) for name, values in times.items()}


def row(case: Case, members: int, rounds: int, device: torch.device) -> dict[str, Any]:
    """What one network gave: times, differences, and the reasons of backends that do not run it."""
    missing = case.missing(device)
    if missing:
        return {"case": case.name, "missing": missing}
    batch = {name: tensor.to(device) for name, tensor in case.batch().items()}
    backends = (*BACKENDS[:-1], "streams", BACKENDS[-1]) if device.type == "cuda" else BACKENDS
    ensembles = {backend: ensemble_of(case, members, backend, device) for backend in backends}
    with full_precision():
        differences = {backend: largest_difference(case, ens, batch) for backend, ens in ensembles.items()}
    taken = {backend: ens.body.ran for backend, ens in ensembles.items()}
    refused = {
        backend: ens.choices[0].refused[backend]
        for backend, ens in ensembles.items()
        if backend != "auto" and backend in ens.choices[0].refused
    }
    ran = {backend: ens for backend, ens in ensembles.items() if backend not in refused}
    modules = [ensembles["loop"].member(i).train() for i in range(members)]
    candidates = {"by hand": by_hand(case, modules, batch)}
    candidates |= {backend: stacked(case, ens.train(), batch) for backend, ens in ran.items()}
    times = measured(candidates, rounds, device)
    result = {
        "case": case.name,
        "members": members,
        "milliseconds": times,
        "auto": taken["auto"],
        "refused": refused,
        "differences": {backend: differences[backend] for backend in ran},
        "load": os.getloadavg()[0],
    }
    del ensembles, ran, modules, candidates
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
        result["fit"] = fitted(case, members, batch, device)
    return result


@contextlib.contextmanager
def full_precision() -> Iterator[None]:
    """Convolutions and products without TF32, for comparisons to rounding."""
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = before


def versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--members", type=int, default=5)
    parser.add_argument("--gpu-only", action="store_true", help="only networks that are too large for a CPU")
    parser.add_argument("--only", nargs="+", default=[], help="networks to run; rows of others stay as a file has them")
    parser.add_argument("--json", type=Path, help="also write the numbers here, after every row")
    options = parser.parse_args()
    logging.getLogger("dissensus").setLevel(logging.ERROR)  # which backends refuse a network is in the table
    warnings.simplefilter("ignore")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    made = {
        **how_made(),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        **versions(),
        "rounds": options.rounds,
    }
    print(", ".join(f"{name} {value}" for name, value in made.items()))
    names = [case.name for case in CASES]
    rows = []
    if options.only and options.json and options.json.exists():
        rows = [row for row in json.loads(options.json.read_text())["rows"] if row["case"] not in options.only]
    for case in CASES:
        if (options.gpu_only and not case.on_gpu_only) or (options.only and case.name not in options.only):
            continue
        try:
            rows.append(row(case, options.members, options.rounds, device))
        except Exception as reason:  # one network that fails does not cost the rows of the others
            rows.append({"case": case.name, "missing": f"{type(reason).__name__}: {str(reason).splitlines()[0]}"})
        rows[-1]["source"] = made["source"]
        gc.collect()
        print(json.dumps(rows[-1]), flush=True)
        rows.sort(key=lambda row: names.index(row["case"]))
        if options.json:
            options.json.write_text(json.dumps({"made": made, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
