"""Suites: which attacks are run in which order, with all of their settings. Each is a plain list.

| suite | what it is for |
|---|---|
| ``"standard"`` | the headline: parameter-free attacks, one after the other on what is left |
| ``"adaptive"`` | more of everything, against masked gradients, members and randomness; then ``"standard"`` |
| ``"paper"`` | the ADP paper's table 2, for comparison: weaker than it should be, and never a headline |
| ``"quick"`` | seconds, for tests: a model that survives it has survived little |
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from dissensus import checks
from dissensus.attacks.apgd import apgd
from dissensus.attacks.case import Adversarial
from dissensus.attacks.gradient import bim, fgsm, mim, perturbed, pgd
from dissensus.attacks.jsma import jsma
from dissensus.attacks.optimisation import carlini_wagner, elastic_net
from dissensus.attacks.square import square
from dissensus.attacks.trials import averaged, elsewhere, rescaled, tried
from dissensus.attacks.victim import Model, PoolName

WHITE, BLACK, TRANSFER = "white-box", "black-box", "transfer"
PASSES = 10
"""Passes over which gradients of a model that draws at random are averaged."""


class Terms(NamedTuple):
    """What suites are written for: the ball, and what is known of model and data."""

    epsilon: float
    norm: Any = "linf"
    pool: PoolName = "probability"
    seed: int = 0
    members: int = 1
    classes: int = 10
    shape: tuple[int, ...] = (3, 32, 32)
    """Of one example."""
    stochastic: bool = False
    """Whether two passes of the model differ."""
    surrogate: Model | None = None

    @property
    def ball(self) -> dict[str, Any]:
        """Settings that attacks within ε share."""
        return {"epsilon": self.epsilon, "norm": self.norm, "pool": self.pool}

    @property
    def squares(self) -> bool:
        """Whether `square` can be run: in L2 it wants images."""
        return self.norm == "linf" or (len(self.shape) == 3 and min(self.shape[1:]) >= 3)


class Setting(NamedTuple):
    """An attack with its settings."""

    name: str
    attack: Callable[..., Adversarial]
    """``(model, x, y) -> Adversarial``."""
    kind: str = WHITE
    """``"white-box"``, ``"black-box"`` or ``"transfer"``."""
    examples: int | None = None
    """On how many it is run at most, the first ones; None: all."""
    bounded: bool = True
    """Whether it keeps to ε. What others find counts for the worst case where it happens to lie within ε."""


class Probing(NamedTuple):
    """How much is spent on curves and checks, which are taken on the first few examples."""

    examples: int = 128
    steps: tuple[int, ...] = (1, 2, 5, 10, 20, 50, 100)
    """Of the curve over steps. The checks take 10 steps as the plain attack."""
    adaptive_steps: int = 20
    """Of `apgd`, for the curve over ε and to set losses against each other."""
    queries: int = 1000
    restarts: int = 5


class Suite(NamedTuple):
    """Attacks in their order, and what is spent on checks."""

    settings: list[Setting]
    on_survivors: bool
    """Whether each attack is run on what those before it have left, so that accuracies are those of all so far."""
    probing: Probing = Probing()


def suite(name: str, terms: Terms) -> Suite:
    """The suite of a name.

    >>> names = [setting.name for setting in suite("standard", Terms(8 / 255)).settings]
    >>> ", ".join(names)
    'APGD-CE, APGD-T, Square'
    """
    checks.one_of("suite", name, SUITES)
    return SUITES[name](terms)


def standard(terms: Terms) -> Suite:
    """APGD-CE and APGD-T of 100 steps, in L2 the nearest points of `carlini_wagner`, and `square` of 5,000 queries.

    This is AutoAttack's standard version (Croce and Hein, 2020) but for FAB-T, which there is none of here: in L2 the
    attack of Carlini and Wagner, judged at ε, takes its place; in L∞ nothing does. On models without masked gradients
    FAB-T breaks next to nothing that APGD-T has left; `autoattack` runs the original. Of an ensemble, the members'
    ratios of logits are attacked as well: their mean probability hides confident members' gradients.
    """
    nearest = partial(carlini_wagner, steps=200, constant=0.1, search_steps=5, pool=terms.pool)
    found = [
        Setting("APGD-CE", partial(apgd, **terms.ball, seed=terms.seed)),
        Setting("APGD-T", partial(apgd, **terms.ball, loss=_towards(terms), seed=terms.seed)),
    ]
    if terms.members > 1:
        found.append(members_logits(terms, 100))
    if terms.norm == "l2":
        found.append(Setting("C&W at ε", partial(tried, craft=nearest, **terms.ball)))
    if terms.squares:
        found.append(Setting("Square", partial(square, **terms.ball, seed=terms.seed), BLACK))
    return Suite(found, on_survivors=True)


def adaptive(terms: Terms) -> Suite:
    """What a masked model has to fear, cheap attacks first, and then ``"standard"``.

    PGD with steps of 2 ε on cross-entropy as it is and on rescaled scores; APGD on cross-entropy and on logits with
    five starts; the members' losses added up, and their logits averaged; transfer from each member and from a
    surrogate; for a model that draws at random, the gradient of the mean of ten passes. Points that are crafted
    elsewhere are judged by the model itself.
    """
    ball, seed = terms.ball, terms.seed
    long = {"epsilon": terms.epsilon, "norm": terms.norm, "steps": 50, "step_size": 2 * terms.epsilon, "seed": seed}
    loss = "DLR" if logit_loss(terms) == "dlr" else "margin"
    rescale = partial(rescaled, craft=partial(pgd, **long, restarts=2), pool=terms.pool)
    found = [
        Setting("PGD, large steps", partial(pgd, **long, pool=terms.pool, restarts=2)),
        Setting("PGD, rescaled", partial(tried, craft=rescale, **ball)),
        Setting("APGD-CE ×5", partial(apgd, **ball, restarts=5, seed=seed + 1)),
        Setting(f"APGD-{loss} ×5", partial(apgd, **ball, loss=logit_loss(terms), restarts=5, seed=seed + 1)),
    ]
    reach = {"epsilon": terms.epsilon, "norm": terms.norm, "seed": seed}
    if terms.stochastic:
        mean = partial(averaged, craft=partial(perturbed, **reach, steps=50), passes=PASSES)
        found.append(Setting("PGD, mean of passes", partial(tried, craft=mean, **ball)))
    if terms.members > 1:
        scores = partial(rescaled, craft=partial(perturbed, **reach, steps=50), pool="score")
        found += [
            Setting("APGD, members' losses", partial(tried, craft=partial(apgd, **reach, pool="members"), **ball)),
            Setting("PGD, mean logits", partial(tried, craft=scores, **ball)),
        ]
    return Suite([*found, *transfers(terms, 20), *standard(terms).settings], on_survivors=True)


def paper(terms: Terms) -> Suite:
    """Table 2 of the ADP paper: ten steps of ε / 10, the last point counts, and fixed constants without a search.

    FGSM, BIM, PGD and MIM run on all examples; Carlini and Wagner's and the elastic-net attack on the first 1,000, with
    1,000 iterations, a rate of 0.01 and confidence 0.1; JSMA on the first 200. The constants are the table's: those
    of MNIST for images of one channel, and those of CIFAR-10 for any other input. Every attack is run on its own.
    Unlike the paper's, these attack the log of the mean probability, and the label rather than the prediction.
    """
    grey = _grey(terms)
    wanted: dict[str, tuple[float, ...]] = {
        **dict.fromkeys(("fgsm", "bim", "pgd", "mim"), (terms.epsilon,)),
        "jsma": (0.3, 0.6) if grey else (0.05, 0.1),
        "carlini_wagner": (0.1, 1.0, 10.0) if grey else (0.001, 0.01, 0.1),
        "elastic_net": (5.0, 10.0) if grey else (1.0, 5.0),
    }
    settings = [published(name, parameter, terms) for name, parameters in wanted.items() for parameter in parameters]
    return Suite(settings, on_survivors=False)


PUBLISHED = ("fgsm", "bim", "pgd", "mim", "jsma", "carlini_wagner", "elastic_net")
"""Attacks of the ADP paper's table 2."""


def published(name: str, parameter: float, terms: Terms) -> Setting:
    """An attack of the ADP paper's table 2 by the one setting that the table varies: ε, γ of JSMA, c of C&W and EAD.

    >>> published("carlini_wagner", 0.01, Terms(0.01)).name
    'C&W c=0.01'
    """
    checks.one_of("name", name, PUBLISHED)
    ball: dict[str, Any] = {"epsilon": parameter, "norm": terms.norm, "pool": terms.pool}
    slow: dict[str, Any] = {**ball, "step_size": parameter / 10, "steps": 10, "stop": False}
    fixed: dict[str, Any] = {
        "steps": 1000,
        "step_size": 0.01,
        "confidence": 0.1,
        "search_steps": 0,
        "constant": parameter,
        "pool": terms.pool,
    }
    few: dict[str, Any] = {
        "preset": "adp",
        "step_size": 0.2 if _grey(terms) else 0.1,
        "distortion": parameter,
        "pool": terms.pool,
    }
    known = {
        "fgsm": Setting("FGSM", partial(fgsm, **ball)),
        "bim": Setting("BIM", partial(bim, **slow)),
        "pgd": Setting("PGD", partial(pgd, **slow, seed=terms.seed)),
        "mim": Setting("MIM", partial(mim, **slow)),
        "jsma": Setting(f"JSMA γ={parameter:g}", partial(jsma, **few), examples=200, bounded=False),
        "carlini_wagner": Setting(
            f"C&W c={parameter:g}", partial(carlini_wagner, **fixed), examples=1000, bounded=False
        ),
        "elastic_net": Setting(
            f"EAD c={parameter:g}", partial(elastic_net, l1_weight=0.01, **fixed), examples=1000, bounded=False
        ),
    }
    return known[name]


def _grey(terms: Terms) -> bool:
    """Images of one channel, for which the paper has MNIST's settings."""
    return len(terms.shape) == 3 and terms.shape[0] == 1


def quick(terms: Terms) -> Suite:
    """The attacks of ``"standard"`` with a tenth of their steps and 100 queries, and transfer where there is any."""
    few: dict[str, Any] = {"steps": 10, "seed": terms.seed}
    found = [
        Setting("APGD-CE", partial(apgd, **terms.ball, **few)),
        Setting("APGD-T", partial(apgd, **terms.ball, **few, loss=_towards(terms), classes=3)),
        *([members_logits(terms, 10)] if terms.members > 1 else []),
        *transfers(terms, 10),
    ]
    if terms.squares:
        found.append(Setting("Square", partial(square, **terms.ball, queries=100, seed=terms.seed), BLACK))
    return Suite(found, True, Probing(examples=64, steps=(1, 2, 5, 10), adaptive_steps=10, queries=100, restarts=3))


SUITES: dict[str, Callable[[Terms], Suite]] = {
    "standard": standard,
    "adaptive": adaptive,
    "paper": paper,
    "quick": quick,
}


def transfers(terms: Terms, steps: int) -> list[Setting]:
    """Attacks that are crafted by momentum on each member, and on a surrogate, and tried on the model."""
    told: dict[str, Any] = {
        "epsilon": terms.epsilon,
        "norm": terms.norm,
        "steps": steps,
        "step_size": 2 * terms.epsilon / steps,
        "random_start": False,
        "decay": 1.0,
    }
    crafts: dict[str, Callable[..., Any]] = {}
    if terms.members > 1:
        crafts = {f"member {i}": partial(perturbed, **told, pool=i) for i in range(terms.members)}
    if terms.surrogate is not None:
        crafts["surrogate"] = partial(elsewhere, source=terms.surrogate, craft=partial(perturbed, **told))
    judged = partial(tried, **terms.ball)
    return [Setting(f"from {name}", partial(judged, craft=craft), TRANSFER) for name, craft in crafts.items()]


def members_logits(terms: Terms, steps: int) -> Setting:
    """APGD on the members' ratios of logits, added up, and judged by the ensemble."""
    loss = "dlr" if terms.classes > 2 else "margin"
    reach = {"epsilon": terms.epsilon, "norm": terms.norm, "seed": terms.seed}
    together = partial(apgd, **reach, steps=steps, pool="members", loss=loss)
    return Setting("APGD, members' logits", partial(tried, craft=together, **terms.ball))


def _towards(terms: Terms) -> Any:
    """Targeted DLR; of two classes there is but one other, and the margin is the same. Of three, `apgd` sees to it."""
    return "targeted_dlr" if terms.classes >= 3 else "margin"


def logit_loss(terms: Terms) -> Any:
    """The loss of logits that cross-entropy is set beside: DLR, or the margin where that does better.

    Of an ensemble's log mean probability DLR is a poor guide: the label's is flat at zero, and the ratio rises when the
    third class falls. Three confident networks that the margin brought to 10 % were left at 62 %. Of two classes there
    is no such ratio.
    """
    pooled = terms.members > 1 and terms.pool in ("probability", "members")
    return "margin" if pooled or terms.classes < 3 else "dlr"
