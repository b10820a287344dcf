"""Members drawn anew at every step: the stochastic sum of the LDR paper (appendix A.5.1)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Int
from torch import Tensor

from dissensus import checks
from dissensus.axes import LossParts
from dissensus.randomness import Use, derived_seed, random_bits


@dataclass(frozen=True)
class Drawn:
    """Draws ``count`` of M members per step and run, each set of them equally likely, on the device.

    The objective sees the drawn members as though they were the ensemble, and its total counts M / count times. Where
    that is a sum over members plus M times a mean over pairs (`independent`, `a2d`, `divdis`, `ldr`), it is right in
    expectation, given whatever the objective holds fixed (LDR's α_n depends on the members drawn, so there it is not
    quite). Terms of the ensemble as a whole, as in `augmented`, `joint` and `adp`, are another objective then: that of
    an ensemble of the members drawn.
    """

    count: int
    members: int
    keys: Int[Tensor, " R"]

    @classmethod
    def of(cls, active_members: int | None, members: int, seeds: Sequence[int], device: torch.device) -> "Drawn | None":
        """None where every step takes all members."""
        if active_members is None:
            return None
        checks.count("active_members", active_members)
        if active_members > members:
            checks.refuse("active_members", f"be at most {members}, the number of members", active_members)
        keys = torch.tensor([derived_seed(seed, Use.ACTIVE_MEMBERS) for seed in seeds], device=device)
        return cls(active_members, members, keys)

    def select(self, runs: Tensor) -> "Drawn":
        """For some runs (bool ``[R]``)."""
        return replace(self, keys=self.keys[runs.to(self.keys.device)])

    def chosen(self, step: Int[Tensor, ""]) -> Int[Tensor, "R K"]:
        """The members that a step draws in every run, in their order."""
        bits = random_bits((self.members,), self.keys, step.expand_as(self.keys))
        return bits.argsort(1)[:, : self.count].sort(1).values

    def rows(self, chosen: Int[Tensor, "R K"]) -> Int[Tensor, " RK"]:
        """Where they lie among the rows of all runs."""
        first = torch.arange(len(chosen), device=chosen.device).unsqueeze(1) * self.members
        return (first + chosen).flatten()

    def scaled(self, parts: LossParts) -> LossParts:
        """Losses of drawn members as an estimate of those of all."""
        return LossParts(parts.total * (self.members / self.count), parts.parts)

    def spread(self, value: Tensor, chosen: Int[Tensor, "R K"]) -> Tensor:
        """Numbers of the members drawn, ``[R, K]``, at their places among all, ``[R, M]``, with zeros between."""
        return value.new_zeros(len(value), self.members).scatter(1, chosen, value)
