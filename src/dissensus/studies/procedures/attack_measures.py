"""Measures of an ensemble under attack.

| measure | value |
|---|---|
| ``accuracy_ATTACK_PARAMETER`` | accuracy under an attack of the ADP paper's table 2, or ``apgd``, ``square`` |
| ``standard_EPSILON``, ``adaptive_EPSILON`` | accuracy at the worst case of a suite (`dissensus.attacks.evaluate`) |
| ``auroc_SCORE_ATTACK`` | area under the ROC curve of a score: clean examples against successful attacks |
| ``fooled_ATTACK`` | share of correctly classified examples that this strong attack changes |
| ``transfer_ATTACK_EPSILON`` | accuracy on adversarial examples of another member |
| ``transfer_targeted_ATTACK_EPSILON`` | share of them that reach their target on another member |
| ``features_similarity`` | similarity of members' last hidden features (CKA) |

All other measures are of outputs on clean data (`measures`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Integer
from torch import Tensor, nn

from dissensus import attacks, diversity, metrics, pooling, scores
from dissensus.attacks.suites import PUBLISHED, Setting, Terms, published
from dissensus.ensemble import Ensemble
from dissensus.randomness import Use, derived_seed
from dissensus.studies.measures import MEASURES, OutputMeasure, is_output_measure
from dissensus.studies.procedures import features
from dissensus.studies.results import ATTACKS, SUITES, WORST_CASE, Measure
from dissensus.studies.standardisation import Standardised

STRONGER: dict[str, Callable[..., attacks.Adversarial]] = {"apgd": attacks.apgd, "square": attacks.square}
"""Attacks beside those of the paper, on as many examples as the paper uses for its slow ones."""
EXAMPLES = 1000
"""Number of examples of attacks that are not part of table 2, of suites, and of maps of features."""
STRENGTHS = {"fgsm": 0.1, "bim": 0.05, "pgd": 0.05, "mim": 0.05, "carlini_wagner": 10.0, "elastic_net": 20.0}
"""Parameters of attacks for detection: "much larger" than in table 2, according to the paper; the values cannot be read
in our copy."""
ED = "nonmaximal_volume"
RATES = 101
"""Number of false positive rates of a ROC curve: 0, 0.01, ..., 1."""
SIMILARITY = "features_similarity"
TRANSFERABLE = ("fgsm", "bim", "pgd", "mim")
BOUNDED = (*TRANSFERABLE, *STRONGER)
"""Attacks whose parameter is ε."""
LIMITED = (*ATTACKS, *SUITES, "transfer", "features")
"""Attacks and suites whose number of examples a study may set."""


@dataclass
class AttackedEnsemble:
    """An ensemble that takes images in [0, 1], its test images, and the folder of its finished attacks."""

    model: nn.Module
    x: Float[Tensor, "N C H W"]
    y: Integer[Tensor, " N"]
    folder: Path
    examples: Mapping[str, Any]
    """Number of examples by attack or suite, where it is not the usual one."""
    strengths: Mapping[str, Any] = field(default_factory=dict)
    """Parameters of attacks for detection, where they are not those of `STRENGTHS`."""
    batch_size: int = 500
    seed: int = 0
    drawn: dict[str, Any] = field(default_factory=dict)
    """What figures show beside measures: curves, matrices, flags, a map of features."""
    adversarials: dict[str, attacks.Adversarial] = field(default_factory=dict)
    """Adversarial examples by attack and parameter."""

    def count(self, name: str, usual: int | None) -> int:
        """Number of examples for an attack or a suite."""
        return min(int(self.examples.get(name, usual or len(self.x))), len(self.x))

    def strength(self, name: str) -> float:
        """The parameter of an attack for detection."""
        return float(self.strengths.get(name, STRENGTHS[name]))

    @property
    def terms(self) -> Terms:
        """What published settings depend on."""
        return Terms(0.0, shape=tuple(self.x.shape[1:]), seed=self.seed)


def is_attack_measure(name: str, output_measures: Mapping[str, OutputMeasure] = MEASURES) -> bool:
    """Whether a measure can be taken, under attack or on clean data."""
    measure = Measure.parse(name)
    if not measure.attack:
        return name == SIMILARITY or is_output_measure(name, output_measures)
    if measure.kind in ("auroc", "fooled"):
        known = measure.kind == "fooled" or measure.score in (ED, *scores.SCORES)
        return known and measure.attack in STRENGTHS and not measure.parameter and not measure.targeted
    if not measure.parameter:
        return False
    if measure.kind == "transfer":
        return measure.attack in TRANSFERABLE
    return measure.kind in ("accuracy", WORST_CASE) and not measure.targeted


def suite_of(name: str) -> tuple[str, str] | None:
    """The suite and the ε, as written, of a measure at a worst case; None for other measures.

    >>> suite_of("adaptive_0.01"), suite_of("accuracy_pgd_0.01")
    (('adaptive', '0.01'), None)
    """
    measure = Measure.parse(name)
    return (measure.attack, measure.parameter) if measure.kind == WORST_CASE else None


def is_within(name: str, epsilon: str) -> bool:
    """Whether a measure is accuracy under a single attack bounded by ε, or under none.

    >>> names = ("accuracy", "accuracy_pgd_0.1", "accuracy_pgd_0.2", "accuracy_jsma_0.1")
    >>> [is_within(name, "0.1") for name in names]
    [True, True, False, False]
    """
    measure = Measure.parse(name)
    bounded = measure.kind == "accuracy" and measure.attack in BOUNDED and measure.parameter == epsilon
    return name == "accuracy" or bounded


def is_published(name: str) -> bool:
    """Whether a measure is accuracy under one of the ADP paper's attacks.

    >>> [is_published(name) for name in ("accuracy", "accuracy_pgd_0.1", "accuracy_apgd_0.1")]
    [False, True, False]
    """
    measure = Measure.parse(name)
    return measure.kind == "accuracy" and measure.attack in PUBLISHED


def value(name: str, ensemble: AttackedEnsemble) -> float | None:
    """A measure under attack; None for one of clean outputs."""
    measure = Measure.parse(name)
    kind = measure.kind if measure.attack or measure.kind == SIMILARITY else ""
    return _KINDS[kind](ensemble, measure) if kind in _KINDS else None


def examples_of(name: str, ensemble: AttackedEnsemble) -> int:
    """Number of examples that a measure under attack is taken on."""
    measure = Measure.parse(name)
    if measure.kind == "accuracy":
        setting = _setting(ensemble, measure.attack, float(measure.parameter))
        return ensemble.count(measure.attack, setting.examples)
    if measure.kind in ("auroc", "fooled"):
        setting = _setting(ensemble, measure.attack, ensemble.strength(measure.attack))
        return ensemble.count(measure.attack, setting.examples)
    if measure.kind == WORST_CASE:
        return ensemble.count(measure.attack, EXAMPLES)
    return ensemble.count("transfer", EXAMPLES) if measure.kind == "transfer" else ensemble.count("features", None)


def _accuracy(ensemble: AttackedEnsemble, measure: Measure) -> float:
    broken, _ = _broken(ensemble, measure.attack, float(measure.parameter))
    return float((~broken).double().mean())


def _setting(ensemble: AttackedEnsemble, name: str, parameter: float) -> Setting:
    if name in STRONGER:
        return Setting(name, partial(STRONGER[name], epsilon=parameter, seed=ensemble.seed), examples=EXAMPLES)
    return published(name, parameter, ensemble.terms)


def _broken(ensemble: AttackedEnsemble, name: str, parameter: float) -> tuple[Bool[Tensor, " N"], attacks.Adversarial]:
    """Which of the first examples are wrong after an attack, and the adversarial examples."""
    setting = _setting(ensemble, name, parameter)
    count = ensemble.count(name, setting.examples)
    key = f"{name}-{parameter:g}"
    if key not in ensemble.adversarials:
        ensemble.adversarials[key] = attacks.over(
            setting.attack,
            ensemble.model,
            ensemble.x[:count],
            ensemble.y[:count],
            batch_size=ensemble.batch_size,
            folder=ensemble.folder / key,
        )
    return ensemble.adversarials[key].success, ensemble.adversarials[key]


def _worst_case(ensemble: AttackedEnsemble, measure: Measure) -> float:
    suite: Any = measure.attack
    robustness = attacks.evaluate(
        ensemble.model,
        (ensemble.x, ensemble.y),
        suite,
        epsilon=float(measure.parameter),
        examples=ensemble.count(suite, EXAMPLES),
        batch_size=ensemble.batch_size,
        folder=ensemble.folder / f"{suite}-{measure.parameter}",
        seed=ensemble.seed,
    )
    flags = ensemble.drawn.setdefault("flags", {})
    flags[str(measure)] = [flag.name for flag in robustness.flags]
    return robustness.worst.value


def _detection(ensemble: AttackedEnsemble, measure: Measure) -> float:
    name = measure.attack
    wrong, adversarial = _broken(ensemble, name, ensemble.strength(name))
    count = len(wrong)
    clean = _outputs(ensemble, ensemble.x[:count])
    right = pooling.mean_probability(clean).argmax(-1) == ensemble.y[:count]
    fooled = wrong & right
    if measure.kind == "fooled":
        return float(fooled.sum() / right.sum().clamp_min(1))
    if not fooled.any():
        return float("nan")
    after = _outputs(ensemble, adversarial.inputs[fooled])
    inside, outside = (detection_score(outputs, measure.score) for outputs in (clean, after))
    if measure.score == ED:
        curve = Measure("true_positive_rate", name)
        ensemble.drawn.setdefault("curves", {})[str(curve)] = true_positive_rates(inside, outside)
    return metrics.auroc(inside, outside).value


def _outputs(ensemble: AttackedEnsemble, x: Float[Tensor, "N C H W"]) -> Float[Tensor, "M N K"]:
    device = next(ensemble.model.parameters()).device
    with torch.no_grad():
        parts = [ensemble.model(part.to(device)).cpu() for part in x.split(ensemble.batch_size)]
    return torch.cat(parts, 1)


def detection_score(outputs: Float[Tensor, "M N K"], score: str) -> Float[Tensor, " N"]:
    """A score of every example, higher where it is less like the training data.

    ED is high on normal examples and falls under attack, so its score is minus its logarithm.
    """
    if score == ED:
        return -diversity.nonmaximal_volume(outputs, log=True)
    return scores.of_logits(score, outputs)


def true_positive_rates(inside: Float[Tensor, " N"], outside: Float[Tensor, " K"]) -> list[float]:
    """The ROC curve at false positive rates 0, 0.01, ..., 1.

    >>> rates = true_positive_rates(torch.tensor([0.0, 1.0]), torch.tensor([2.0, 3.0]))
    >>> rates[0], rates[-1], len(rates)
    (1.0, 1.0, 101)
    """
    false, true = metrics.roc(inside, outside)
    grid = torch.linspace(0, 1, RATES, dtype=torch.float64)
    places = torch.searchsorted(false, grid + 1e-12, right=True) - 1  # the highest point at that rate
    return true[places].tolist()


def _transfer(ensemble: AttackedEnsemble, measure: Measure) -> float:
    count = ensemble.count("transfer", EXAMPLES)
    x, y = ensemble.x[:count], ensemble.y[:count]
    classes = _outputs(ensemble, x[:1]).shape[-1]
    generator = torch.Generator().manual_seed(derived_seed(ensemble.seed, Use.ATTACK_TARGET))
    target = (y + torch.randint(1, classes, y.shape, generator=generator)) % classes if measure.targeted else None
    attack: Any = measure.attack
    epsilon = float(measure.parameter)
    transfer = attacks.transfer_matrix(
        ensemble.model,
        x,
        y,
        attack=attack,
        epsilon=epsilon,
        step_size=epsilon / 10,
        target=target,
        batch_size=ensemble.batch_size,
        seed=ensemble.seed,
    )
    matrix = transfer.fooled if measure.targeted else transfer.accuracy
    key = str(Measure("", measure.attack, measure.parameter, targeted=measure.targeted))
    ensemble.drawn.setdefault("matrices", {})[key] = matrix.tolist()
    members = matrix[:-1, :-1]
    different = ~torch.eye(len(members), dtype=torch.bool)
    return float(members[different].mean())


def _similarity(ensemble: AttackedEnsemble, measure: Measure) -> float:
    del measure
    count = ensemble.count("features", None)
    model, x = ensemble.model, ensemble.x[:count]
    if isinstance(model, Standardised):
        model, x = model.model, model.scaled(x)
    assert isinstance(model, Ensemble)
    hidden = features.hidden(model, x)
    ensemble.drawn["map"] = features.plane_maps(hidden[:, :EXAMPLES], ensemble.y[:EXAMPLES], seed=ensemble.seed)
    return features.similarity(hidden)


_KINDS: dict[str, Callable[[AttackedEnsemble, Measure], float]] = {
    "accuracy": _accuracy,
    WORST_CASE: _worst_case,
    "auroc": _detection,
    "fooled": _detection,
    "transfer": _transfer,
    SIMILARITY: _similarity,
}
"""``(ensemble, measure) -> value``, by the measure's kind."""
