"""A moment of training as tensors and plain facts, and the way back to it."""

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dissensus.train.engine import Engine
from dissensus.train.finished import Finished
from dissensus.train.history import Failure


def tensors_of(engine: Engine) -> dict[str, Tensor]:
    """Everything that a checkpoint must hold, as tensors."""
    watch, finished, freezing = engine.watch, engine.finished, engine.freezing
    groups: dict[str, Mapping[str, Tensor]] = {
        "state": engine.state,
        "buffers": engine.body.state(),
        "backup": engine.backup,
        "sums": engine.sums,
        "watch": watch.tensors() if watch is not None else {},
        "freezing": freezing.tensors() if freezing is not None else {},
        "finished": {"flat": finished.flat} if finished is not None else {},
        "finished_state": finished.state if finished is not None else {},
    }
    flat = {f"{group}/{name}": tensor for group, tensors in groups.items() for name, tensor in tensors.items()}
    return {"flat": engine.flat, "active": engine.active, **flat}


def facts_of(engine: Engine) -> dict[str, Any]:
    """Everything that a checkpoint must hold besides tensors, ready for JSON."""
    return {
        "epoch": engine.epoch,
        "in_epoch": engine.in_epoch,
        "steps": engine.steps,
        "run_ids": engine.run_ids,
        "examples": engine.examples,
        "seconds": engine.elapsed,
        "best_epochs": list(engine.best_epochs.items()),
        "histories": list(engine.histories.items()),
        "failures": [(run, vars(failure)) for run, failure in engine.failures.items()],
        "backend": engine.backend,
        "members_at_once": _members_at_once(engine),
    }


def _members_at_once(engine: Engine) -> int | None:
    if not engine.planned:
        return None
    return len(engine.body) if engine.grouped is None else engine.grouped.at_once


def go_back(engine: Engine, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Go back to the moment of `tensors_of` and `facts_of`."""
    kept = set(facts["run_ids"])
    if kept and kept != set(engine.run_ids):
        engine.select(torch.tensor([run in kept for run in engine.run_ids]))
    engine.run_ids = [run for run in engine.run_ids if run in kept]
    groups: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        group, _, key = name.partition("/") if "/" in name else ("", "", name)
        groups.setdefault(group, {})[key] = tensor.to(engine.flat.device)
    flat = groups[""]["flat"]
    engine.body.attach(flat, groups.get("buffers", {}))
    engine.flat, engine.active = flat.requires_grad_(), groups[""]["active"]
    engine.state, engine.backup = groups.get("state", {}), groups.get("backup", {})
    engine.sums = groups.get("sums", {})
    engine.resting = not bool(engine.active.all())
    if engine.watch is not None:
        engine.watch.load(groups["watch"])
    if engine.freezing is not None:
        engine.freezing.load(groups["freezing"])
    finished = groups.get("finished")
    engine.finished = Finished(finished["flat"], groups.get("finished_state", {})) if finished else None
    engine.epoch, engine.in_epoch, engine.steps = facts["epoch"], facts["in_epoch"], facts["steps"]
    engine.examples, engine.seconds, engine.started = facts["examples"], facts["seconds"], time.perf_counter()
    engine.best_epochs, engine.histories = dict(facts["best_epochs"]), dict(facts["histories"])
    engine.failures = {run: Failure(**failure) for run, failure in facts["failures"]}
    engine.backend = facts["backend"]
    engine.members_at_once = facts["members_at_once"]
