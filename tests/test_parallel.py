"""Members over several processes give what one process gives, to rounding.

Processes are started once for each number of ranks; they do all jobs, one after the other, and store what came out.
"""

import errno
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from recording import Captures, Pieces, recorded
from torch import nn
from torch.multiprocessing.spawn import spawn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset, TensorDataset

import dissensus as ds
from dissensus import objectives, storage
from dissensus.train import Convergence, adversary, capture, recipe
from dissensus.train.checkpoint import checkpoints_in
from dissensus.train.parallel import tell_of_statistics

pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="torch was built without gloo"
)
MEMBERS = 5
JOINT = partial(objectives.joint, loss="cross_entropy", pool="probability")
INDEPENDENT = partial(objectives.independent, loss="cross_entropy")
ATTACK = ds.train.AdversarialTraining(0.1, steps=2, box=(-9.0, 9.0), norm="l2")
"""Without signs, which would make large differences of rounded gradients."""
SIGNS = ds.train.AdversarialTraining(0.1, steps=2, box=(-9.0, 9.0))


def _network() -> nn.Module:
    # ADP takes fewer members than classes: else its volume is singular, and its gradient is rounding.
    # A bias before batch norm has no gradient but rounding, which Adam would make as large as any.
    layers = [nn.Linear(4, 6, bias=False), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.2), nn.Linear(6, 7)]
    return nn.Sequential(*layers).double()


def _half_frozen() -> nn.Module:
    network = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 7)).double()
    network[0].requires_grad_(False)
    return network


def _regressor() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).double()


class _Attention(nn.Module):
    """Dropout of attention weights, of functions and of whole examples; statistics of no batch."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(1, 8), nn.Linear(8, 7)
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.2, batch_first=True)
        self.drop, self.norm = nn.Dropout1d(0.2), nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x.unsqueeze(-1))
        x = self.norm(x + self.drop(self.attention(x, x, x, need_weights=False)[0]))
        return self.head(torch.nn.functional.dropout(x.mean(1), 0.2, self.training))


def _attention() -> nn.Module:
    return _Attention().double()


_base = [_regressor()]


def _adapted() -> nn.Module:
    return ds.adapters.batch_ensemble(_base[0])


def _data() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 4, generator=generator, dtype=torch.float64)
    return x, torch.randint(7, (40,), generator=generator), torch.randn(16, 4, generator=generator, dtype=torch.float64)


def _jitter(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return x + 0.1 * torch.randn(x.shape, generator=generator, dtype=x.dtype)


def _same(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return x


REGRESSION = {"gradient_adjusted", "negative_correlation", "shared", "shared sum", "regression"}
NETWORKS: dict[str, Callable[[], nn.Module]] = {
    **dict.fromkeys(REGRESSION, _regressor),
    **dict.fromkeys(("shared", "shared sum"), _adapted),
    "frozen layer": _half_frozen,
    **dict.fromkeys(("attention", "coupled examples", "attacked regression", "each member of data"), _attention),
}


def _cases() -> dict[str, tuple[Any, dict[str, Any]]]:
    """Objective and settings of every case; five epochs of four steps are twenty steps."""
    held_out = _data()[:2]
    squared = partial(objectives.augmented, beta=0.5, loss="squared_error", pool="score")
    augmented = partial(objectives.augmented, beta=0.5, loss="cross_entropy", pool="probability")
    unlabelled, sgd = {"unlabelled": _data()[2]}, {"optimizer": "sgd", "lr": 0.1}
    return {
        "independent": (INDEPENDENT, {}),
        "augmented": (augmented, {}),
        "joint": (JOINT, {}),
        "adp": (partial(objectives.adp, alpha=1.0, beta=0.5), {}),
        "ldr": (partial(objectives.ldr, strength=0.3), {}),
        "a2d": (partial(objectives.a2d, strength=0.3), unlabelled),
        "divdis": (partial(objectives.divdis, strength=0.3), unlabelled),
        "gradient_adjusted": (partial(objectives.gradient_adjusted, alpha=0.5), {}),
        "negative_correlation": (partial(objectives.negative_correlation, strength=0.3, loss="squared_error"), {}),
        "draws": (partial(objectives.learner_dropout, loss="cross_entropy", pool="probability", drop=0.4), {}),
        "sampled": (partial(objectives.ldr, strength=0.3), {"active_members": 2}),
        "attacked": (JOINT, {"adversarial": ATTACK}),
        "attacked apart": (INDEPENDENT, {"adversarial": replace(ATTACK, against="members")}),
        "trades": (
            partial(objectives.trades, strength=0.5),
            {"adversarial": replace(ATTACK, beside=True, random_start=True)},
        ),
        "shared": (squared, {"ema": 0.9, "clip_norm": 0.5, "accumulate": 2}),
        "shared sum": (squared, {"shared_gradient": "sum", "validation": 0.2}),
        "regression": (squared, {"accumulate": 2, "clip_norm": 0.5}),
        "coupled examples": (partial(objectives.divdis, strength=0.3), {**unlabelled, **sgd}),
        "attacked regression": (JOINT, {"adversarial": ATTACK, **sgd}),
        "each member of data": (
            INDEPENDENT,
            {"validation": held_out, "watch": "member", "patience": 1, "min_delta": 0.15, **sgd},
        ),
        "attention": (augmented, sgd),  # the bias of keys has no gradient but rounding
        "rates of members": (JOINT, {"lr": [0.01, 0.02, 0.03, 0.04, 0.05], "clip_norm": 0.5, "ema": 0.9}),
        "own optimizer": (JOINT, {"optimizer": partial(torch.optim.NAdam, lr=0.01), "lr": None}),
        "momentum": (JOINT, {"optimizer": "sgd", "momentum": [0.0, 0.0, 0.0, 0.9, 0.5]}),
        "frozen": (JOINT, {"frozen": [3, 4]}),
        "converged": (INDEPENDENT, {"freeze": Convergence(patience=1, tolerance=0.2)}),
        "early stopping": (JOINT, {"validation": held_out, "patience": 1, "min_delta": 0.15}),
        "frozen, validated": (JOINT, {"validation": held_out, "frozen": [0, 1, 2]}),
        "each member": (INDEPENDENT, {"validation": held_out, "watch": "member", "patience": 1, "min_delta": 0.15}),
        "callback": (JOINT, {"callbacks": [lambda entry: entry["epoch"] == 2]}),
        "bagging": (INDEPENDENT, {"bootstrap": True, "accumulate": 2}),
        "augmentations": (JOINT, {"augment": [_jitter, _same, _jitter, _same, _jitter]}),
        "frozen layer": (JOINT, {}),
        "loader": (JOINT, {"validation": [held_out]}),
        "muon": (JOINT, {"optimizer": "muon", "schedule": "cosine", "deterministic": True}),
        "weighted": (
            augmented,
            {"weights": _data()[0][:, 0].abs(), "label_smoothing": 0.1, "class_weights": "balanced"},
        ),
    }


def _trained(
    name: str, parallel: Any, backend: str = "auto", count: int = MEMBERS, **more: Any
) -> tuple[dict[str, torch.Tensor], ds.History]:
    objective, settings = _cases()[name]
    x, y, _ = _data()
    shared = ds.adapters.SHARED if name.startswith("shared") else None
    torch.manual_seed(0)
    _base[0] = _regressor()
    ens = ds.Ensemble(NETWORKS.get(name, _network), count, 1, backend, shared=shared)
    data: Any = x, x[:, :1].sin() if name in REGRESSION else y
    if name == "loader":
        data = DataLoader(TensorDataset(*data), 10, shuffle=True, generator=torch.Generator().manual_seed(1))
    settings = {"lr": 0.02, "batch_size": 10, **settings, **more}
    history = ds.fit(ens, data, objective, epochs=5, seed=3, parallel=parallel, **settings)
    return dict(ens.state_dict()), history


def _diverged(parallel: Any) -> tuple[str, list[int]]:
    x, y, _ = _data()
    ens = ds.Ensemble(_network, members=MEMBERS, seed=1)
    with torch.no_grad():
        ens.body.tensors()["0.weight"][4] = float("nan")
    with pytest.raises(ds.TrainingDiverged) as told:
        ds.fit(ens, (x, y), JOINT, epochs=1, lr=0.01, parallel=parallel)
    return told.value.part, told.value.members


class _Breaks:
    """Breaks training off after one epoch and a half."""

    def on_step(self, entry: dict[str, Any]) -> None:
        if entry["step"] == 6:
            raise KeyboardInterrupt


FAMILIES = (
    *("independent", "augmented", "joint", "adp", "ldr", "a2d", "divdis", "gradient_adjusted", "negative_correlation"),
    *("draws", "trades"),
)
"""One case for each objective."""
DATA_PARALLEL = ("coupled examples", "attention", "regression", "attacked regression", "shared", "each member of data")
CHECKPOINTED = ("joint", "shared", "each member", "own optimizer", "bagging", "frozen layer")


def _broken_off(name: str, parallel: Any, folder: Path) -> str:
    with pytest.raises((KeyboardInterrupt, ds.train.RankFailed)) as told:
        _trained(name, parallel, checkpoint=folder / name, checkpoint_seconds=0, callbacks=[_Breaks()])
    return f"{told.typename}: {told.value}"


def _resumed(name: str, parallel: Any, folder: Path) -> tuple[dict[str, torch.Tensor], ds.History]:
    return _trained(name, parallel, checkpoint=folder / name, checkpoint_seconds=0, resume=True)


def _resumed_copy(name: str, folder: Path) -> tuple[dict[str, torch.Tensor], ds.History]:
    """What one process makes of a checkpoint of two."""
    shutil.copytree(folder / "two" / name, folder / "copy" / name)
    return _resumed(name, None, folder / "copy")


def _alone(job: Callable[[], Any]) -> Any:
    """What the first rank makes of a job; the others wait for it."""
    result = job() if dist.get_rank() == 0 else None
    dist.barrier()
    return result


def _captured(name: str, *, pieces: bool) -> tuple[Any, int]:
    """A training whose steps are recorded and replayed, with collectives inside or between them."""
    counts, before = Captures(Pieces.capture if pieces else recorded), recipe.graph_steps
    recipe.graph_steps = lambda engine: capture.GraphSteps(lambda: counts)
    try:
        return _trained(name, "members", "loop"), counts.replays
    finally:
        recipe.graph_steps = before


def _several(name: str, members: int, **settings: Any) -> tuple[dict[str, torch.Tensor], ds.History]:
    """A training in which processes share the batches of their members."""
    return _trained(name, "members+data", count=members, **settings)


def _of_one_network(parallel: Any) -> dict[str, torch.Tensor]:
    """A module that is no ensemble, whose batches processes share."""
    torch.manual_seed(5)
    network = _regressor()
    x = _data()[0]
    objective = partial(objectives.independent, loss="squared_error")
    ds.fit(network, (x, x[:, :1]), objective, epochs=2, batch_size=10, lr=0.02, parallel=parallel)
    return dict(network.state_dict())


def _built_apart(folder: Path) -> dict[str, Any]:
    """What an ensemble does of which each process has built its members only."""
    x, y, _ = _data()
    built: list[int] = []

    def build() -> nn.Module:
        built.append(1)
        return _network()

    ens = ds.Ensemble(build, MEMBERS, 1, parallel="members")
    history = ds.fit(ens, (x, y), JOINT, epochs=5, batch_size=10, seed=3, lr=0.02)
    ens.save(folder / "apart")
    result: dict[str, Any] = {"built": len(built), "own": ens.own, "here": len(ens.body), "trained": ens.gathered()}
    result["outputs"] = ens.predict(x, batch_size=16)
    result["in a file"] = torch.equal(ens.predict(x, 16, file=folder / "outputs.npy"), result["outputs"])
    result["targets"] = ens.predict((x, y), targets=True)[1]
    with pytest.raises(ValueError, match="`ensemble` must hold all members for a pass; got members"):
        ens(x)
    with pytest.raises(ValueError, match=r"Use ens.gathered\(\)"):
        ens[0]
    with pytest.raises(ValueError, match="`parallel` must be that of the ensemble; got 'members\\+data'"):
        ds.fit(ens, (x, y), JOINT, epochs=1, parallel="members+data")
    loaded = ds.Ensemble.load(folder / "apart", _network, parallel="members")
    result["loaded"] = len(loaded.body), loaded.gathered()
    shared = ds.Ensemble(_adapted, 3, shared=ds.adapters.SHARED, parallel="members")
    result["shared"] = shared.gathered()
    result["epochs"] = len(history.epochs)
    kept = ds.Ensemble(_network, MEMBERS, parallel="members").eval()
    before = _settings(kept)
    ds.fit(kept, (x, y), JOINT, epochs=1, deterministic=True, channels_last=True, checkpoint=folder / "kept")
    result["settings kept"] = _settings(kept) == before
    return result


def _settings(ens: ds.Ensemble) -> Any:
    """What a training may change for itself only."""
    body = ens.body
    return body.channels_last, body.by_rule, body.choices.file, [module.training for module in ens.modules()]


def _words(job: Callable[[], Any]) -> str:
    """The error that a job ends with."""
    try:
        job()
    except (Exception, KeyboardInterrupt) as reason:
        return f"{type(reason).__name__}: {reason}"
    return ""


def _fitted(data: Any = None, objective: Any = JOINT, **settings: Any) -> ds.Ensemble:
    """Members of this rank after a training of two epochs."""
    ens = ds.Ensemble(_network, MEMBERS, 1, parallel="members")
    settings = {"epochs": 2, "batch_size": 10, "lr": 0.02, **settings}
    ds.fit(ens, _data()[:2] if data is None else data, objective, **settings)
    return ens


def _objective_that(does: Callable[[], None]) -> Callable[..., Any]:
    """An objective that does something in its fifth step on rank 1; it is the same object on all ranks."""
    steps: list[int] = []

    def objective(outputs: torch.Tensor, targets: torch.Tensor) -> Any:
        steps.append(1)
        if dist.get_rank() == 1 and len(steps) == 5:
            does()
        return JOINT(outputs, targets)

    return objective


def _fails() -> None:
    raise ValueError("no more paper")


def _interrupts() -> None:
    raise KeyboardInterrupt


def _killed_while_writing(folder: Path) -> None:
    """A training of which rank 1 is killed when it has to write its part of the third checkpoint."""
    written, parts = storage._written_weights, list[int]()

    def writes(*arguments: Any) -> Any:
        parts.append(1)
        if dist.get_rank() == 1 and len(parts) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return written(*arguments)

    storage._written_weights = writes
    _trained("joint", "members", checkpoint=folder / "killed" / "joint", checkpoint_seconds=0)


class _Rows(Dataset[Any]):
    """Rows of the data, one of which rank 1 cannot read; it is none by which data is recognised."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        if index == 38 and dist.get_rank() == 1:
            raise OSError("row 38 cannot be read")
        x, y, _ = _data()
        return x[index], y[index]


class _Shard:
    """Batches, of which one rank gives fewer than the other."""

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Any:
        x, y, _ = _data()
        yield from [(x[:10], y[:10])] * (3 - dist.get_rank())


def _with_full_disk(job: Callable[[], Any], rank: int = 1, writer: str = "save_file") -> Any:
    """A job during which a rank cannot write; a limit of the process would hit the store of the group too."""

    def full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before = getattr(storage, writer)
    if dist.get_rank() == rank:
        setattr(storage, writer, full)
    try:
        return job()
    finally:
        setattr(storage, writer, before)


def _mistakes(rank: int, folder: Path) -> dict[str, str]:
    """What trainings and calls end with that differ between ranks, or fail on one of them."""
    x, y, _ = _data()
    ens = ds.Ensemble(_network, MEMBERS, 1, parallel="members")
    shuffled = DataLoader(TensorDataset(x, y), 10, shuffle=True)
    torch.manual_seed(rank)
    jobs: dict[str, Callable[[], Any]] = {
        "data": lambda: _fitted((x + rank, y)),
        "numbers": lambda: _fitted(lr=0.02 * (1 + rank), epochs=2 + rank),
        "checkpoint": lambda: _fitted(checkpoint=folder / "one" if rank == 0 else None),
        "weights": lambda: _untrained(rank),
        "seed": lambda: ds.fit(ds.Ensemble(_network, 5, rank, parallel="members"), (x, y), JOINT, epochs=1),
        "order": lambda: _fitted(shuffled, seed=2),
        "length": lambda: _fitted(_Shard()),
        "validation": lambda: _fitted(validation=_Shard()),
        "reading": lambda: _fitted(DataLoader(_Rows(), 10)),
        "callback": lambda: _fitted(callbacks=[_breaks]),
        "progress": lambda: _fitted(progress=_breaks),
        "interrupt": lambda: _fitted(objective=_objective_that(_interrupts)),
        "call in a callback": lambda: _fitted(callbacks=[lambda entry: ens.predict(x)]),
        "calls": lambda: ens.predict(x) if rank else ens.save(folder / "calls"),
        "rows to predict": lambda: ens.predict(x[rank:]),
        "order to predict": lambda: ens.predict(shuffled, targets=True),
        "full disk": lambda: _with_full_disk(lambda: _fitted(checkpoint=folder / "full")),
        "full disk, saved": lambda: _with_full_disk(lambda: ens.save(folder / "calls")),
        "full disk, file": lambda: _with_full_disk(partial(ens.predict, x, 8, file=folder / "x.npy"), 0, "new_array"),
        "export": lambda: ds.export.program(ens, x),
        "attack": lambda: ds.attacks.fgsm(ens, x, y, epsilon=0.1, box=(-9, 9)),
    }
    told = {name: _words(job) for name, job in jobs.items()}
    told["again"] = repr([tensor.sum().item() for tensor in _fitted().gathered().state_dict().values()])
    return told


def _untrained(rank: int) -> None:
    torch.manual_seed(rank)
    ds.fit(ds.Ensemble.from_modules([_network(), _network()]), _data()[:2], JOINT, epochs=1, parallel="members")


def _breaks(entry: object) -> None:
    raise ValueError("no more ink")


def _went_on(folder: Path) -> tuple[dict[str, torch.Tensor], list[str]]:
    """A training that fails on one rank and goes on in the same processes, with the same ensemble."""
    x, y, _ = _data()
    ens, told = ds.Ensemble(_network, MEMBERS, 1, parallel="members"), list[str]()
    for does in (_fails, _nothing):
        fit = partial(ds.fit, ens, (x, y), JOINT, epochs=5, batch_size=10, seed=3, lr=0.02)
        fit = partial(fit, checkpoint=folder / "went on", checkpoint_seconds=0, resume=True)
        told.append(_words(partial(fit, callbacks=[_Does(does)])))
    return dict(ens.gathered().state_dict()), told


class _Does:
    """Does something after one epoch and a half, where callbacks are called."""

    def __init__(self, does: Callable[[], None]) -> None:
        self.does = does

    def on_step(self, entry: dict[str, Any]) -> None:
        if entry["step"] == 6:
            self.does()


def _nothing() -> None:
    pass


class _Sent(TorchDispatchMode):
    """Notes the names of collectives, the shapes of what they return or fill, and its bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[tuple[str, list[tuple[int, ...]], int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = str(func)
        if "c10d" in name and "wait" not in name:
            received = [t for t in tree_leaves(result if "functional" in name else args[0]) if torch.is_tensor(t)]
            self.messages.append((name, [tuple(t.shape) for t in received], sum(t.nbytes for t in received)))
        return result


def _travelled() -> list[tuple[str, list[tuple[int, ...]], int]]:
    """What travels in an epoch of four steps of four members on two ranks."""
    x, y, _ = _data()
    ens = ds.Ensemble(_network, 4, 1, "loop", parallel="members")
    with _Sent() as sent:
        ds.fit(ens, (x, y), JOINT, epochs=1, batch_size=10, lr=0.02)
    return sent.messages


def _given_attacks(against: Any, folder: Path) -> Any:
    """Weights after attacks by signs whose results are given: of one process, and of both; and how many signs differ.

    The first process attacks alone. Then both train on what it found, and attack beside it.
    """
    climbed, file = adversary.climbed, folder / f"signs against {against}.pt"
    found: list[torch.Tensor] = []
    differ: list[float] = []

    def finds(*arguments: Any, **settings: Any) -> torch.Tensor:
        found.append(climbed(*arguments, **settings))
        return found[-1]

    def given(*arguments: Any, **settings: Any) -> torch.Tensor:
        other = found.pop(0)
        apart = (climbed(*arguments, **settings) - other).abs() > 1e-6
        if against == "members":  # of which each rank attacks its own
            apart = apart.unflatten(0, (MEMBERS, -1))[slice(0, 3) if dist.get_rank() == 0 else slice(3, 5)]
        differ.append(float(apart.double().mean()))
        return other

    def trained(parallel: Any) -> dict[str, torch.Tensor]:
        objective = JOINT if against == "ensemble" else INDEPENDENT
        settings: dict[str, Any] = {"adversarial": replace(SIGNS, against=against), "seed": 3, "lr": 0.02}
        ens = ds.Ensemble(_network, MEMBERS, 1)
        ds.fit(ens, _data()[:2], objective, epochs=5, batch_size=10, parallel=parallel, **settings)
        return dict(ens.state_dict())

    def alone() -> None:
        adversary.climbed = finds
        torch.save((trained(None), found), file)

    try:
        _alone(alone)
        expected, found = torch.load(file)
        adversary.climbed = given
        return expected, trained("members"), differ
    finally:
        adversary.climbed = climbed


def _refused(size: int) -> None:
    x, y, _ = _data()
    run = partial(ds.fit, data=(x, y), objective=JOINT, epochs=1)
    with pytest.raises(ValueError, match="`sequential` must be left out with parallel='members'"):
        run(ds.Ensemble(_network), sequential=True, parallel="members")
    with pytest.raises(ValueError, match=f"{size} processes, 1 members"):
        run(ds.Ensemble(_network, members=1), parallel="members")
    mixed = ds.Ensemble.from_modules([_network(), nn.Linear(4, 7).double()])
    with pytest.raises(ValueError, match="members of one architecture with parallel='members'"):
        run(mixed, parallel="members")
    masked = ds.masks.convert(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 7)).double(), 4, 2.0)
    with pytest.raises(ValueError, match="members of their own weights with parallel='members'; got a Masked network"):
        run(masked, parallel="members")


def _join(rank: int, size: int, folder: str) -> None:
    torch.set_num_threads(1)
    logging.getLogger("dissensus").setLevel(logging.ERROR)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=size)


def _done(jobs: dict[str, Callable[[], Any]]) -> dict[str, Any]:
    """What came out of all jobs; the words of an error where one did not succeed, so that the others are done."""
    results: dict[str, Any] = {}
    for name, job in jobs.items():
        try:
            results[name] = job()
        except Exception:
            results[name] = traceback.format_exc()
    return results


def _two(rank: int, folder: str) -> None:
    _join(rank, 2, folder)
    place = Path(folder)
    jobs: dict[str, Callable[[], Any]] = {f"case/{name}": partial(_trained, name, "members") for name in _cases()}
    jobs["diverged"] = partial(_diverged, "members")
    for name in ("joint", "shared", "attention"):
        for pieces in (False, True):
            jobs[f"captured/{name}/{pieces}"] = partial(_captured, name, pieces=pieces)
    for name in CHECKPOINTED:
        jobs[f"begun/{name}"] = partial(_alone, partial(_broken_off, name, None, place / "one"))
        jobs[f"resumed/{name}"] = partial(_resumed, name, "members", place / "one")
        jobs[f"broken off/{name}"] = partial(_broken_off, name, "members", place / "two")
        jobs[f"resumed alone/{name}"] = partial(_alone, partial(_resumed_copy, name, place))
    jobs["built apart"] = partial(_built_apart, place)
    for name in ("attention", "regression", "shared"):
        jobs[f"data/{name}"] = partial(_several, name, 1)
        jobs[f"uneven/{name}"] = partial(_several, name, 1, batch_size=13)
    jobs["batch norm"] = partial(_several, "joint", 1)
    jobs["one network"] = partial(_of_one_network, "members+data")
    jobs["refused"] = partial(_refused, 2)
    jobs["failed"] = lambda: _words(lambda: _fitted(objective=_objective_that(_fails)))
    jobs["mistakes"] = partial(_mistakes, rank, place)
    jobs["went on"] = partial(_went_on, place)
    jobs["travelled"] = _travelled
    for against in ("ensemble", "members"):
        jobs[f"signs/{against}"] = partial(_given_attacks, against, place)
    results = _done(jobs)
    torch.save(results, place / f"{rank}.pt")
    results["killed"] = _words(lambda: _killed_while_writing(place))  # only rank 0 comes back
    torch.save(results, place / f"{rank}.pt")
    os._exit(0)


def _four(rank: int, folder: str) -> None:
    _join(rank, 4, folder)
    names = (*FAMILIES, "each member", "sampled")
    jobs: dict[str, Callable[[], Any]] = {f"case/{name}": partial(_trained, name, "members") for name in names}
    for name in CHECKPOINTED:
        jobs[f"resumed/{name}"] = partial(_resumed, name, "members", Path(folder) / "two")
    for name in DATA_PARALLEL:
        jobs[f"data/{name}"] = partial(_several, name, 3)
    results = _done(jobs)
    if rank == 0:  # the others end without that call
        ens = ds.Ensemble(_network, MEMBERS, parallel="members")
        results["told/called by one"] = _words(lambda: ens.predict(_data()[0]))
    torch.save(results, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def _results(function: Callable[..., None], size: int, folder: Path) -> list[dict[str, Any]]:
    """What ranks have stored. They are started once more if a thread of gloo ends one: seen once, in its `malloc`."""
    before = shutil.copytree(folder, folder.with_name(f"{folder.name}-before-{size}"))
    if _crash(function, size, folder):
        logging.getLogger(__name__).warning("a rank crashed; all are started once more")
        shutil.rmtree(folder)
        shutil.copytree(before, folder)
        assert not _crash(function, size, folder), "a rank crashed twice"
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(size)]


def _crash(function: Callable[..., None], size: int, folder: Path) -> bool:
    """Run ranks to their end; whether one of them crashed. None goes on for long after the others."""
    processes = spawn(function, (str(folder),), size, join=False).processes
    deadline = time.monotonic() + 300
    while any(process.is_alive() for process in processes) and time.monotonic() < deadline:
        if any(process.exitcode == -signal.SIGSEGV for process in processes):
            break
        time.sleep(0.05)
    hanging = [process for process in processes if process.is_alive()]
    for process in hanging:
        process.kill()
        process.join()
    crashed = any(process.exitcode == -signal.SIGSEGV for process in processes)
    assert crashed or not hanging
    return crashed


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where ranks meet, and checkpoints are."""
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def two(folder: Path) -> list[dict[str, Any]]:
    """What each of two ranks has made of all jobs."""
    return _results(_two, 2, folder)


@pytest.fixture(scope="module")
def expected() -> Callable[[str], tuple[dict[str, torch.Tensor], ds.History]]:
    """What one process makes of a case."""
    known: dict[str, Any] = {}

    def of(name: str) -> Any:
        if name not in known:
            known[name] = _trained(name, None)
        return known[name]

    return of


def _check(actual: Any, expected: Any, others: Any) -> None:
    """Equal weights to rounding, and histories that agree in everything but seconds; the same on all ranks."""
    assert not isinstance(actual, str), actual
    (own, record), (tensors, history) = actual, expected
    for key, tensor in tensors.items():
        torch.testing.assert_close(own[key], tensor, rtol=1e-9, atol=1e-11, msg=lambda words, k=key: f"{k}: {words}")
    assert repr(record) == repr(others[1])  # NaN, of members that an epoch has not sampled, equals nothing
    assert record.steps == history.steps
    assert (record.best_epoch, record.frozen_at) == (history.best_epoch, history.frozen_at)
    assert (record.stopped_early, record.stopped_by) == (history.stopped_early, history.stopped_by)
    for mine, entry in zip(record.epochs, history.epochs, strict=True):
        assert mine.keys() == entry.keys()
        for key in mine.keys() - {"seconds"}:
            assert mine[key] == pytest.approx(entry[key], rel=1e-8, nan_ok=True), key


@pytest.mark.parametrize("name", list(_cases()))
def test_five_members_on_two_ranks_equal_one_process(name, two, expected):
    for results in two:
        _check(results[f"case/{name}"], expected(name), two[0][f"case/{name}"])


def test_a_failure_on_one_rank_is_told_on_all(two):
    told = _diverged(None)
    assert all(results["diverged"] == told for results in two)


@pytest.mark.parametrize("pieces", [False, True])
@pytest.mark.parametrize("name", ["joint", "shared", "attention"])
def test_captured_steps_hold_collectives_or_leave_them_to_the_host(name, pieces, two, expected):
    for results in two:
        trained, replays = results[f"captured/{name}/{pieces}"]
        _check(trained, expected(name), two[0][f"captured/{name}/{pieces}"][0])
        assert replays > 10


@pytest.mark.parametrize("name", CHECKPOINTED)
def test_two_ranks_go_on_from_a_checkpoint_of_one_process(name, two, expected):
    for results in two:
        _check(results[f"resumed/{name}"], expected(name), two[0][f"resumed/{name}"])


@pytest.mark.parametrize("name", CHECKPOINTED)
def test_one_process_goes_on_from_a_checkpoint_of_two_ranks(name, two, expected, folder):
    assert two[0][f"broken off/{name}"].startswith("KeyboardInterrupt")
    assert "rank 0: KeyboardInterrupt" in two[1][f"broken off/{name}"]
    newest = checkpoints_in(folder / "two" / name)[-1]
    assert len(list(newest.glob("weights-*"))) == 2
    resumed = two[0][f"resumed alone/{name}"]
    _check(resumed, expected(name), resumed)


@pytest.mark.slow
def test_four_ranks_go_on_from_a_checkpoint_of_two(two, expected, folder):
    (folder / "meeting").unlink(missing_ok=True)
    four = _results(_four, 4, folder)
    told = four[0].pop("told/called by one")
    assert "waits for all processes, and rank" in told
    assert told.endswith("has ended. Call it in every process, not in one alone.")
    for results in four:
        for name, result in results.items():
            kind, _, case = name.partition("/")
            _check(result, _trained(case, None, count=3) if kind == "data" else expected(case), four[0][name])


@pytest.mark.parametrize("name", ["attention", "regression", "shared"])
def test_two_ranks_share_the_batches_of_one_member(name, two):
    for results in two:
        _check(results[f"data/{name}"], _trained(name, None, count=1), two[0][f"data/{name}"])


@pytest.mark.parametrize("name", ["attention", "regression", "shared"])
def test_parts_of_a_batch_may_differ_in_length_and_one_example_is_not_shared(name, two):
    alone = _trained(name, None, count=1, batch_size=13)  # 13 examples three times, and then one
    for results in two:
        _check(results[f"uneven/{name}"], alone, two[0][f"uneven/{name}"])


def test_batch_norm_of_parts_is_the_same_on_all_ranks_and_not_that_of_one_process(two):
    alone, _ = _trained("joint", None, count=1)
    first, second = (results["batch norm"][0] for results in two)
    differ = ("body.network.0.weight", "body.network.1.running_var")
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
    assert not any(torch.allclose(first[name], alone[name]) for name in differ)


def test_batch_norm_of_parts_is_told(caplog):
    tell_of_statistics(ds.Ensemble(_attention, 2).body)
    assert not caplog.text
    tell_of_statistics(ds.Ensemble(_network, 2).body)
    assert "batch norm sees a part of the batch in every process" in caplog.text


def test_two_ranks_share_the_batches_of_a_network(two):
    for results in two:
        for name, tensor in _of_one_network(None).items():
            torch.testing.assert_close(results["one network"][name], tensor, rtol=1e-9, atol=1e-11)


def test_ranks_build_and_keep_their_members_only(two, expected, folder):
    tensors, history = expected("joint")
    results = [results["built apart"] for results in two]
    assert not isinstance(results[0], str), results[0]
    assert [(result["built"], result["here"]) for result in results] == [(3, 3), (2, 2)]
    assert [result["own"] for result in results] == [slice(0, 3), slice(3, 5)]
    x, y, _ = _data()
    loaded = ds.Ensemble.load(folder / "apart", _network)
    assert len(loaded) == MEMBERS
    for result in results:
        count, others = result["loaded"]
        assert count == result["here"]
        for whole in (result["trained"], loaded, others):
            for key, tensor in whole.state_dict().items():
                torch.testing.assert_close(tensor, tensors[key], rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(result["outputs"], loaded.predict(x))
        assert result["in a file"]
        assert torch.equal(result["targets"], y)
        assert result["epochs"] == len(history.epochs)
        assert result["settings kept"]
    expected_start = ds.Ensemble(_adapted, 3, shared=ds.adapters.SHARED)
    for result in results:
        assert result["shared"].shared == expected_start.shared
    for key, tensor in results[0]["shared"].state_dict().items():
        assert torch.equal(results[1]["shared"].state_dict()[key], tensor)


def test_what_ranks_do_not_take_is_refused(two):
    assert all(results["refused"] is None for results in two), two[0]["refused"]


def test_a_rank_that_fails_tells_the_others(two):
    assert two[1]["failed"] == "ValueError: no more paper"
    assert two[0]["failed"].startswith("RankFailed")
    assert "rank 1: ValueError: no more paper" in two[0]["failed"]


def test_a_rank_that_is_killed_ends_the_others(two):
    assert "killed" not in two[1]
    words = "RankFailed: `fit` ended on rank 0, because another rank failed (a process that was killed, or a machine"
    assert two[0]["killed"].startswith(words)


def test_a_rank_that_is_killed_while_it_writes_a_checkpoint_leaves_the_one_before(two, expected, folder):
    assert two[0]["killed"]
    assert len(checkpoints_in(folder / "killed" / "joint")) == 2
    assert len(list((folder / "killed" / "joint").glob("step-*"))) == 3  # one is without a manifest
    resumed = _resumed("joint", None, folder / "killed")
    _check(resumed, expected("joint"), resumed)
    assert len(list((folder / "killed" / "joint").glob("step-*"))) == 2


def _failed_on(rank: int, words: str) -> tuple[str, str]:
    """What two ranks say of a failure on one of them."""
    other = f"`fit` ended on rank {1 - rank}, because another rank failed (rank {rank}: {words})."
    return (words, f"RankFailed: {other}") if rank == 0 else (f"RankFailed: {other}", words)


SEEDED = "Draw what is random from a seed (torch.manual_seed(0) at the beginning of the script), and let no"
SHUFFLES = "A loader that shuffles needs generator=torch.Generator().manual_seed(0), and no shard of its own."
ALIKE = "must be the same in all processes; got others on rank 1 than on rank 0"
BATCHES = "must give the same batches in all processes; got"
MISTAKES: dict[str, str | tuple[str, str]] = {
    "data": f"ValueError: `data` {ALIKE}. {SEEDED}",
    "numbers": f"ValueError: `epochs`, `lr` {ALIKE} (2 and 3; 0.02 and 0.04).",
    "checkpoint": f"ValueError: `checkpoint` {ALIKE} ('",
    "weights": f"ValueError: `initial weights` {ALIKE}. {SEEDED}",
    "seed": f"ValueError: `seed of the ensemble` {ALIKE} (0 and 1). {SEEDED}",
    "order": f"ValueError: `data` {BATCHES} other examples on rank 1 in batch 1. {SHUFFLES}",
    "length": f"ValueError: `data` {BATCHES} 10 examples on rank 0 and the end of the data on rank 1",
    "validation": f"ValueError: `validation` {BATCHES} 10 examples on rank 0 and the end of the data on rank 1",
    "reading": _failed_on(1, "OSError: row 38 cannot be read"),
    "callback": _failed_on(0, "ValueError: no more ink"),
    "progress": _failed_on(0, "ValueError: no more ink"),
    "interrupt": _failed_on(1, "KeyboardInterrupt: "),
    "call in a callback": (
        "RuntimeError: `predict` must be called outside of `fit`",
        "RankFailed: `fit` ended on rank 1",
    ),
    "calls": "RuntimeError: `parallel` must have the same calls in all processes; got `save` of 5 members",
    "rows to predict": "ValueError: `data` must give the same examples in all processes, in the same order",
    "order to predict": "ValueError: `data` must give the same examples in all processes, in the same order",
    "full disk": ("RankFailed: `fit` ended on rank 0, because another rank failed (rank 1: OSError: /", "OSError: /"),
    "full disk, saved": ("RankFailed: `save` ended on rank 0, because another rank failed (rank 1: OS", "OSError: /"),
    "full disk, file": ("OSError: /", "RankFailed: `predict` ended on rank 1, because another rank failed (rank 0: OS"),
    "export": "ValueError: `ensemble` must hold all members for an export; got members",
    "attack": "ValueError: `ensemble` must hold all members for a pass; got members",
}


def test_differences_between_ranks_are_told_on_all_of_them(two):
    told = [results["mistakes"] for results in two]
    assert isinstance(told[0], dict), told[0]
    for name, expected in MISTAKES.items():
        for rank, words in enumerate((expected, expected) if isinstance(expected, str) else expected):
            assert told[rank][name].startswith(words), name
    again, after = [words.pop("again") for words in told]
    assert again == after != ""  # nothing of it is in the way of a training that is right
    assert told[0].keys() == told[1].keys() == MISTAKES.keys()


def test_a_training_goes_on_in_the_processes_in_which_it_failed(two, expected):
    tensors, _ = expected("joint")
    assert not isinstance(two[0]["went on"], str), two[0]["went on"]
    for rank, results in enumerate(two):
        weights, told = results["went on"]
        assert told == [_failed_on(0, "ValueError: no more paper")[rank], ""]
        for name, tensor in tensors.items():
            torch.testing.assert_close(weights[name], tensor, rtol=1e-9, atol=1e-11)


def test_outputs_travel_and_weights_do_not(two):
    outputs = (4, 10, 7)  # members, examples, classes; float64
    for results in two:
        sent = results["travelled"]
        assert not isinstance(sent, str), sent
        steps = [place for place, (_, shapes, _) in enumerate(sent) if shapes == [outputs]]
        assert len(steps) == 4
        kinds = [(name.split(".")[1], size) for name, _, size in sent[steps[0] : steps[-1] + 2]]
        assert kinds == [("all_gather_into_tensor", 4 * 10 * 7 * 8), ("all_reduce", 4)] * 4


@pytest.mark.parametrize("against", ["ensemble", "members"])
def test_attacks_by_signs_are_equal_on_given_attacked_inputs(against, two):
    for results in two:
        result = results[f"signs/{against}"]
        assert not isinstance(result, str), result
        expected, weights, differ = result
        assert len(differ) == 20
        assert sum(differ) / 20 < 0.01
        for name, tensor in expected.items():
            torch.testing.assert_close(weights[name], tensor, rtol=1e-9, atol=1e-11)


def test_all_objectives_are_among_the_cases():
    assert set(objectives.OBJECTIVES.values()) == {_cases()[name][0].func for name in FAMILIES}


SCRIPT = """
import logging, os, signal, sys
from functools import partial
import torch, dissensus as ds

logging.basicConfig(level=logging.INFO)

def objective(outputs, targets):
    steps.append(1)
    first = os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"
    if first and os.environ["RANK"] == "1" and len(steps) == 7:
        os.kill(os.getpid(), signal.SIGKILL)
    return ds.objectives.joint(outputs, targets, loss="cross_entropy", pool="probability")

steps = []
generator = torch.Generator().manual_seed(0)
x, y = torch.randn(40, 4, generator=generator), torch.randint(3, (40,), generator=generator)
ens = ds.Ensemble(partial(ds.nets.mlp, 4, 3, (8,), dropout=0.2), 5, parallel="members").double()
settings = {"epochs": 5, "batch_size": 10, "lr": 0.02, "checkpoint": sys.argv[1], "checkpoint_seconds": 0}
history = ds.fit(ens, (x.double(), y), objective, resume=True, parallel="members", **settings)
ens.save(sys.argv[2])
"""


@pytest.mark.slow
def test_torchrun_goes_on_from_the_checkpoint_after_a_process_was_killed(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    source = str(Path(ds.__file__).parents[1])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": source}
    run = partial(subprocess.run, check=True, capture_output=True, text=True, timeout=300, env=environment)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    script = str(tmp_path / "train.py")
    run([sys.executable, script, str(tmp_path / "alone"), str(tmp_path / "expected")])
    told = run([sys.executable, *torchrun, script, str(tmp_path / "checkpoint"), str(tmp_path / "saved")]).stderr
    # torchrun may end the other process before it has said why it stops, which tests without torchrun look at.
    assert "resumed after 1 whole epochs and 6 steps" in told
    build = partial(ds.nets.mlp, 4, 3, (8,), dropout=0.2)
    saved, expected = (ds.Ensemble.load(tmp_path / name, build) for name in ("saved", "expected"))
    for name, tensor in expected.state_dict().items():
        torch.testing.assert_close(saved.state_dict()[name], tensor, rtol=1e-9, atol=1e-11)


def test_without_torchrun_nothing_changes():
    one, other = (_trained("joint", parallel, "loop") for parallel in (None, "members"))
    assert all(torch.equal(one[0][name], other[0][name]) for name in one[0])


def test_other_words_are_refused():
    with pytest.raises(ValueError, match="`parallel` must be one of 'members', 'members\\+data'; got 'data'"):
        _trained("joint", "data")
