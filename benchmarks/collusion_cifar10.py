"""Figures 6 and 17 of the collusion paper on all of CIFAR-10: five ResNet-18, trained to convergence.

One unit of work is one β and one seed: 30 epochs of SGD with momentum and a cosine schedule on the 50,000 training
images, random crops, flips and rotations, batch 128, weight decay 5e-4; the last epoch's weights are judged. (The paper
trains for 80 epochs with three cuts of the learning rate, and keeps the best epoch on held-out data.) Each unit leaves
one file with member outputs in half precision: of all test images, and of the first 10,000 training images as they are.

`summary` computes every measure from these files: accuracies and the decomposition. `--keep` leaves the outputs of the
first 2,000 test and 1,000 training images in a file per unit; of these, earlier units included, it tells what the
audit says, with and without training outputs and with the ensemble of β = 0 of the same seed as reference.

Usage: python benchmarks/collusion_cifar10.py train --beta 0 0.5 --seed 0 --to FOLDER [--epochs 30]
       python benchmarks/collusion_cifar10.py summary FOLDER --json benchmarks/results/collusion_cifar10.json \
           --keep benchmarks/results/collusion_cifar10
"""

import argparse
import json
import platform
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from provenance import command_line, library
from torch import Tensor

import dissensus as ds

MEMBERS, EPOCHS, OF_TRAIN, KEPT = 5, 30, 10_000, 2_000
MEAN, DEVIATION = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
augment = ds.data.augment.chain(ds.data.augment.crops, ds.data.augment.flips, ds.data.augment.rotations)


def loaded(part: str, device: torch.device) -> tuple[Tensor, Tensor]:
    x, y = ds.data.sources.load("cifar10", part)
    mean, deviation = (torch.tensor(numbers, device=device).view(3, 1, 1) for numbers in (MEAN, DEVIATION))
    return (x.to(device, torch.float32) / 255 - mean) / deviation, y.to(device)


def train(options: argparse.Namespace) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    images, tests = loaded("train", device), loaded("test", device)
    options.to.mkdir(parents=True, exist_ok=True)
    for seed in options.seed:
        for beta in options.beta:
            start = time.perf_counter()
            ensemble = ds.Ensemble(ds.nets.resnet18, MEMBERS, seed=seed).to(device)
            objective = partial(ds.objectives.augmented, beta=beta, loss="cross_entropy", pool="probability")
            history = ds.fit(
                ensemble,
                images,
                objective,
                epochs=options.epochs,
                batch_size=128,
                lr=0.1,
                optimizer="sgd",
                momentum=0.9,
                weight_decay=5e-4,
                schedule="cosine",
                augment=augment,
                seed=seed,
            )
            trained = time.perf_counter() - start
            outputs, of_train = ensemble.predict(tests[0]), ensemble.predict(images[0][:OF_TRAIN])
            made = {
                "beta": beta,
                "seed": seed,
                "epochs": options.epochs,
                "members": MEMBERS,
                "seconds": trained,
                "steps": history.steps,
                "backend": history.backend,
                "precision": history.precision,
                "loss_by_epoch": [round(entry["loss"], 4) for entry in history.epochs],
                "command": command_line(),
                "python": platform.python_version(),
                "torch": torch.__version__,
                "device": torch.cuda.get_device_name() if device.type == "cuda" else platform.machine(),
                **library(),
            }
            np.savez(
                options.to / f"beta-{beta:g}-seed-{seed}.npz",
                outputs=outputs.half().numpy(),
                train_outputs=of_train.half().numpy(),
                made=json.dumps(made),
            )
            accuracy = (ds.pooling.mean_probability(outputs).argmax(-1) == tests[1].cpu()).double().mean().item()
            print(f"β = {beta:g}, seed {seed}: accuracy {accuracy:.4f}, {trained:.0f} s", flush=True)


def measures(outputs: Tensor, labels: Tensor) -> dict[str, Any]:
    parts = ds.diversity.decompose(outputs, labels, loss="cross_entropy", pool="probability")
    members = (outputs.argmax(-1) == labels).double().mean(1)
    pooled = ds.pooling.mean_probability(outputs)
    return {
        "accuracy": (pooled.argmax(-1) == labels).double().mean().item(),
        "member_accuracy": members.tolist(),
        "error": parts.ensemble.double().mean().item(),
        "individual": parts.individual.double().mean().item(),
        "diversity": parts.diversity.double().mean().item(),
        "calibration_error": ds.metrics.calibration(pooled, labels).error,
    }


def summary(options: argparse.Namespace) -> None:
    """Measures of new units from all their outputs; audits of all units, old and new, from what is kept of them."""
    labels, train_labels = (ds.data.sources.load("cifar10", part)[1] for part in ("test", "train"))
    units: dict[tuple[float, int], dict[str, Any]] = {}
    if options.json.exists():
        for unit in json.loads(options.json.read_text())["units"]:
            units[unit["made"]["beta"], unit["made"]["seed"]] = unit
    options.keep.mkdir(parents=True, exist_ok=True)
    for file in sorted(options.folder.glob("beta-*.npz")):
        arrays = np.load(file)
        made = json.loads(str(arrays["made"]))
        made["command"] = made["command"].partition(" --to")[0]  # nobody's business where it went
        outputs, of_train = (torch.from_numpy(arrays[name]).float() for name in ("outputs", "train_outputs"))
        units[made["beta"], made["seed"]] = {
            "made": made,
            "test": measures(outputs, labels),
            "train": measures(of_train, train_labels[:OF_TRAIN]),
        }
        np.savez_compressed(
            options.keep / file.name,
            outputs=arrays["outputs"][:, :KEPT],
            targets=labels[:KEPT].numpy(),
            train_outputs=arrays["train_outputs"][:, : KEPT // 2],
            train_targets=train_labels[: KEPT // 2].numpy(),
        )
    for (beta, seed), unit in sorted(units.items()):
        unit["audit"] = audits(options.keep, beta, seed)
        verdicts = ", ".join(f"{way}: {audit['verdict']}" for way, audit in unit["audit"].items())
        print(f"β = {beta:g}, seed {seed}: {unit['test']['accuracy']:.4f}; {verdicts}")
    ordered = [unit for _, unit in sorted(units.items())]
    options.json.write_text(json.dumps({"units": ordered}, indent=1) + "\n")


def audits(folder: Path, beta: float, seed: int) -> dict[str, dict[str, Any]]:
    """What the audit says of a unit: alone, with training outputs, with β = 0 of the same seed as reference."""
    kept = np.load(folder / f"beta-{beta:g}-seed-{seed}.npz")
    train = {"train": (kept["train_outputs"], kept["train_targets"]), "in_bag": "all"}
    ways: dict[str, dict[str, Any]] = {"alone": {}, "with training outputs": train}
    alone = folder / f"beta-0-seed-{seed}.npz"
    if beta != 0 and alone.exists():
        ways["with a reference"] = {"reference": np.load(alone)["outputs"]}
        ways["with both"] = ways["with a reference"] | train
    verdicts = {}
    for way, more in ways.items():
        audit = ds.audit(kept["outputs"], kept["targets"], task="classification", kind="logits", **more)
        verdicts[way] = {"verdict": audit.verdict, "reasons": audit.judgement.reasons}
    return verdicts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    training = commands.add_parser("train")
    training.add_argument("--beta", type=float, nargs="+", required=True)
    training.add_argument("--seed", type=int, nargs="+", default=[0])
    training.add_argument("--epochs", type=int, default=EPOCHS)
    training.add_argument("--to", type=Path, required=True)
    training.set_defaults(run=train)
    telling = commands.add_parser("summary")
    telling.add_argument("folder", type=Path)
    telling.add_argument("--json", type=Path, required=True)
    telling.add_argument("--keep", type=Path, required=True)
    telling.set_defaults(run=summary)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
