"""The result of an audit: verdict, reasons and figures, as text and as JSON."""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dissensus import checks, storage
from dissensus.auditing.evidence import as_json
from dissensus.auditing.examples import DROPS
from dissensus.auditing.judging import Judgement
from dissensus.auditing.measuring import Figure
from dissensus.auditing.page import difference, html, one_figure

MEANINGS = {
    "healthy": "As far as this data shows, every member is a usable model. Members disagree, and their mean is better "
    "for it.",
    "redundant": "The members say nearly the same, so one of them would do almost as well as all together.",
    "dominated": "One member is as good as the whole ensemble, or better. The others cost time and may cost quality.",
    "collusive": "The members lean on each other. Each is worse than a model trained alone would be, and their errors "
    "cancel in the mean. Such diversity looks large, and need not hold up on other data or when a member is missing.",
    "unskilled": "The ensemble predicts no better than a constant answer would. There is nothing to judge yet.",
    "undecided": "The data does not suffice for a verdict.",
}
"""Meaning of every verdict."""
TITLES = {
    "accuracy": "accuracy",
    "nll": "negative log-likelihood",
    "brier": "Brier score",
    "ece": "calibration error",
    "mse": "squared error",
    "explained": "variance explained",
    "member_accuracy": "accuracy",
    "member_nll": "negative log-likelihood",
    "member_brier": "Brier score",
    "member_ece": "calibration error",
    "member_mse": "squared error",
    "member_explained": "variance explained",
    "best_accuracy": "best member's accuracy",
    "worst_accuracy": "worst member's accuracy",
    "ensemble": "ensemble's loss",
    "individual": "members' loss",
    "diversity": "diversity",
    "best_member": "best member's loss",
    "worst_member": "worst member's loss",
    "dominance": "standard deviation / mean of members' losses",
    "relative_diversity": "diversity / error (by squares)",
    "of_uncorrelated": "… as a share of M − 1",
    "error_covariance": "mean covariance of errors",
    "error_correlation": "mean correlation of errors",
    "gain": "share of error that pooling takes off",
    "bias_share": "share of diversity that is constant",
    **{f"codependence_{share}": f"relative rise of loss without {share:.0%} of members" for share in DROPS},
    "disagreement": "share of pairs that disagree",
    "distinct": "distinct predictions per example",
    "lost": "members' Brier score / that of class frequencies",
    "plane_diversity": "disagreement / error rate",
    "above_chance": "best member's kappa / the ensemble's",
    "kappa": "kappa (0 is guessing, 1 is all right)",
    "member_kappa": "kappa",
}
GROUPS = {
    "ensemble": ("accuracy", "kappa", "nll", "brier", "ece", "mse", "explained"),
    "members": (
        "member_accuracy",
        "member_kappa",
        "best_accuracy",
        "worst_accuracy",
        "member_nll",
        "member_brier",
        "member_ece",
        "member_mse",
        "member_explained",
        "best_member",
        "worst_member",
        "dominance",
        "above_chance",
        "lost",
    ),
    "decomposition": ("ensemble", "individual", "diversity"),
    "is it real?": (
        "relative_diversity",
        "of_uncorrelated",
        "error_covariance",
        "error_correlation",
        "bias_share",
        *(f"codependence_{share}" for share in DROPS),
        "gain",
    ),
    "do they disagree?": ("disagreement", "distinct", "plane_diversity"),
}
"""Groups of figures, in the order in which they are shown."""


@dataclass(frozen=True)
class Audit:
    """The result of `dissensus.audit`."""

    judgement: Judgement
    test: dict[str, Figure]
    train: dict[str, Figure] | None = None
    reference: dict[str, Figure] | None = None
    detection: dict[str, Figure] = field(default_factory=dict)
    """How well scores detect shifted data: area under the ROC curve, by score."""
    by_member: dict[str, list[Any]] = field(default_factory=dict)
    """Losses and accuracies of members, correlations and disagreements of pairs."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Members, examples, outputs, kind, loss and pool; for a model, ``matches_own_prediction``: True, or a sentence
    about the difference between the pooled outputs and the model's prediction."""

    @property
    def verdict(self) -> str:
        """``unskilled``, ``collusive``, ``dominated``, ``redundant``, ``undecided`` or ``healthy``."""
        return self.judgement.verdict

    @property
    def findings(self) -> list[dict[str, Any]]:
        """Every figure: name, title, group, value and interval, also on training data and of a reference."""
        entries: list[dict[str, Any]] = []
        for group, names in GROUPS.items():
            for name in names:
                if name in self.test:
                    entry = {"name": name, "title": TITLES[name], "group": group, **_numbers(self.test[name])}
                    for where, figures in (("train", self.train), ("reference", self.reference)):
                        if figures is not None and name in figures:
                            entry[where] = _numbers(figures[name])
                    entries.append(entry)
        return entries

    @property
    def sentence(self) -> str:
        """The verdict with its reasons."""
        return f"{self.verdict}: {'; '.join(self.judgement.reasons)}."

    def to_json(self) -> str:
        """Everything, as JSON."""
        content = {
            "verdict": self.verdict,
            "reasons": self.judgement.reasons,
            "advice": self.judgement.advice,
            "confidence": self.judgement.confidence,
            "evidence": [as_json(item) for item in self.judgement.evidence],
            "facts": self.facts,
            "findings": self.findings,
            "by_member": self.by_member,
            "figures": {name: _numbers(figure) for name, figure in self.test.items()},
            "detection": {name: _numbers(figure) for name, figure in self.detection.items()},
        }
        return json.dumps(content, indent=1, ensure_ascii=False)

    def page(self, path: str | Path, title: str = "") -> Path:
        """Write a self-contained HTML page, as ``dissensus audit --page`` does, and return its path.

        Args:
            path: The file; folders above it are made.
            title: What the page calls the ensemble; the file's name where it is left out.
        """
        file = Path(path)
        if file.is_dir():
            checks.refuse("path", "name a file", f"the folder {file}", "Add a name, such as audit.html.", OSError)
        text = html(self, title or file.stem, MEANINGS[self.verdict])
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            storage.write_atomically(file, text.encode())
        except OSError as reason:
            got = f"{file} ({reason.strerror or reason})"
            checks.refuse("path", "be a file that can be written", got, "Choose another folder.", OSError)
        return file

    def plot(self) -> Any:
        """The pictures of the page in one matplotlib figure: ``audit.plot().savefig("audit.png")``."""
        return one_figure(self)

    def summary(self) -> str:
        """Verdict, evidence and figures as plain text."""
        facts, judgement = self.facts, self.judgement
        lines = [self.sentence, *judgement.advice, *filter(None, [difference(facts)])]
        if judgement.confidence:
            lines.append(f"Confidence: {judgement.confidence}.")
        if judgement.evidence:
            lines += ["", "what was asked"]
            lines += [f"  {item.answer:4s} {item.question}\n         {item.numbers()}" for item in judgement.evidence]
        lines += ["", f"{facts['members']} members, {facts['examples']:,} examples, {facts['outputs']} outputs"]
        group = ""
        for finding in self.findings:
            if finding["group"] != group:
                group = finding["group"]
                lines += ["", group]
            extra = "".join(f"   {w} {_short(finding[w])}" for w in ("train", "reference") if w in finding)
            low, high = finding["low"], finding["high"]
            span = f"{low:.3g} to {high:.3g}" if low is not None and high is not None else ""
            lines.append(f"  {finding['title']:46s} {_short(finding):>10s}   {span}{extra}")
        if self.detection:
            lines += ["", "telling shifted data apart (area under the ROC curve)"]
            lines += [
                f"  {name:40s} {f.value:10.3f}   {f.low:.3f} to {f.high:.3f}" for name, f in self.detection.items()
            ]
        return "\n".join(lines)


def _numbers(figure: Figure) -> dict[str, float | None]:
    return {k: v if math.isfinite(v) else None for k, v in figure._asdict().items()}


def _short(numbers: dict[str, Any]) -> str:
    return "" if numbers["value"] is None else f"{numbers['value']:.4g}"
