"""Lines and levels of an audit's rules, which a user may change."""

import math
import numbers
from typing import Any, NamedTuple

from dissensus import checks


class Limits(NamedTuple):
    """Lines of the rules, and levels of their tests."""

    collusive_level: float = 0.001
    """Probability of calling a sound ensemble collusive, over all tests together."""
    level: float = 0.001
    """Level of each test for dominated, and of all tests of skill together."""
    redundant_level: float = 0.01
    """Level of the test for redundant."""
    no_skill: tuple[float, float] = (0.05, 0.1)
    """Share of a constant prediction's loss that is saved, and kappa, below which an ensemble has no skill."""
    gain: float = 0.03
    """Share of the members' error that pooling saves, below which members say the same."""
    offset: float = 0.25
    """Share of the members' loss that is constant offsets, which cancel in the pool."""
    some_offset: float = 0.1
    """The same share, from which the verdict stays open where diversity is mostly such offsets."""
    mostly: float = 0.5
    """Share of the diversity that counts as "mostly"."""
    weight: float = 0.75
    """Weight of the pool's loss in what members were trained on, as training outputs reveal it."""
    together: float = 0.8
    """Smallest share of members whose outputs on training data are too large."""
    settled: float = 0.03
    """Largest share of the pool's training loss that scaling each member would save: the loss is at its minimum."""
    overstated: float = 0.35
    """Share of the members' training loss that scaling their outputs down would save."""
    leaning: tuple[float, float] = (0.35, 0.65)
    """Share of the pool's generalisation gap that no member has: where all members were trained on all training data,
    and where they may have been trained on parts of it."""
    gap: float = 0.05
    """Logarithm of the smallest generalisation gap that counts."""
    worse: float = 1.2
    """Members' error over that of the reference's members."""
    cancels: float = 0.4
    """Smallest share of the members' additional error, beside a reference, that cancels in the pool."""
    paid: float = 0.9
    """Largest error of the pool over the reference's at which worse members are worth it."""
    better: float = 0.98
    """Largest loss of the best member over the pool's at which it is better."""
    weak: float = 1.25
    """Smallest error of the other members over the best member's, where the pool is no better than the best."""
    unequal: float = 0.2
    """Standard deviation over mean of networks' errors that is unusual, where pooling gains much."""
    much: float = 0.35
    """Gain of pooling that counts as "much" there."""
    known: float = 0.55
    """The best member's share of the ensemble's kappa, below which members alone have little skill."""


LIMITS = Limits()
_LEVELS = ("collusive_level", "level", "redundant_level")


def check_limits(limits: Any) -> None:
    """Refuse anything but `Limits` of finite numbers with levels between 0 and 1."""
    if not isinstance(limits, Limits):
        fix = "Use Limits(gain=0.05), or LIMITS._replace(gain=0.05)."
        checks.refuse("limits", "be of type dissensus.auditing.Limits", type(limits).__name__, fix, TypeError)
    for name, value in limits._asdict().items():
        default = getattr(LIMITS, name)
        entries = value if isinstance(default, tuple) else (value,)
        if not isinstance(entries, tuple | list) or len(entries) != (len(default) if entries is value else 1):
            checks.refuse(f"limits.{name}", f"hold {len(default)} numbers", repr(value))
        for entry in entries:
            if isinstance(entry, bool) or not isinstance(entry, numbers.Real) or not math.isfinite(entry):
                checks.refuse(f"limits.{name}", "be a finite number", repr(entry))
            if name in _LEVELS and not 0 < float(entry) < 1:
                checks.refuse(f"limits.{name}", "lie between 0 and 1", repr(entry))
