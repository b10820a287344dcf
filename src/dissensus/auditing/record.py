"""The result of an audit: verdict, reasons and figures, as text and as JSON."""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dissensus import checks
from dissensus.auditing.evidence import as_json
from dissensus.auditing.examples import DROPS
from dissensus.auditing.judging import Judgement
from dissensus.auditing.measuring import Figure
from dissensus.auditing.page import difference, number, overview, page, size
from dissensus.output_files import write_output
from dissensus.pages import html

TITLES = {
    "accuracy": "accuracy",
    "nll": "negative log-likelihood",
    "brier": "Brier score",
    "ece": "calibration error",
    "mse": "squared error",
    "explained": "variance explained",
    "coverage": "share of targets inside predicted intervals",
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
    "ensemble": ("accuracy", "kappa", "nll", "brier", "ece", "mse", "explained", "coverage"),
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

    @property
    def notes(self) -> list[str]:
        """Of members that predict distributions: what the verdict is about, and whether their intervals hold."""
        notes = [self.facts["basis"]] if "basis" in self.facts else []
        if "nominal_coverage" in self.facts:
            held = self.test["coverage"]
            notes.append(
                f"Predicted intervals should hold {self.facts['nominal_coverage']:.0%} of targets. They hold "
                f"{held.value:.0%} ({held.low:.0%} to {held.high:.0%})."
            )
        return notes

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
            path: The file, in which ``~`` is the home folder; missing folders above it are made.
            title: The name of the ensemble on the page; that of the file by default.
        """
        file = Path(path).expanduser()
        if file.is_dir():
            checks.refuse("path", "name a file", f"the folder {file}", "Add a name, such as audit.html.", OSError)
        text = html(page(self, title or file.stem))
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_output(file, text.encode())
        except OSError as reason:
            got = f"{file} ({reason.strerror or reason})"
            checks.refuse("path", "be a file that can be written", got, "Choose another folder.", OSError)
        return file

    def plot(self) -> Any:
        """The charts of the page in one matplotlib figure: ``audit.plot().savefig("audit.png")``."""
        return overview(self)

    def summary(self) -> str:
        """Verdict, evidence and figures as plain text."""
        facts, judgement = self.facts, self.judgement
        lines = [self.sentence, *judgement.advice, *filter(None, [difference(facts)]), *self.notes]
        if judgement.confidence:
            lines.append(f"Confidence: {judgement.confidence}.")
        if judgement.evidence:
            lines += ["", "what was asked"]
            lines += [f"  {item.answer:4s} {item.question}\n         {item.numbers()}" for item in judgement.evidence]
        lines += ["", size(facts)]
        group = ""
        for finding in self.findings:
            if finding["group"] != group:
                group = finding["group"]
                lines += ["", group]
            extra = "".join(
                f"   {part} {number(finding[part]).text}" for part in ("train", "reference") if part in finding
            )
            value = number(finding)
            lines.append(f"  {finding['title']:46s} {value.text:>10s}   {value.interval}{extra}")
        if self.detection:
            lines += ["", "telling shifted data apart (area under the ROC curve)"]
            lines += [
                f"  {name:40s} {f.value:10.3f}   {f.low:.3f} to {f.high:.3f}" for name, f in self.detection.items()
            ]
        return "\n".join(lines)


def _numbers(figure: Figure) -> dict[str, float | None]:
    return {k: v if math.isfinite(v) else None for k, v in figure._asdict().items()}
