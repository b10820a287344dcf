"""Suites: lists of attacks with their settings, in the order in which they run.

| suite | purpose |
|---|---|
| ``"standard"`` | the headline: parameter-free attacks, each on the examples that earlier ones left |
| ``"adaptive"`` | more attacks, against masked gradients, ensembles and randomness; then ``"standard"`` |
| ``"paper"`` | the ADP paper's table 2, for comparison: too weak for a headline |
| ``"quick"`` | seconds, for tests: withstanding it means little |
"""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

from dissensus import checks
from dissensus.attacks.apgd import apgd
from dissensus.attacks.carlini_wagner import carlini_wagner
from dissensus.attacks.catalogue import ATTACKS, BLACK_BOX, TRANSFER, WHITE_BOX
from dissensus.attacks.crafting import (
    Craft,
    craft_on_repeated_passes,
    craft_on_rescaled,
    craft_on_source,
    tried,
)
from dissensus.attacks.gradient import perturbed
from dissensus.attacks.pgd import pgd
from dissensus.attacks.problem import Attack
from dissensus.attacks.square import square
from dissensus.attacks.target_model import Model, PoolName

PASSES = 10
"""Number of passes over which gradients of a stochastic model are averaged."""


class Terms(NamedTuple):
    """What the settings of a suite depend on: the ball, the model and the data."""

    epsilon: float
    norm: Any = "linf"
    pool: PoolName = "probability"
    seed: int = 0
    members: int = 1
    classes: int = 10
    shape: tuple[int, ...] = (3, 32, 32)
    """Shape of one example."""
    stochastic: bool = False
    """Whether two passes of the model differ."""
    surrogate: Model | None = None

    @property
    def ball(self) -> dict[str, Any]:
        """Settings that all attacks within ε share."""
        return {"epsilon": self.epsilon, "norm": self.norm, "pool": self.pool}

    @property
    def squares(self) -> bool:
        """Whether `square` can run: in L2 it needs images."""
        return self.norm == "linf" or (len(self.shape) == 3 and min(self.shape[1:]) >= 3)

    @property
    def full_range(self) -> float:
        """ε from which every point of [0, 1] can be reached from any other: 1 in L∞, √D in L2."""
        size = 1.0
        for side in self.shape:
            size *= side
        return 1.0 if self.norm == "linf" else size**0.5


class Setting(NamedTuple):
    """An attack with its settings."""

    name: str
    attack: Attack
    """``(model, x, y) -> Adversarial``; in a suite from outside the package, inputs alone will do."""
    kind: str = WHITE_BOX
    """``"white-box"``, ``"black-box"`` or ``"transfer"``."""
    examples: int | None = None
    """Largest number of examples, the first ones; None: all."""
    bounded: bool = True
    """Whether it stays within ε. Results of other attacks count for the worst case where they lie within ε."""


class DiagnosticBudget(NamedTuple):
    """Effort for curves and checks, which use the first few examples."""

    examples: int = 128
    steps: tuple[int, ...] = (1, 2, 5, 10, 20, 50, 100)
    """Steps of PGD in the curve over steps. The checks use 10 steps as the plain attack."""
    apgd_steps: int = 20
    """Steps of `apgd`, for the curve over ε and the comparison of losses."""
    queries: int = 1000
    restarts: int = 5


class Suite(NamedTuple):
    """Attacks in the order in which they run, and the effort for checks."""

    settings: list[Setting]
    on_survivors: bool
    """Whether each attack runs on the examples that earlier ones left; accuracies are then those of all so far."""
    budget: DiagnosticBudget = DiagnosticBudget()
    name: str = "custom"


SuiteMaker = Callable[[Terms], Suite]


def standard(terms: Terms) -> Suite:
    """APGD-CE and APGD-T of 100 steps, in L2 the nearest points of `carlini_wagner`, and `square` of 5,000 queries.

    This is AutoAttack's standard version (Croce and Hein, 2020) without FAB-T: in L2 the attack of Carlini and Wagner,
    tested at ε, replaces it; in L∞ nothing does. On models without masked gradients, FAB-T succeeds on hardly any
    example that APGD-T has left; `autoattack` runs the original. For an ensemble, the members' DLR is attacked as well,
    because the mean probability masks the gradients of confident members.
    """
    nearest = partial(carlini_wagner, steps=200, constant=0.1, search_steps=5, pool=terms.pool)
    settings = [
        Setting("APGD-CE", partial(apgd, **terms.ball, seed=terms.seed)),
        Setting("APGD-T", partial(apgd, **terms.ball, loss=_targeted_loss(terms), seed=terms.seed)),
    ]
    if terms.members > 1:
        settings.append(members_logits(terms, 100))
    if terms.norm == "l2":
        settings.append(Setting("C&W at ε", partial(tried, craft=nearest, **terms.ball)))
    if terms.squares:
        settings.append(Setting("Square", partial(square, **terms.ball, seed=terms.seed), BLACK_BOX))
    return Suite(settings, on_survivors=True, name="standard")


def adaptive(terms: Terms) -> Suite:
    """Attacks on models with masked gradients, cheap ones first, followed by ``"standard"``.

    PGD with steps of 2 ε on cross-entropy, with and without rescaled scores; APGD on cross-entropy and on logits with
    five starts; the sum of the members' losses, and their mean logits; transfer from each member and from a surrogate;
    for a stochastic model, the gradient of the mean of ten passes. Points crafted on another model are tested on the
    model itself.
    """
    ball, seed = terms.ball, terms.seed
    large_steps = {
        "epsilon": terms.epsilon,
        "norm": terms.norm,
        "steps": 50,
        "step_size": 2 * terms.epsilon,
        "seed": seed,
    }
    loss = "DLR" if logit_loss(terms) == "dlr" else "margin"
    rescaled = partial(craft_on_rescaled, craft=partial(pgd, **large_steps, restarts=2), pool=terms.pool)
    settings = [
        Setting("PGD, large steps", partial(pgd, **large_steps, pool=terms.pool, restarts=2)),
        Setting("PGD, rescaled", partial(tried, craft=rescaled, **ball)),
        Setting("APGD-CE ×5", partial(apgd, **ball, restarts=5, seed=seed + 1)),
        Setting(f"APGD-{loss} ×5", partial(apgd, **ball, loss=logit_loss(terms), restarts=5, seed=seed + 1)),
    ]
    reach = {"epsilon": terms.epsilon, "norm": terms.norm, "seed": seed}
    if terms.stochastic:
        mean = partial(craft_on_repeated_passes, craft=partial(perturbed, **reach, steps=50), passes=PASSES)
        settings.append(Setting("PGD, mean of passes", partial(tried, craft=mean, **ball)))
    if terms.members > 1:
        mean_logits = partial(craft_on_rescaled, craft=partial(perturbed, **reach, steps=50), pool="score")
        settings += [
            Setting("APGD, members' losses", partial(tried, craft=partial(apgd, **reach, pool="members"), **ball)),
            Setting("PGD, mean logits", partial(tried, craft=mean_logits, **ball)),
        ]
    settings += [*transfers(terms, 20), *standard(terms).settings]
    return Suite(settings, on_survivors=True, name="adaptive")


def paper(terms: Terms) -> Suite:
    """Table 2 of the ADP paper: ten steps of ε / 10, the last point counts, and fixed constants without a search.

    FGSM, BIM, PGD and MIM run on all examples; Carlini and Wagner's and the elastic-net attack on the first 1,000, with
    1,000 iterations, a learning rate of 0.01 and confidence 0.1; JSMA on the first 200. The constants are the table's:
    those of MNIST for images with one channel, and those of CIFAR-10 for any other input. Attacks run independently.
    Unlike the paper's, they attack the log of the mean probability, and the label rather than the prediction.
    """
    grey = _is_grey(terms)
    parameters: dict[str, tuple[float, ...]] = {
        **dict.fromkeys(("fgsm", "bim", "pgd", "mim"), (terms.epsilon,)),
        "jsma": (0.3, 0.6) if grey else (0.05, 0.1),
        "carlini_wagner": (0.1, 1.0, 10.0) if grey else (0.001, 0.01, 0.1),
        "elastic_net": (5.0, 10.0) if grey else (1.0, 5.0),
    }
    settings = [published(name, value, terms) for name, values in parameters.items() for value in values]
    return Suite(settings, on_survivors=False, name="paper")


PUBLISHED = ("fgsm", "bim", "pgd", "mim", "jsma", "carlini_wagner", "elastic_net")
"""Attacks of the ADP paper's table 2."""


def published(name: str, parameter: float, terms: Terms) -> Setting:
    """An attack of the ADP paper's table 2, by the one setting that the table varies: ε, γ of JSMA, c of C&W and EAD.

    >>> published("carlini_wagner", 0.01, Terms(0.01)).name
    'C&W c=0.01'
    """
    checks.one_of("name", name, PUBLISHED)
    entry, settings = ATTACKS[name], {"pool": terms.pool}
    if entry.bounded:
        settings |= {"epsilon": parameter, "norm": terms.norm}
        if name != "fgsm":
            settings |= {"step_size": parameter / 10, "steps": 10, "stop": False}
        if entry.random:
            settings |= {"seed": terms.seed}
        return Setting(entry.label, partial(entry.function, **settings), entry.kind)
    if name == "jsma":
        settings |= {"preset": "adp", "step_size": 0.2 if _is_grey(terms) else 0.1, "distortion": parameter}
        symbol, examples = "γ", 200
    else:
        settings |= {"steps": 1000, "step_size": 0.01, "confidence": 0.1, "search_steps": 0, "constant": parameter}
        settings |= {"l1_weight": 0.01} if name == "elastic_net" else {}
        symbol, examples = "c", 1000
    attack = partial(entry.function, **settings)
    return Setting(f"{entry.label} {symbol}={parameter:g}", attack, entry.kind, examples, bounded=False)


def _is_grey(terms: Terms) -> bool:
    """Whether inputs are images with one channel, for which the paper has MNIST's settings."""
    return len(terms.shape) == 3 and terms.shape[0] == 1


def quick(terms: Terms) -> Suite:
    """The attacks of ``"standard"`` with a tenth of the steps and 100 queries, and transfer where possible."""
    apgd_settings = {**terms.ball, **ATTACKS["apgd"].quick, "seed": terms.seed}
    settings = [
        Setting("APGD-CE", partial(apgd, **apgd_settings)),
        Setting("APGD-T", partial(apgd, **apgd_settings, loss=_targeted_loss(terms), classes=3)),
        *([members_logits(terms, 10)] if terms.members > 1 else []),
        *transfers(terms, 10),
    ]
    if terms.squares:
        square_settings = {**terms.ball, **ATTACKS["square"].quick, "seed": terms.seed}
        settings.append(Setting("Square", partial(square, **square_settings), BLACK_BOX))
    budget = DiagnosticBudget(examples=64, steps=(1, 2, 5, 10), apgd_steps=10, queries=100, restarts=3)
    return Suite(settings, True, budget, "quick")


SUITES: Mapping[str, SuiteMaker] = MappingProxyType(
    {"standard": standard, "adaptive": adaptive, "paper": paper, "quick": quick}
)


def suite_of(choice: str | Suite | SuiteMaker, terms: Terms) -> Suite:
    """The suite of a name. A suite from outside the package, or a function that makes one, is tested by the evaluator.

    >>> names = [setting.name for setting in suite_of("standard", Terms(8 / 255)).settings]
    >>> ", ".join(names)
    'APGD-CE, APGD-T, Square'
    """
    if isinstance(choice, str):
        checks.one_of("suite", choice, SUITES)
        return SUITES[choice](terms)
    custom = choice if isinstance(choice, Suite) else choice(terms)
    return custom._replace(settings=[retested(setting, terms) for setting in custom.settings])


def as_setting(attack: str | Setting | Attack, terms: Terms, use_quick: bool = False) -> Setting:
    """An attack that runs after a suite: a name of `ATTACKS`, a `Setting`, or a function ``(model, x, y)``.

    >>> as_setting("mim", Terms(8 / 255)).name
    'MIM'
    """
    if isinstance(attack, str):
        checks.one_of("attacks", attack, ATTACKS)
        entry = ATTACKS[attack]
        settings = {"pool": terms.pool, **(entry.quick if use_quick else {})}
        settings |= {"epsilon": terms.epsilon, "norm": terms.norm} if entry.bounded else {}
        settings |= {"seed": terms.seed} if entry.random else {}
        return Setting(entry.label, partial(entry.function, **settings), entry.kind, bounded=entry.bounded)
    if not isinstance(attack, Setting):
        if not callable(attack):
            fix = "Give a name, a Setting, or a function (model, x, y) -> Adversarial."
            checks.refuse("attacks", "hold names, settings or functions", type(attack).__name__, fix, TypeError)
        wrapped = attack.func if isinstance(attack, partial) else attack
        attack = Setting(getattr(wrapped, "__name__", type(wrapped).__name__), attack)
    return retested(attack, terms)


def retested(setting: Setting, terms: Terms) -> Setting:
    """The setting with results that are not trusted: points are clipped to ball and box, and tested on the model.

    Points of an attack that is not bounded by ε are tested where they are.
    """
    reach = {"epsilon": terms.epsilon, "clip": True} if setting.bounded else {"epsilon": terms.full_range}
    return setting._replace(attack=partial(tried, craft=setting.attack, norm=terms.norm, pool=terms.pool, **reach))


def transfers(terms: Terms, steps: int) -> list[Setting]:
    """Attacks crafted with momentum on each member and on a surrogate, and tested on the model."""
    settings: dict[str, Any] = {
        "epsilon": terms.epsilon,
        "norm": terms.norm,
        "steps": steps,
        "step_size": 2 * terms.epsilon / steps,
        "random_start": False,
        "decay": 1.0,
    }
    crafts: dict[str, Craft] = {}
    if terms.members > 1:
        crafts = {f"member {i}": partial(perturbed, **settings, pool=i) for i in range(terms.members)}
    if terms.surrogate is not None:
        crafts["surrogate"] = partial(craft_on_source, source=terms.surrogate, craft=partial(perturbed, **settings))
    test = partial(tried, **terms.ball)
    return [Setting(f"from {name}", partial(test, craft=craft), TRANSFER) for name, craft in crafts.items()]


def members_logits(terms: Terms, steps: int) -> Setting:
    """APGD on the sum of the members' DLR, tested on the ensemble."""
    loss = "dlr" if terms.classes > 2 else "margin"
    reach = {"epsilon": terms.epsilon, "norm": terms.norm, "seed": terms.seed}
    summed = partial(apgd, **reach, steps=steps, pool="members", loss=loss)
    return Setting("APGD, members' logits", partial(tried, craft=summed, **terms.ball))


def _targeted_loss(terms: Terms) -> Any:
    """Targeted DLR. With two classes there is only one other class, so the margin is the same; see `apgd` for three."""
    return "targeted_dlr" if terms.classes >= 3 else "margin"


def logit_loss(terms: Terms) -> Any:
    """Loss of logits that is compared with cross-entropy: DLR, or the margin where it does better.

    On an ensemble's log mean probability, DLR is weak: the label's is flat at zero, and the ratio rises when the third
    class falls. Three confident networks that the margin brought to 10 % were left at 62 %. With two classes, DLR does
    not exist.
    """
    pooled = terms.members > 1 and terms.pool in ("probability", "members")
    return "margin" if pooled or terms.classes < 3 else "dlr"
