"""Kill a training with SIGKILL at random moments, resume it every time, and print what is left.

Usage: python kill_and_resume.py fit|sweep FOLDER SEED. Each attempt is a process of its own (forked, so that torch is
imported once). Prints JSON: kills, and checksums of the weights with and without interruptions.
"""

import hashlib
import json
import os
import random
import signal
import sys
import time
from functools import partial
from pathlib import Path

import torch

import dissensus as ds

torch.set_num_threads(1)
KILLS = 10


def build():
    return torch.nn.Sequential(
        torch.nn.Linear(6, 16), torch.nn.BatchNorm1d(16), torch.nn.ReLU(), torch.nn.Dropout(0.3), torch.nn.Linear(16, 1)
    )


def noisy(x, generator):
    return x + 0.1 * torch.randn(x.shape, generator=generator)


def data():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(90, 6, generator=generator)
    return x, x[:, :1] * x[:, 1:2] + 0.5 * torch.randn(90, 1, generator=generator)


objective = partial(ds.objectives.augmented, loss="mse", pool="score")


def train(kind, folder, resume):
    """Train to the end and return the bytes of all weights, and the record."""
    options = {
        "epochs": 40,
        "batch_size": 16,
        "validation": 0.2,
        "patience": 30,
        "augment": noisy,
        "schedule": "cosine",
    }
    saving = {"checkpoint": folder, "resume": resume, "checkpoint_seconds": 0.0} if folder else {}
    if kind == "fit":
        ensemble = ds.Ensemble(build, 3, backend="vmap")
        history = ds.fit(ensemble, data(), partial(objective, beta=0.5), **options, **saving)
        bodies, records = [ensemble.body], [history.epochs]
    else:
        grid = {"beta": [0.0, 0.9], "lr": [0.001, 0.1], "seed": [0, 1]}
        options = {**options, "epochs": 25, "patience": 3, "backend": "vmap", "max_memory": 150_000}  # two parts
        swept = ds.sweep(build, data(), objective, grid=grid, members=3, **options, **saving)
        bodies, records = [group.body for group in swept.groups], [swept.history(i).epochs for i in range(len(swept))]
    digest = hashlib.sha256()
    for body in bodies:
        for name, tensor in sorted(body.tensors().items()):
            digest.update(name.encode() + tensor.detach().contiguous().numpy().tobytes())
    for entry in (entry for record in records for entry in record):
        entry.pop("seconds")
    record = hashlib.sha256(json.dumps(records, sort_keys=True).encode()).hexdigest()
    return {"weights": digest.hexdigest(), "record": record, "parts": len(bodies)}


def attempt(kind, folder, delay):
    """Train in a child for some seconds; None if it had to be killed."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read_end)
        result = json.dumps(train(kind, folder, resume=True))
        os.write(write_end, result.encode())
        os._exit(0)
    os.close(write_end)
    deadline = time.monotonic() + delay
    while time.monotonic() < deadline:
        if os.waitpid(child, os.WNOHANG)[0]:
            return json.loads(os.read(read_end, 10_000))
        time.sleep(0.001)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def main():
    kind, folder, seed = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    random.seed(seed)
    start = time.monotonic()
    # In a child, as all others: where there is a GPU, no child can run a backward pass after one of its parent's.
    expected = attempt(kind, None, 600.0)
    duration = time.monotonic() - start
    kills, result = 0, None
    while result is None:
        result = attempt(kind, folder, random.uniform(0.02, duration / 4) if kills < KILLS else 600.0)
        if result is None:
            kills += 1
        elif kills < KILLS:  # it got to its end too soon: once more, from the beginning
            folder, result = folder / "again", None
    print(json.dumps({"kills": kills, "expected": expected, "result": result}))


if __name__ == "__main__":
    main()
