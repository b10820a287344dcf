"""CIFAR-10: an ensemble of ResNet-20s by the ADP paper's protocol, timed from the first step to the last.

Three networks, batch 64, Adam with rate 1e-3 cut to a tenth at epochs 80, 120 and 160, shifts of ±10 % and flips,
inputs in [0, 1] less the training mean, L2 of 1e-4 (a penalty of 1e-4·|w|², here on all weights; the paper's code has
it on convolutions). Members are trained independently; the last epoch's weights are judged, on the test set, once.

Usage: python benchmarks/cifar10.py [--epochs 180] [--members 3] [--seed 0] [--json FILE]
"""

import argparse
import json
import platform
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from provenance import command_line, library

import dissensus as ds

augment = ds.data.augment.chain(partial(ds.data.augment.shifts, fraction=0.1), ds.data.augment.flips)
objective = partial(ds.objectives.independent, loss="cross_entropy")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=180)
    parser.add_argument("--members", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    x, y = ds.data.sources.load("cifar10", "train")
    test_x, test_y = ds.data.sources.load("cifar10", "test")
    images, tests = (part.to(device, torch.float32) / 255 for part in (x, test_x))
    mean = images.mean(0)
    images, tests, labels, test_labels = images - mean, tests - mean, y.to(device), test_y
    ensemble = ds.Ensemble(ds.nets.resnet20, options.members, seed=options.seed).to(device)
    marks: list[tuple[int, float]] = []

    def tell(moment: ds.Progress) -> None:
        if moment.step == moment.epoch * (moment.steps // moment.epochs):
            marks.append((moment.epoch, moment.seconds))
            if moment.epoch % 10 == 0 or moment.epoch <= 2:
                print(moment, f"{moment.seconds:.0f} s", flush=True)

    at = [round(options.epochs * share) for share in (80 / 180, 120 / 180, 160 / 180)]
    start = time.perf_counter()
    history = ds.fit(
        ensemble,
        (images, labels),
        objective,
        epochs=options.epochs,
        batch_size=64,
        lr=1e-3,
        optimizer="adam",
        weight_decay=2e-4,
        schedule=ds.train.schedules.step(at),
        augment=augment,
        progress=tell,
        seed=options.seed,
    )
    seconds = time.perf_counter() - start
    outputs = ensemble.predict(tests)
    wrong, nll = (
        ds.diversity.decompose(outputs, test_labels, loss=loss, pool="probability").ensemble.double().mean().item()
        for loss in ("zero_one", "cross_entropy")
    )
    result: dict[str, Any] = {
        "seconds": seconds,
        "steps": history.steps,
        "ms_per_step": 1e3 * seconds / history.steps,
        "backend": history.backend,
        "precision": history.precision,
        "memory": history.memory,
        "member_error": ds.losses.zero_one(outputs, test_labels).double().mean(1).tolist(),
        "ensemble_error": wrong,
        "ensemble_nll": nll,
        "final_loss": history.epochs[-1]["loss"],
    }
    made = {
        "command": command_line(),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        **library(),
        "epochs": options.epochs,
        "members": options.members,
        "seed": options.seed,
    }
    print(json.dumps(result, indent=1))
    if options.json:
        options.json.write_text(json.dumps({"made": made, **result}, indent=1) + "\n")


if __name__ == "__main__":
    main()
