"""The example of docs/audit.md and what `dissensus audit` prints of it: five digits classifiers, trained jointly.

Usage: python benchmarks/audit_example.py [--json FILE]
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
import torch
from provenance import how_made
from sklearn.datasets import load_digits

import dissensus as ds

SEED, EPOCHS = 0, 40
COMMAND = [
    "audit",
    "predictions.npz",
    "--task",
    "classification",
    "--kind",
    "logits",
    "--pool",
    "score",
    "--in-bag",
    "all",
    "--page",
    "audit.html",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    x, y = (torch.from_numpy(part) for part in load_digits(return_X_y=True))
    x = x.float() / 16
    train, test = (x[:1400], y[:1400]), (x[1400:], y[1400:])
    objective = partial(ds.objectives.augmented, loss="cross_entropy", pool="score", beta=1.0)
    ens = ds.Ensemble(partial(ds.nets.mlp, 64, 10, (30, 30)), members=5, seed=SEED)
    ds.fit(ens, train, objective, epochs=EPOCHS, batch_size=32, lr=2e-3, twin=True)
    result = {}
    for name, each in (("joint", ens), ("twin", ens.twin)):
        audit = ds.audit_estimator(each, *test, train=train, task="classification", pool="score")
        figures = {key: audit.test[key].value for key in ("accuracy", "member_accuracy")}
        result[name] = {"verdict": audit.verdict, "sentence": audit.sentence, **figures}
    with tempfile.TemporaryDirectory() as folder:
        np.savez(
            f"{folder}/predictions.npz",
            outputs=ens.predict(test[0]).numpy(),
            targets=test[1].numpy(),
            train_outputs=ens.predict(train[0]).numpy(),
            train_targets=train[1].numpy(),
        )
        done = subprocess.run(
            [sys.executable, "-m", "dissensus", *COMMAND],
            cwd=folder,
            env={**os.environ, "COLUMNS": "100"},
            capture_output=True,
            text=True,
            check=True,
        )
    printed = done.stdout.splitlines()
    made = {**how_made(), "seed": SEED, "epochs": EPOCHS}
    content = {"made": made, **result, "command": ["dissensus", *COMMAND], "printed": printed}
    print("\n".join(printed))
    if options.json:
        options.json.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
