"""What training costs over many processes and machines: models that are checked against processes here.

One ensemble: a step of N processes takes the step of the largest part of the members, and what travels: outputs of all
members, a flag, with data parallelism the gradient of a member. The time of each is measured alone. The prediction is
compared with the whole step in one process (a number of members that the line was not drawn through) and in two.

A sweep on a cluster: `simulator.py` deals tasks out to workers. What a cluster costs beside computing is measured by
tiny sweeps on a Ray cluster of one worker here, and computing in this process. The prediction is compared with whole
sweeps on clusters of one worker and of two.

Beyond that the rows are a model: steps on a card are those of `gpu.json` and `sweeps_gpu.json`, and everything under
"assumed" is neither measured nor guaranteed. Change it to what your machines do.

Usage: python benchmarks/scale.py [--only processes | sweeps] [--json FILE]

With ``--only`` the other check is left as FILE has it.
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
from simulator import Costs, Work, shares, simulated
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn

import dissensus as ds
from dissensus.execution.ranks import Ranks, several_ranks

RESULTS = Path(__file__).parent / "results"
MEMBERS = 8
STEPS, EPOCHS, ROUNDS = 10, 4, 5
SWEPT_ROWS, SWEPT_EPOCHS, SWEPT_GROUPS = 1280, 120, 6
"""Of the sweeps on a cluster: rows of data, epochs, and shapes, each of which is a task."""
TINY, TINY_GROUPS = 1, 4
"""Epochs of the sweeps that tell what a cluster costs, and how many shapes the second has beyond the first."""
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
    "storage of all machines together, bytes a second": 1e9,
    "results on their way home, bytes a second": 1e9,
    "a worker until it can begin, seconds": 30.0,
    "a task before it computes, seconds": 5.0,
    "a task in the script's process, seconds": 0.01,
    "a lost machine until it is replaced, seconds": 120.0,
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


def travelling_seconds(name: str) -> float:
    """The time of what travels in a step: outputs of all members, and a flag."""
    with several_ranks(MEMBERS, torch.device("cpu")) as ranks:
        return collective_seconds(name, ranks)


def collective_seconds(name: str, ranks: Ranks) -> float:
    """The same, with the connections of some ranks."""
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
        ways: dict[str, Callable[[], float]] = {
            "part": partial(step_seconds, name, MEMBERS // 2),  # while the other process computes too
            "travels": partial(travelling_seconds, name),
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


def cluster_seconds(workers: int, groups: int, epochs: int) -> float:
    """Seconds of a sweep of some shapes on a fresh Ray cluster of workers with one core."""
    import ray
    from ray.cluster_utils import Cluster

    store: dict[str, Any] = {"object_store_memory": 80 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, **store})
    try:
        for _ in range(workers):
            cluster.add_node(num_cpus=1, **store)
        ray.init(address=cluster.address, logging_level=logging.ERROR, log_to_driver=False)
        with tempfile.TemporaryDirectory() as folder:
            start = time.perf_counter()
            swept(groups, epochs, cluster="ray", checkpoint=folder)
            return time.perf_counter() - start
    finally:
        ray.shutdown()
        cluster.shutdown()


def swept(groups: int, epochs: int, **options: Any) -> ds.Sweep:
    """A sweep in which every group has a run: its width is its own."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(SWEPT_ROWS, 10, generator=generator), torch.randn(SWEPT_ROWS, 1, generator=generator)
    return ds.sweep(
        perceptron,
        (x, y),
        partial(ds.objectives.augmented, beta=0.5, loss="squared_error", pool="score"),
        grid={"width": [200 + group for group in range(groups)]},
        members=MEMBERS,
        epochs=epochs,
        batch_size=128,
        lr=1e-3,
        backend="batched",
        padding=False,
        **options,
    )


def perceptron(width: int) -> nn.Module:
    return ds.nets.mlp(10, 1, (width, width))


def checked_sweeps() -> dict[str, Any]:
    """Predicted and measured seconds of sweeps on Ray clusters of one worker and of two, here."""
    with one_thread():
        swept(1, 1)
        times: dict[int, list[float]] = {TINY: [], SWEPT_EPOCHS: []}
        for _ in range(2):
            for epochs, seconds in times.items():
                start = time.perf_counter()
                swept(1, epochs)
                seconds.append(time.perf_counter() - start)
        tiny, whole = (min(seconds) for seconds in times.values())
        compute = whole - tiny
        few, more = cluster_seconds(1, 1, TINY), cluster_seconds(1, 1 + TINY_GROUPS, TINY)
        task = (more - few) / TINY_GROUPS
        costs = Costs(start=few - task, task=task)
        rows = []
        for workers in (1, 2):
            predicted = simulated([Work(compute)] * SWEPT_GROUPS, workers, costs).seconds
            measured = cluster_seconds(workers, SWEPT_GROUPS, SWEPT_EPOCHS)
            rows.append(
                {
                    "workers": workers,
                    "groups": SWEPT_GROUPS,
                    "predicted_s": predicted,
                    "measured_s": measured,
                    "error": predicted / measured - 1,
                }
            )
    return {"start_s": costs.start, "task_s": task, "computing_s": compute, "rows": rows}


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


def tasks(what: str, works: list[Work], cards: int, lost_every: float | None = None) -> dict[str, Any]:
    """Independent trainings on cards, simulated; maybe a card is lost every some seconds."""
    costs = Costs(
        start=ASSUMED["a worker until it can begin, seconds"],
        task=ASSUMED["a task before it computes, seconds"],
        dispatch=ASSUMED["a task in the script's process, seconds"],
        storage=ASSUMED["storage of all machines together, bytes a second"],
        home=ASSUMED["results on their way home, bytes a second"],
        again=ASSUMED["a lost machine until it is replaced, seconds"],
    )
    losses: list[tuple[float, int]] = []
    if lost_every is not None:
        what += f", a card lost every {lost_every / 60:.0f} minutes"
        longest = simulated(works, cards, costs).seconds
        losses = [(lost_every * (turn + 0.5), turn % cards) for turn in range(int(longest / lost_every))]
    result = simulated(works, cards, costs, losses)
    spent = {name: share for name, share in shares(result, cards).items() if share > 0}
    return {
        "what": what,
        "cards": cards,
        "hours": result.seconds / 3600,
        "shares": spent,
        "bottleneck": max(spent, key=lambda name: spent[name]),
        "tasks": len(works),
        "bytes_home": sum(work.result for work in works),
    }


def model() -> list[dict[str, Any]]:
    """Costs on cards, from steps that were measured on one."""
    steps = {
        (row["case"], row["members"], row["batch"]): row["ways"]["auto"]["ms"] / 1e3 for row in read("gpu")["rows"]
    }
    sweeps = {row["runs"]: row["sweep_ms"] / 1e3 for row in read("sweeps_gpu")["rows"]}
    rows = []
    # 100 epochs of 1,000 rows at batch 32, in groups of 1,100 runs; a checkpoint has weights and two moments.
    weights = 1100 * 20 * sum(parameter.numel() for parameter in ds.nets.mlp(10, 1, (30, 30)).parameters())
    group = Work(100 * math.ceil(1000 / 32) * sweeps[1100], 3 * 4 * weights, 4 * weights)
    groups = [group] * math.ceil(1e5 / 1100)
    rows += [tasks("100,000 runs × 20 MLPs", groups, cards) for cards in (1, 8, 64)]
    # 200 epochs of 50,000 images at batch 64.
    resnet20 = sum(parameter.numel() for parameter in ds.nets.resnet20().parameters())
    epochs = 200 * math.ceil(50_000 / 64)
    ensemble = Work(epochs * steps["ResNet-20", 5, 64], 3 * 4 * 5 * resnet20, 4 * 5 * resnet20)
    what = "1,000 ensembles of 5 ResNet-20, CIFAR-10"
    rows += [tasks(what, [ensemble] * 1000, cards) for cards in (1, 8, 64)]
    rows.append(tasks(what, [ensemble] * 1000, 64, lost_every=600.0))
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json")
    parser.add_argument("--only", choices=("processes", "sweeps"))
    arguments = parser.parse_args()
    logging.getLogger("dissensus").setLevel(logging.ERROR)
    before = json.loads(Path(arguments.json).read_text()) if arguments.only else {}
    made = {**how_made(), "steps on a card": f"{read('gpu')['made']['device']}, gpu.json and sweeps_gpu.json"}
    result = {
        "made": made,
        "assumed": ASSUMED,
        "checked": before["checked"] if arguments.only == "sweeps" else checked(),
        "sweeps": before["sweeps"] if arguments.only == "processes" else checked_sweeps(),
        "model": model(),
    }
    for row in (*result["checked"], result["sweeps"], *result["model"]):
        print(row)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
