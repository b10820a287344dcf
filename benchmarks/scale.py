"""What training costs over many processes: a model from measured steps and messages, checked against processes here.

A step of N processes takes the step of the largest part of the members, and what travels: outputs of all members, a
flag, with data parallelism the gradient of a member. The time of each is measured alone. The prediction is compared
with the whole step in one process (a number of members that the line was not drawn through) and in two. Beyond that the
rows are a model: steps on a card are those of `gpu.json` and `sweeps_gpu.json`, and everything under "assumed" is
neither measured nor guaranteed. Change it to what your machines do.

Usage: python benchmarks/scale.py [--json FILE]
"""

import argparse
import json
import logging
import math
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from provenance import how_made
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn

import dissensus as ds
from dissensus.execution.ranks import Ranks, several_ranks

RESULTS = Path(__file__).parent / "results"
MEMBERS = 8
STEPS, EPOCHS, ROUNDS = 10, 4, 5
CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int, str]] = {
    # network, shape of an input, batch size, backend
    "MLP 10-256-256-1, batch 128": (partial(ds.nets.mlp, 10, 1, (256, 256)), (10,), 128, "batched"),
    "CNN 8x8, batch 64": (partial(ds.nets.cnn, 1, 10, 8), (1, 8, 8), 64, "loop"),
}
ASSUMED: dict[str, float] = {
    "inside a machine, bytes a second": 300e9,
    "inside a machine, seconds a message": 20e-6,
    "between machines, bytes a second": 40e9,
    "between machines, seconds a message": 50e-6,
    "storage, bytes a second": 1e9,
    "start of a process, seconds": 30.0,
    "scheduling a task, seconds": 0.1,
    "ResNet-50 at 224, images a second": 2500.0,
}


def problem(name: str) -> tuple[Callable[..., Any], Tensor, Tensor]:
    """Objective, inputs and targets of a case: a few epochs of one batch after the other."""
    _, shape, batch, _ = CASES[name]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(batch * STEPS, *shape, generator=generator)
    if len(shape) == 1:
        y = torch.randn(len(x), 1, generator=generator)
        return partial(ds.objectives.augmented, beta=0.5, loss="squared_error", pool="score"), x, y
    y = torch.randint(10, (len(x),), generator=generator)
    return partial(ds.objectives.augmented, beta=0.5, loss="cross_entropy", pool="probability"), x, y


def step_seconds(name: str, members: int, parallel: Any = None) -> float:
    """The time of a step: the fastest epoch of a training, over its steps.

    In one process it is the time of its core, which other work on the machine changes little; with others, by the wall.
    Only the first process is told of epochs.
    """
    build, _, batch, backend = CASES[name]
    objective, x, y = problem(name)
    ensemble = ds.Ensemble(build, members, backend=backend)
    clock = time.process_time if parallel is None else time.perf_counter
    ends: list[float] = []
    settings = {"epochs": EPOCHS, "batch_size": batch, "lr": 1e-3, "parallel": parallel}
    ds.fit(ensemble, (x, y), objective, callbacks=[lambda _: ends.append(clock())], **settings)
    return min((later - earlier for earlier, later in pairwise(ends)), default=0.0) / STEPS


def collective_seconds(name: str, ranks: Ranks) -> float:
    """The time of what travels in a step: outputs of all members, and a flag."""
    _, shape, batch, _ = CASES[name]
    own = torch.zeros(ranks.counts[ranks.rank], batch, 1 if len(shape) == 1 else 10)
    flag = torch.ones(1, dtype=torch.bool)
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(STEPS):
            ranks.gathered(own)
            bool(ranks.agreed(flag))
        times.append((time.perf_counter() - start) / STEPS)
    return min(times)


def fastest(ways: Mapping[str, Callable[[], float]], wait: Callable[[], Any] = int) -> dict[str, float]:
    """The fastest of several rounds of each way, taken in turns, since other work may share the cores."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, way in ways.items():
            wait()
            times[name].append(way())
    return {name: min(seconds) for name, seconds in times.items()}


def two_processes(rank: int, port: int, folder: str) -> None:
    """One of two processes: its part alone, what travels alone, and the whole step."""
    torch.set_num_threads(1)
    logging.getLogger("dissensus").setLevel(logging.ERROR)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    rows = {}
    for name in CASES:
        with several_ranks(MEMBERS, torch.device("cpu")) as ranks:
            ways: dict[str, Callable[[], float]] = {
                "part": partial(step_seconds, name, MEMBERS // 2),  # while the other process computes too
                "travels": partial(collective_seconds, name, ranks),
                "measured": partial(step_seconds, name, MEMBERS, "members"),
            }
            rows[name] = fastest(ways, dist.barrier)
    Path(folder, f"{rank}.json").write_text(json.dumps(rows))
    dist.destroy_process_group()


@contextmanager
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def checked() -> list[dict[str, Any]]:
    """Predicted and measured steps of one process and of two, here."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, one_thread():
        for name in CASES:
            step_seconds(name, 2)
            sizes = (2, MEMBERS // 2, MEMBERS)
            few, some, many = fastest({str(count): partial(step_seconds, name, count) for count in sizes}).values()
            slope = (many - few) / (MEMBERS - 2)
            predicted = few + slope * (MEMBERS // 2 - 2)
            rows.append(checked_row(name, 1, MEMBERS // 2, predicted, some))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        spawn(two_processes, (port, folder), 2)
        both = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(2)]
    for name in CASES:
        slowest = max(each[name]["part"] for each in both)
        travels = max(each[name]["travels"] for each in both)
        row = checked_row(name, 2, MEMBERS, slowest + travels, max(each[name]["measured"] for each in both))
        rows.append({**row, "travels_ms": travels * 1e3})
    return rows


def checked_row(name: str, processes: int, members: int, predicted: float, measured: float) -> dict[str, Any]:
    return {
        "case": name,
        "processes": processes,
        "members": members,
        "predicted_ms": predicted * 1e3,
        "measured_ms": measured * 1e3,
        "error": predicted / measured - 1,
    }


def of_messages(numbers: float, place: str, messages: int = 1) -> float:
    """Seconds that numbers of four bytes take between processes."""
    return messages * ASSUMED[f"{place}, seconds a message"] + 4 * numbers / ASSUMED[f"{place}, bytes a second"]


def scenario(what: str, cards: int, seconds: Mapping[str, float]) -> dict[str, Any]:
    """A row of the model; the bottleneck is what takes most of the time."""
    total = sum(seconds.values())
    return {
        "what": what,
        "cards": cards,
        "hours": total / 3600,
        "shares": {name: part / total for name, part in seconds.items()},
        "bottleneck": max(seconds, key=lambda name: seconds[name]),
    }


def tasks(what: str, count: int, compute: float, stored_bytes: float, cards: int) -> dict[str, Any]:
    """Independent trainings, one after the other on every card; all cards write to one storage."""
    turns = math.ceil(count / cards)
    seconds = {
        "computing": turns * compute,
        "starting processes": ASSUMED["start of a process, seconds"],
        "scheduling": count * ASSUMED["scheduling a task, seconds"],
        "storage": count * stored_bytes / ASSUMED["storage, bytes a second"],
    }
    return scenario(what, cards, seconds)


def model() -> list[dict[str, Any]]:
    """Costs on cards, from steps that were measured on one."""
    steps = {
        (row["case"], row["members"], row["batch"]): row["ways"]["auto"]["ms"] / 1e3 for row in read("gpu")["rows"]
    }
    sweeps = {row["runs"]: row["sweep_ms"] / 1e3 for row in read("sweeps_gpu")["rows"]}
    rows = []
    # 100 epochs of 1,000 rows at batch 32, in groups of 1,100 runs; weights and two moments are stored.
    weights = 1100 * 20 * sum(parameter.numel() for parameter in ds.nets.mlp(10, 1, (30, 30)).parameters())
    for cards in (1, 8, 64):
        compute = 100 * math.ceil(1000 / 32) * sweeps[1100]
        rows.append(tasks("100,000 runs × 20 MLPs", math.ceil(1e5 / 1100), compute, 4 * 3 * weights, cards))
    # 200 epochs of 50,000 images at batch 64.
    resnet20 = sum(parameter.numel() for parameter in ds.nets.resnet20().parameters())
    epochs = 200 * math.ceil(50_000 / 64)
    for cards in (1, 8, 64):
        compute = epochs * steps["ResNet-20", 5, 64]
        rows.append(tasks("1,000 ensembles of 5 ResNet-20, CIFAR-10", 1000, compute, 4 * 3 * 5 * resnet20, cards))
    for cards, members in ((1, 20), (4, 5), (20, 1)):
        travels = 0.0 if cards == 1 else of_messages(20 * 64 * 10, "inside a machine", 2)
        seconds = {"computing": epochs * steps["ResNet-20", members, 64], "outputs and flags": epochs * travels}
        row = scenario("one ensemble of 20 ResNet-20, CIFAR-10, over cards", cards, seconds)
        rows.append({**row, "bytes_of_outputs": 4 * 20 * 64 * 10, "bytes_of_gradients": 4 * 20 * resnet20})
    # 90 epochs of 1,281,167 images, batch 256: 8 members, each on the 8 cards of a machine.
    members, batch, classes, weights = 8, 256, 1000, 25_557_032
    count = 90 * math.ceil(1_281_167 / batch)
    outputs = members * batch * classes
    seconds = {
        "computing": count * batch / 8 / ASSUMED["ResNet-50 at 224, images a second"],
        "gradients inside a machine": count * of_messages(2 * 7 / 8 * weights, "inside a machine"),
        "outputs between machines": count * of_messages(outputs, "between machines", 2),
    }
    row = scenario("8 ResNet-50, ImageNet, 8 machines of 8 cards", 64, seconds)
    return [*rows, {**row, "bytes_of_outputs": 4 * outputs, "bytes_of_gradients": 4 * members * weights}]


def read(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json")
    arguments = parser.parse_args()
    logging.getLogger("dissensus").setLevel(logging.ERROR)
    made = {**how_made(), "steps on a card": f"{read('gpu')['made']['device']}, gpu.json and sweeps_gpu.json"}
    result = {"made": made, "assumed": ASSUMED, "checked": checked(), "model": model()}
    for row in (*result["checked"], *result["model"]):
        print(row)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(result, indent=1) + "\n")
