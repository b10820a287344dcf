"""Members sampled anew at every step: the stochastic sum of the LDR paper (appendix A.5.1)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Int
from torch import Tensor

from dissensus import checks
from dissensus.axes import LossParts
from dissensus.randomness import Use, derived_seed, random_bits


@dataclass(frozen=True)
class MemberSampling:
    """Samples ``count`` of M members per step and run, each set of them equally likely, on the device.

    The objective sees the sampled members as though they were the ensemble, and its total counts M / count times. Where
    the total is a sum over members plus M times a mean over pairs (`independent`, `a2d`, `divdis`, `ldr`), it is
    unbiased, given everything that the objective holds fixed (LDR's α_n depends on the sampled members, so there it is
    slightly biased). Terms of the ensemble as a whole, as in `augmented`, `joint` and `adp`, become another objective:
    that of an ensemble of the sampled members.
    """

    count: int
    members: int
    keys: Int[Tensor, " R"]

    @classmethod
    def of(
        cls, active_members: int | None, members: int, seeds: Sequence[int], device: torch.device
    ) -> "MemberSampling | None":
        """Sampling of ``active_members`` members; None where every step takes all members."""
        if active_members is None:
            return None
        checks.count("active_members", active_members)
        if active_members > members:
            checks.refuse("active_members", f"be at most {members}, the number of members", active_members)
        keys = torch.tensor([derived_seed(seed, Use.ACTIVE_MEMBERS) for seed in seeds], device=device)
        return cls(active_members, members, keys)

    def select(self, runs: Tensor) -> "MemberSampling":
        """For some runs (bool ``[R]``)."""
        return replace(self, keys=self.keys[runs.to(self.keys.device)])

    def sample(self, step: Int[Tensor, ""]) -> Int[Tensor, "R K"]:
        """The members of a step in every run, in ascending order."""
        bits = random_bits((self.members,), self.keys, step.expand_as(self.keys))
        return bits.argsort(1)[:, : self.count].sort(1).values

    def rows(self, sampled: Int[Tensor, "R K"]) -> Int[Tensor, " RK"]:
        """The places of sampled members among the rows of all runs."""
        first = torch.arange(len(sampled), device=sampled.device).unsqueeze(1) * self.members
        return (first + sampled).flatten()

    def scaled(self, parts: LossParts) -> LossParts:
        """Losses of sampled members as an estimate of the losses of all members."""
        return LossParts(parts.total * (self.members / self.count), parts.parts)

    def scattered(self, value: Tensor, sampled: Int[Tensor, "R K"]) -> Tensor:
        """Numbers of sampled members, ``[R, K]``, at their places among all members, ``[R, M]``; zeros elsewhere."""
        return value.new_zeros(len(value), self.members).scatter(1, sampled, value)
