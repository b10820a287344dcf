"""Candidates in training and after it, and the outputs of their runs."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dissensus import calls
from dissensus.calls import NetworkInputs
from dissensus.train.evaluation import evaluation_batch
from dissensus.train.grid import key_of
from dissensus.train.sweep_result import Sweep
from dissensus.train.tuning.contest import OVERALL, Contest, RunKey
from dissensus.train.tuning.proposing import (
    Parameters,
)
from dissensus.train.tuning.scoring import Scores


@dataclass
class Entry:
    """A candidate in training and after it."""

    number: int
    point: dict[str, Any]
    parameters: Parameters | None
    """None for independent versions of proposals, which were not proposed themselves."""
    independent: bool
    bracket: int
    contest: Contest = field(init=False)
    swept: Sweep = field(init=False)
    scores: dict[RunKey, Scores] = field(default_factory=dict)
    """On test rows."""
    verdicts: dict[RunKey, str] = field(default_factory=dict)

    def runs(self, contest: int) -> list[int]:
        """Its runs in its sweep."""
        return self.contest.runs_of(self.number, contest)

    def value(self, contest: int) -> float:
        """What it is compared by; lower is better."""
        return self.contest.value(self.number, contest)

    def finished(self, contest: int) -> bool:
        """Whether it was left in a contest to the end, without a run that failed."""
        left = self.number in self.contest.finalists(contest)
        return left and not self.failed(contest) and math.isfinite(self.value(contest))

    def failed(self, contest: int = OVERALL) -> bool:
        """Whether one of its runs has failed."""
        return any(self.swept.outcomes[run].status == "failed" for run in self.runs(contest))

    def by_split(self, contest: int, until: int | None = None) -> dict[int, list[float]]:
        """The best values of its runs, split by split, in the order of seeds."""
        values: dict[int, list[float]] = {}
        for run in self.runs(contest):
            values.setdefault(self.contest.runs[run].split, []).append(self.contest.best(run, until))
        return values

    def epochs(self) -> list[int]:
        """Epochs of its runs."""
        return [len(self.swept.history(run).epochs) for run in self.runs(OVERALL)]

    def left_at(self, contest: int = OVERALL) -> int | None:
        """The rung at which it left a contest; None if it did not. Runs may go on for another one."""
        rungs = zip(self.contest.rungs, self.contest.left, strict=False)
        return next((rung for rung, left in rungs if self.number not in left[contest]), None)


def canonical(point: Mapping[str, Any]) -> str:
    """The same text for equal points, in whatever order: 0 and 0.0 are one number."""
    return key_of({name: float(value) if isinstance(value, int | float) else value for name, value in point.items()})


@torch.no_grad()
def outputs_of(swept: Sweep, numbers: Sequence[int], x: NetworkInputs, batch_size: int = 1024) -> dict[int, Tensor]:
    """Member outputs ``[M, N, ...]`` of some runs of a sweep on the same inputs, on the host."""
    result: dict[int, Tensor] = {}
    for group in swept.groups:
        places = [place for place, run in enumerate(group.runs) if run in numbers]
        if not places:
            continue
        rows = [place * group.members + member for place in places for member in range(group.members)]
        body = group.body.subset(rows).eval()
        body.choices = group.body.choices
        device = next(body.parameters()).device
        pieces = [
            body.run(None, calls.mapped(lambda tensor: tensor.to(device), batch)).cpu()  # noqa: B023
            for batch in calls.split(x, evaluation_batch(len(rows), batch_size))
        ]
        outputs = torch.cat(pieces, 1).unflatten(0, (len(places), -1))
        outputs = outputs.float() if outputs.dtype in (torch.bfloat16, torch.float16) else outputs
        result |= {group.runs[place]: outputs[i] for i, place in enumerate(places)}
    return result


def run_epochs(entries: Sequence[Entry]) -> int:
    """Epochs of all runs of candidates together."""
    return sum(sum(entry.epochs()) for entry in entries)


def mean(values: Sequence[float]) -> float:
    """The mean; NaN of nothing."""
    return sum(values) / len(values) if values else math.nan
