"""Members that share weights: how much memory their weights take, and how long a training step is, beside one network.

Ways: full copies; LoRA (rank 8 on query and value) and heads on a frozen network; BatchEnsemble, which trains what is
shared. Memory counts weights, gradients and the two moments of Adam; activations are what autograd keeps for a step.
Both are multiples of those of one network. A step is that of `dissensus.fit`: forward pass, objective, backward pass
and AdamW. Times are medians of rounds in one process, and ratios are taken to one network in the same process.

Usage: python benchmarks/sharing.py [--rounds 5] [--members 1 5 20] [--json FILE]
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from provenance import how_made
from third_party import bert, pixels, tokens, vit
from torch import Tensor, nn

import dissensus as ds

independent = partial(ds.objectives.independent, loss="cross_entropy")
WAYS = ("full copies", "LoRA", "heads", "BatchEnsemble")
Inputs = dict[str, Tensor]


def networks(device: torch.device) -> dict[str, tuple[Callable[[], nn.Module], Callable[[], Inputs]]]:
    """Networks with new weights, and a batch for each; larger ones on a GPU."""
    if device.type == "cuda":
        return {
            "ViT, width 384, 12 layers, 224x224": (vit(384, 12, 6, 224), lambda: pixels(32, 224)),
            "BERT, width 768, 12 layers": (bert(768, 12, 12), lambda: tokens(32, 128)),
        }
    return {
        "ViT, width 192, 6 layers, 32x32": (vit(192, 6, 3, 32), lambda: pixels(16, 32)),
        "BERT, width 128, 4 layers": (bert(128, 4, 4), lambda: tokens(16, 32)),
    }


def with_head(network: nn.Module) -> nn.Module:
    """The network with all but its classifier frozen."""
    for name, parameter in network.named_parameters():
        parameter.requires_grad_(name.startswith("classifier"))
    return network


def ensemble(way: str, build: Callable[[], nn.Module], members: int) -> ds.Ensemble:
    """Members made in one of the ways."""
    base = build()
    attention = [name for name, _ in base.named_modules() if name.endswith(("query", "value", "q_proj", "v_proj"))]
    make: dict[str, tuple[Callable[[], nn.Module], Any]] = {
        "full copies": (build, None),
        "LoRA": (lambda: ds.adapters.lora(base, 8, attention, trained=["classifier.*"]), "frozen"),
        "heads": (lambda: with_head(build()), "frozen"),
        "BatchEnsemble": (lambda: ds.adapters.batch_ensemble(base), ds.adapters.SHARED),
    }
    network, shared = make[way]
    return ds.Ensemble(network, members, output="logits", shared=shared)


def held(ens: ds.Ensemble) -> int:
    """Numbers that weights take, with gradients and two moments of those that are trained."""
    return sum(p.numel() * (4 if p.requires_grad else 1) for p in ens.parameters())


def kept(ens: ds.Ensemble, inputs: Inputs) -> int:
    """Numbers that autograd keeps between the forward and the backward pass, weights left out."""
    own = {p.untyped_storage().data_ptr() for p in ens.parameters()}
    seen: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        memory = tensor.untyped_storage()
        if memory.data_ptr() not in own:
            seen[memory.data_ptr()] = memory.nbytes() // 4
        return tensor

    ens.train()(**inputs)  # the backend is chosen
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        outputs = ens(**inputs)
    del outputs
    return sum(seen.values())


def seconds(ens: ds.Ensemble, inputs: Inputs, labels: Tensor, rounds: int) -> float:
    """The median time of a step."""
    times: list[float] = []

    class Clock:
        def __init__(self) -> None:
            self.last = 0.0

        def __call__(self, progress: ds.Progress) -> None:
            if labels.is_cuda:
                torch.cuda.synchronize()
            now = time.perf_counter()
            if progress.epoch > 2:  # the first steps choose a backend, and capture
                times.append(now - self.last)
            self.last = now

    ds.fit(ens, (inputs, labels), independent, epochs=rounds + 2, batch_size=len(labels), lr=1e-4, progress=Clock())
    return median(times)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--members", type=int, nargs="+", default=[1, 5, 20])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = []
    for name, (build, batch) in networks(device).items():
        inputs = {key: tensor.to(device) for key, tensor in batch().items()}
        labels = torch.arange(len(next(iter(inputs.values()))), device=device) % 10
        one = ds.Ensemble(build, 1, output="logits").to(device)
        base = {"held": held(one), "kept": kept(one, inputs), "seconds": seconds(one, inputs, labels, options.rounds)}
        for way in WAYS:
            for members in options.members:
                ens = ensemble(way, build, members).to(device)
                row = {
                    "network": name,
                    "way": way,
                    "members": members,
                    "numbers": base["held"],
                    "held": held(ens) / base["held"],
                    "kept": kept(ens, inputs) / max(1, base["kept"]),
                    "milliseconds": 1e3 * seconds(ens, inputs, labels, options.rounds),
                    "one_milliseconds": 1e3 * base["seconds"],
                    "backend": ens.choices[-1].backend if ens.choices else "",
                    "load": os.getloadavg()[0],
                }
                rows.append(row)
                print(
                    {key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()},
                    flush=True,
                )
    made = how_made() | {"device": str(device), "threads": str(torch.get_num_threads()), "rounds": str(options.rounds)}
    if options.json is not None:
        options.json.write_text(json.dumps({"made": made, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
