"""Members that have converged are frozen, one after the other; the others continue to train."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool
from torch import Tensor

from dissensus import checks
from dissensus.dropout import counter_names


@dataclass(frozen=True)
class Convergence:
    """When a member of `dissensus.fit` has converged (ADP paper, Algorithm 1, which leaves that open).

    After every epoch the rule looks at each member's loss on the training data, L: the objective's ``member_loss``,
    averaged over the epoch (for a masked network, averaged over its masks too). The loss has improved on the best one
    so far, b, where L < b − tolerance · |b|; then b ← L. A member without an improvement in the last ``patience``
    epochs has converged. One converged member is frozen per epoch: the one whose last improvement is longest ago, and
    the first of several. The others train on; a member that improves meanwhile has not converged.

    The rule uses the member's loss, because the total would hold all members back while one of them improves. It uses
    training data, because it is the optimisation that converges; validation data decides through ``patience`` and
    ``watch="member"`` of `fit`. Before a schedule lowers the rate there may be a plateau that is not the end: choose a
    ``patience`` longer than that plateau.

    Attributes:
        patience: Epochs without an improvement.
        tolerance: The largest relative fall of the loss that does not count as an improvement.
    """

    patience: int = 5
    tolerance: float = 1e-3

    def __post_init__(self) -> None:
        checks.count("patience", self.patience)
        checks.number("tolerance", self.tolerance, 0)


class Freezing:
    """Applies the rule after every epoch, on the host. Epochs count from 1; 0 means never."""

    def __init__(self, rule: Convergence, members: int) -> None:
        self.rule = rule
        self.best = torch.full((members,), torch.inf, dtype=torch.float64)
        self.improved_at = torch.zeros(members, dtype=torch.int64)
        self.frozen_at = torch.zeros(members, dtype=torch.int64)

    @classmethod
    def of(cls, rule: Convergence | None, members: int, active_members: int | None) -> "Freezing | None":
        """Freezing by a rule; None without a rule."""
        if rule is None:
            return None
        if not isinstance(rule, Convergence):
            fix = "Members that are not to train at all? Use frozen=[...]."
            checks.refuse("freeze", "be a dissensus.train.Convergence", repr(rule), fix, TypeError)
        if active_members is not None:
            fix = "Leave one out: drawn members see too little of an epoch to be judged by it."
            checks.refuse("freeze", "come without `active_members`", "both", fix)
        return cls(rule, members)

    def update(self, epoch: int, losses: Sequence[float], active: Bool[Tensor, " M"]) -> Bool[Tensor, " M"]:
        """Take the losses of an epoch into account; return the members that go on: all active ones, or one fewer."""
        current = torch.tensor(losses, dtype=torch.float64).view(len(self.best), -1).mean(1)
        bar = (self.best - self.rule.tolerance * self.best.abs()).nan_to_num(torch.inf)  # before the first: inf - inf
        better = current < bar
        self.best = torch.where(better, current, self.best)
        self.improved_at = torch.where(better, epoch, self.improved_at)
        waited = torch.where(active.cpu(), epoch - self.improved_at, 0)
        longest = int(waited.argmax())  # the first of several
        if waited[longest] < self.rule.patience:
            return active
        self.frozen_at[longest] = epoch
        return active & (torch.arange(len(active), device=active.device) != longest)

    def epochs(self) -> list[int | None]:
        """The epoch at the end of which each member was frozen; None for members that were not."""
        return [epoch or None for epoch in self.frozen_at.tolist()]

    def members(self) -> list[int]:
        """Members that have been frozen."""
        return (self.frozen_at > 0).nonzero().flatten().tolist()

    def tensors(self) -> dict[str, Tensor]:
        """Everything that a checkpoint must hold."""
        return {"best": self.best, "improved_at": self.improved_at, "frozen_at": self.frozen_at}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore what `tensors` returned."""
        self.best, self.improved_at, self.frozen_at = (tensors[name].cpu() for name in self.tensors())


def frozen_buffers(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The buffers that do not change in a member that rests: all but the counters of dropout.

    Its outputs still count, and dropout would otherwise drop the same units at every step.
    """
    counters = counter_names(state)
    return {name: tensor for name, tensor in state.items() if name not in counters}
