"""Members that have converged stand still, one after the other, and the rest go on beside them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool
from torch import Tensor

from dissensus import checks


@dataclass(frozen=True)
class Convergence:
    """When a member of `dissensus.fit` has converged (ADP paper, Algorithm 1, which leaves that open).

    After every epoch each member's own loss on the training data, L, is looked at: the objective's ``member_loss``,
    averaged over the epoch as it was trained on (of a masked network, the mean of its masks'). It has improved on the
    best one so far, b, where L < b − tolerance · |b|; then b ← L. A member without an improvement in the last
    ``patience`` epochs has converged. Of those that have, one is frozen per epoch: the one whose last improvement is
    longest ago, of several the first. The others train on, and one that improves meanwhile has not converged.

    Its own loss, since the total would hold everybody back while one member moves. On training data, since what
    converges is the optimisation; what validation data says is for ``patience`` and ``watch="member"`` of `fit`. A
    schedule that has yet to lower the rate makes a plateau that is not the end: be patient for longer than it lasts.

    Attributes:
        patience: Epochs without an improvement.
        tolerance: The largest relative fall of the loss that is none.
    """

    patience: int = 5
    tolerance: float = 1e-3

    def __post_init__(self) -> None:
        checks.count("patience", self.patience)
        checks.number("tolerance", self.tolerance, 0)


class Freezing:
    """Applies the rule, epoch by epoch, on the host. Epochs count from 1, and 0 stands for none."""

    def __init__(self, rule: Convergence, members: int) -> None:
        self.rule = rule
        self.best = torch.full((members,), torch.inf, dtype=torch.float64)
        self.improved_at = torch.zeros(members, dtype=torch.int64)
        self.frozen_at = torch.zeros(members, dtype=torch.int64)

    @classmethod
    def of(cls, rule: Convergence | None, members: int, active_members: int | None) -> "Freezing | None":
        """None where nobody is to be frozen."""
        if rule is None:
            return None
        if not isinstance(rule, Convergence):
            fix = "Members that are not to train at all? Use frozen=[...]."
            checks.refuse("freeze", "be a dissensus.train.Convergence", repr(rule), fix, TypeError)
        if active_members is not None:
            fix = "Leave one out: drawn members see too little of an epoch to be judged by it."
            checks.refuse("freeze", "come without `active_members`", "both", fix)
        return cls(rule, members)

    def see(self, epoch: int, losses: Sequence[float], active: Bool[Tensor, " M"]) -> Bool[Tensor, " M"]:
        """Take an epoch's losses into account; return which members go on: those that did, but for one at most."""
        now = torch.tensor(losses, dtype=torch.float64).view(len(self.best), -1).mean(1)
        bar = (self.best - self.rule.tolerance * self.best.abs()).nan_to_num(torch.inf)  # before the first: inf - inf
        better = now < bar
        self.best = torch.where(better, now, self.best)
        self.improved_at = torch.where(better, epoch, self.improved_at)
        waited = torch.where(active.cpu(), epoch - self.improved_at, 0)
        longest = int(waited.argmax())  # the first of several
        if waited[longest] < self.rule.patience:
            return active
        self.frozen_at[longest] = epoch
        return active & (torch.arange(len(active), device=active.device) != longest)

    def epochs(self) -> list[int | None]:
        """The epoch at whose end each member was frozen; None for those that were not."""
        return [epoch or None for epoch in self.frozen_at.tolist()]

    def members(self) -> list[int]:
        """Those that have been frozen."""
        return (self.frozen_at > 0).nonzero().flatten().tolist()

    def tensors(self) -> dict[str, Tensor]:
        """Everything a checkpoint must hold."""
        return {"best": self.best, "improved_at": self.improved_at, "frozen_at": self.frozen_at}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over what `tensors` gave."""
        self.best, self.improved_at, self.frozen_at = (tensors[name].cpu() for name in self.tensors())


def standing(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The buffers that stand still in a member that rests: all but dropout's counters.

    Its outputs still count, and would otherwise have lost the same units at every step.
    """
    return {name: tensor for name, tensor in state.items() if not name.endswith(".step")}
