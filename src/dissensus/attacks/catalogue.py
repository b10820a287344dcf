"""The table of built-in attacks: `suites`, the command line, documentation and contract tests read it.

To add an attack, write its function in a file with the attack's name, and add a line to `ATTACKS`. To export it as
``dissensus.attacks.NAME``, import it in ``__init__``. An attack from outside the package needs no line: pass it as an
argument to `evaluate`, `transfer_matrix` or `over`.

An attack is a function ``(model, x, y, *, pool, box, ...) -> Adversarial`` that passes the contract tests.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from dissensus.attacks.apgd import apgd
from dissensus.attacks.bim import bim
from dissensus.attacks.carlini_wagner import carlini_wagner
from dissensus.attacks.elastic_net import elastic_net
from dissensus.attacks.fgsm import fgsm
from dissensus.attacks.jsma import jsma
from dissensus.attacks.mim import mim
from dissensus.attacks.pgd import pgd
from dissensus.attacks.problem import Attack
from dissensus.attacks.random_noise import random_noise
from dissensus.attacks.square import square

WHITE_BOX, BLACK_BOX, TRANSFER = "white-box", "black-box", "transfer"
BALLS = ("linf", "l2")


@dataclass(frozen=True)
class AttackEntry:
    """A built-in attack. Its typical settings are the defaults of its function."""

    function: Attack
    label: str
    """Name in tables."""
    norms: tuple[str, ...]
    """Norms of the ball, or of the distance that is minimised."""
    kind: str = WHITE_BOX
    """``"white-box"``: it needs gradients; ``"black-box"``: it needs outputs only."""
    bounded: bool = True
    """Whether it takes ``epsilon`` and stays within it. Other attacks look for the nearest adversarial point."""
    targeted: bool = True
    """Whether it takes ``target``."""
    random: bool = False
    """Whether it takes ``seed``."""
    quick: Mapping[str, Any] = field(default_factory=dict)
    """Settings for the quick suite and for tests, where the defaults take long."""


_FEW_STEPS = {"steps": 20, "step_size": 0.05, "search_steps": 2, "constant": 3.0}

ATTACKS: Mapping[str, AttackEntry] = MappingProxyType(
    {
        "fgsm": AttackEntry(fgsm, "FGSM", BALLS),
        "bim": AttackEntry(bim, "BIM", BALLS),
        "pgd": AttackEntry(pgd, "PGD", BALLS, random=True),
        "mim": AttackEntry(mim, "MIM", BALLS),
        "apgd": AttackEntry(apgd, "APGD", BALLS, random=True, quick={"steps": 10}),
        "square": AttackEntry(square, "Square", BALLS, BLACK_BOX, random=True, quick={"queries": 100}),
        "random_noise": AttackEntry(random_noise, "noise", BALLS, BLACK_BOX, targeted=False, random=True),
        "carlini_wagner": AttackEntry(carlini_wagner, "C&W", ("l2",), bounded=False, quick=_FEW_STEPS),
        "elastic_net": AttackEntry(elastic_net, "EAD", ("l1",), bounded=False, quick=_FEW_STEPS),
        "jsma": AttackEntry(jsma, "JSMA", ("l0",), bounded=False),
    }
)
