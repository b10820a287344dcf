"""What is measured of an ensemble under attack.

| measure | what it is |
|---|---|
| ``accuracy_ATTACK_PARAMETER`` | accuracy under an attack of the ADP paper's table 2, or ``apgd``, ``square`` |
| ``standard_EPSILON``, ``adaptive_EPSILON`` | accuracy at the worst case of a suite (`dissensus.attacks.evaluate`) |
| ``auroc_SCORE_ATTACK`` | how well a score tells what a strong attack has found from what it began with |
| ``fooled_ATTACK`` | the share of examples that this strong attack breaks |
| ``transfer_ATTACK_EPSILON`` | accuracy on another member's adversarial examples |
| ``transfer_targeted_ATTACK_EPSILON`` | how often they reach their target on another member |
| ``features_similarity`` | how alike members' last hidden features are (CKA) |

Everything else is a measure of outputs on clean data (`measures`).
"""

import re
from collections.abc import Callable
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
from dissensus.studies import features, measures
from dissensus.studies.scaling import Standardised

NUMBER = r"\d+(?:\.\d+)?"
STRONGER: dict[str, Callable[..., attacks.Adversarial]] = {"apgd": attacks.apgd, "square": attacks.square}
"""Attacks that stand beside the paper's, on as many examples as the paper gives its slow ones."""
EXAMPLES = 1000
"""Of attacks that are no part of table 2, of suites and of detection."""
STRONG = {"fgsm": 0.1, "bim": 0.05, "pgd": 0.05, "mim": 0.05, "carlini_wagner": 10.0, "elastic_net": 20.0}
"""What detection is tried on: "much larger" than table 2, says the paper, and the values cannot be read in our copy."""
ED = "nonmaximal_volume"
RATES = 101
"""False positive rates of a ROC curve: 0, 0.01, ..., 1."""
BINS = (60, -30.0, 0.0)
"""Of the histogram of log ED: how many, and between what."""

BOUNDED = ("fgsm", "bim", "pgd", "mim", *STRONGER)
"""Attacks whose parameter is ε."""

_ACCURACY = re.compile(rf"accuracy_({'|'.join((*PUBLISHED, *STRONGER))})_({NUMBER})")
_SUITE = re.compile(rf"(standard|adaptive)_({NUMBER})")
_DETECTED = re.compile(rf"(?:auroc_(\w+?)|fooled)_({'|'.join(STRONG)})")
_TRANSFER = re.compile(rf"transfer_(targeted_)?(fgsm|bim|pgd|mim)_({NUMBER})")
SIMILARITY = "features_similarity"
ATTACKED = (*PUBLISHED, *STRONGER, "standard", "adaptive", "transfer", "features")
"""What may be run on fewer examples than is usual."""


@dataclass
class Subject:
    """An ensemble that takes images in [0, 1], test images, and where its finished attacks are kept."""

    model: nn.Module
    x: Float[Tensor, "N C H W"]
    y: Integer[Tensor, " N"]
    folder: Path
    attacked: dict[str, Any]
    """How many examples attacks and suites are run on, where it is not as many as is usual."""
    strong: dict[str, Any] = field(default_factory=dict)
    """How strong attacks are that detection is tried on, where it is not as usual (`STRONG`)."""
    batch_size: int = 500
    seed: int = 0
    drawn: dict[str, Any] = field(default_factory=dict)
    """What figures show beyond measures."""
    found: dict[str, attacks.Adversarial] = field(default_factory=dict)

    def few(self, name: str, usual: int | None) -> int:
        """How many examples an attack or a suite is run on."""
        return min(int(self.attacked.get(name, usual or len(self.x))), len(self.x))

    def strength(self, name: str) -> float:
        """The parameter of an attack that detection is tried on."""
        return float(self.strong.get(name, STRONG[name]))

    @property
    def terms(self) -> Terms:
        """What settings are written for."""
        return Terms(0.0, shape=tuple(self.x.shape[1:]), seed=self.seed)


def exists(name: str) -> bool:
    """Whether a measure can be taken."""
    detected = _DETECTED.fullmatch(name)
    if detected:
        return detected[1] in (None, ED, *scores.SCORES)
    known = any(pattern.fullmatch(name) for pattern in (_ACCURACY, _SUITE, _TRANSFER))
    return known or name == SIMILARITY or measures.exists(name)


def suite_of(name: str) -> tuple[str, str] | None:
    """The suite whose worst case a measure is, and its ε as it is written.

    >>> suite_of("adaptive_0.01"), suite_of("accuracy_pgd_0.01")
    (('adaptive', '0.01'), None)
    """
    found = _SUITE.fullmatch(name)
    return (found[1], found[2]) if found else None


def within(name: str, epsilon: str) -> bool:
    """Whether a measure is accuracy under a single attack within ε, or under none.

    >>> [within(name, "0.1") for name in ("accuracy", "accuracy_pgd_0.1", "accuracy_pgd_0.2", "accuracy_jsma_0.1")]
    [True, True, False, False]
    """
    found = _ACCURACY.fullmatch(name)
    return name == "accuracy" or bool(found and found[1] in BOUNDED and found[2] == epsilon)


def of_the_paper(name: str) -> bool:
    """Whether a measure is accuracy under one of the ADP paper's attacks.

    >>> [of_the_paper(name) for name in ("accuracy", "accuracy_pgd_0.1", "accuracy_apgd_0.1")]
    [False, True, False]
    """
    found = _ACCURACY.fullmatch(name)
    return bool(found and found[1] in PUBLISHED)


def measured(name: str, subject: Subject) -> float | None:
    """A measure under attack; None for one of clean outputs."""
    for pattern, take in _TAKEN.items():
        found = pattern.fullmatch(name)
        if found:
            return take(subject, *found.groups())
    return None


def examples_of(name: str, subject: Subject) -> int:
    """How many examples a measure under attack looks at."""
    attack, parameter = "", 0.0
    if told := _ACCURACY.fullmatch(name):
        attack, parameter = told[1], float(told[2])
    elif told := _DETECTED.fullmatch(name):
        attack, parameter = told[2], subject.strength(told[2])
    if attack:
        return subject.few(attack, _setting(subject, attack, parameter).examples)
    suite = suite_of(name)
    return subject.few(suite[0] if suite else "transfer" if _TRANSFER.fullmatch(name) else "features", EXAMPLES)


def _accuracy(subject: Subject, name: str, parameter: str) -> float:
    return float((~_broken(subject, name, float(parameter))[0]).double().mean())


def _setting(subject: Subject, name: str, parameter: float) -> Setting:
    if name in STRONGER:
        return Setting(name, partial(STRONGER[name], epsilon=parameter, seed=subject.seed), examples=EXAMPLES)
    return published(name, parameter, subject.terms)


def _broken(subject: Subject, name: str, parameter: float) -> tuple[Bool[Tensor, " N"], attacks.Adversarial]:
    """Which of the first examples are wrong after an attack, and what it found."""
    setting = _setting(subject, name, parameter)
    few = subject.few(name, setting.examples)
    key = f"{name}-{parameter:g}"
    if key not in subject.found:
        subject.found[key] = attacks.over(
            setting.attack,
            subject.model,
            subject.x[:few],
            subject.y[:few],
            batch_size=subject.batch_size,
            folder=subject.folder / key,
        )
    return subject.found[key].success, subject.found[key]


def _worst(subject: Subject, suite: Any, epsilon: str) -> float:
    found = attacks.evaluate(
        subject.model,
        (subject.x, subject.y),
        suite,
        epsilon=float(epsilon),
        examples=subject.few(suite, EXAMPLES),
        batch_size=subject.batch_size,
        folder=subject.folder / f"{suite}-{epsilon}",
        seed=subject.seed,
    )
    flags = subject.drawn.setdefault("flags", {})
    flags[f"{suite}_{epsilon}"] = [flag.name for flag in found.flags]
    return found.worst.value


def _detection(subject: Subject, score: str | None, name: str) -> float:
    wrong, found = _broken(subject, name, subject.strength(name))
    few = len(wrong)
    clean = _outputs(subject, subject.x[:few])
    right = pooling.mean_probability(clean).argmax(-1) == subject.y[:few]
    fooled = wrong & right
    if score is None:
        return float(fooled.sum() / right.sum().clamp_min(1))
    if not fooled.any():
        return float("nan")
    inside, outside = (scored(part, score) for part in (clean, _outputs(subject, found.inputs[fooled])))
    if score == ED:
        subject.drawn.setdefault("curves", {})[f"true_positive_rate_{name}"] = true_positive_rates(inside, outside)
    return metrics.auroc(inside, outside).value


def _outputs(subject: Subject, x: Float[Tensor, "N C H W"]) -> Float[Tensor, "M N K"]:
    device = next(subject.model.parameters()).device
    with torch.no_grad():
        parts = [subject.model(part.to(device)).cpu() for part in x.split(subject.batch_size)]
    return torch.cat(parts, 1)


def scored(outputs: Float[Tensor, "M N K"], score: str) -> Float[Tensor, " N"]:
    """A score of every example, higher where it is less like what was trained on.

    ED is high on normal examples and falls under attack, so what is scored is minus its logarithm.
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
    at = torch.searchsorted(false, grid + 1e-12, right=True) - 1  # the highest point at that rate
    return true[at].tolist()


def _transfer(subject: Subject, targeted: str | None, name: Any, epsilon: str) -> float:
    few = subject.few("transfer", EXAMPLES)
    x, y = subject.x[:few], subject.y[:few]
    classes = _outputs(subject, x[:1]).shape[-1]
    draw = torch.Generator().manual_seed(derived_seed(subject.seed, Use.ATTACK_TARGET))
    target = (y + torch.randint(1, classes, y.shape, generator=draw)) % classes if targeted else None
    size = float(epsilon)
    found = attacks.transfer_matrix(
        subject.model,
        x,
        y,
        attack=name,
        epsilon=size,
        step_size=size / 10,
        target=target,
        batch_size=subject.batch_size,
        seed=subject.seed,
    )
    matrix = found.fooled if targeted else found.accuracy
    subject.drawn.setdefault("matrices", {})[f"{targeted or ''}{name}_{epsilon}"] = matrix.tolist()
    members = matrix[:-1, :-1]
    apart = ~torch.eye(len(members), dtype=torch.bool)
    return float(members[apart].mean())


def _similarity(subject: Subject) -> float:
    few = subject.few("features", EXAMPLES)
    model, x = subject.model, subject.x[:few]
    if isinstance(model, Standardised):
        model, x = model.model, model.scaled(x)
    assert isinstance(model, Ensemble)
    hidden = features.hidden(model, x)
    subject.drawn["map"] = features.mapped(hidden, subject.y[:few], seed=subject.seed)
    return features.similarity(hidden)


_TAKEN: dict[re.Pattern[str], Callable[..., float]] = {
    _ACCURACY: _accuracy,
    _SUITE: _worst,
    _DETECTED: _detection,
    _TRANSFER: _transfer,
    re.compile(SIMILARITY): _similarity,
}


def histogram(outputs: Float[Tensor, "M N K"], targets: Integer[Tensor, " N"]) -> list[float]:
    """How many examples have which log ED, in `BINS`; what lies below counts in the first."""
    bins, low, high = BINS
    found = diversity.nonmaximal_volume(outputs, targets, log=True).double().clamp(low, high)
    return torch.histc(found, bins, low, high).tolist()
