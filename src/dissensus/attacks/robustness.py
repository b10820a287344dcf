"""Result of an evaluation of robustness: accuracies with intervals, curves and flags; as text, table and JSON."""

import json
import textwrap
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dissensus.attacks.flags import Flag
from dissensus.metrics import Interval
from dissensus.pages.parts import counted

HEADER = ("attack", "kind", "left", "95 % interval", "of", "tried", "seconds")
"""Columns of `Robustness.table`."""


class AttackResult(NamedTuple):
    """Result of one attack of a suite."""

    name: str
    kind: str
    """``"white-box"``, ``"black-box"`` or ``"transfer"``."""
    accuracy: Interval
    """Accuracy under this attack; if a suite runs attacks on survivors, under this attack and all earlier ones."""
    examples: int
    """Number of examples that the accuracy refers to."""
    tried: int
    """Number of attacked examples: those classified correctly, and with survivors those that no attack had broken."""
    broken: int
    """Number of these on which the attack succeeded."""
    seconds: float
    bounded: bool
    """Whether the attack stays within ε."""


class CurvePoint(NamedTuple):
    """A point of a curve: ε or steps, and accuracy there."""

    at: float
    accuracy: Interval


@dataclass(frozen=True)
class Robustness:
    """The result of `attacks.evaluate`."""

    clean: Interval
    """Accuracy without any attack."""
    worst: Interval
    """Accuracy if an example counts as wrong as soon as any attack within ε succeeds: the number to report."""
    attacks: list[AttackResult]
    over_epsilon: list[CurvePoint]
    """On a few examples, by ε: the worst of APGD on cross-entropy and on logits."""
    over_steps: list[CurvePoint]
    """On a few examples, by steps: PGD on cross-entropy. It should have converged at the end."""
    checks: list[Flag]
    """Every check, raised or not."""
    standing: list[int]
    """Indices of the examples on which no attack succeeded."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Suite, ε, norm, pool, examples, members and so on. ``beyond``: number of examples that only the checks broke.
    ``training_rows``: number of examples that the model was trained on; ``training_known``: whether that is all."""

    @property
    def flags(self) -> list[Flag]:
        """The checks that are raised."""
        return [flag for flag in self.checks if flag.raised]

    @property
    def sentence(self) -> str:
        """The headline."""
        worst, facts = self.worst, self.facts
        return (
            f"{worst.value:.1%} of {counted(facts['examples'], 'example')} ({worst.low:.1%} to {worst.high:.1%})"
            f" are still classified correctly in the worst case; without an attack, {self.clean.value:.1%} are"
        )

    @property
    def flags_raised(self) -> str:
        """``"flags raised: none"``, or their names."""
        return "flags raised: " + (", ".join(flag.name for flag in self.flags) or "none")

    def table(self) -> list[list[str]]:
        """Rows of text with the columns of `HEADER`: no attack, each attack, and the worst case."""
        total = f"{self.facts['examples']:,}"
        rows = [["no attack", "", *_interval_text(self.clean), total, "", ""]]
        for result in self.attacks:
            mark = "" if result.bounded else "*"
            counts = [f"{result.examples:,}", f"{result.tried:,}", f"{result.seconds:.1f}"]
            rows.append([result.name + mark, result.kind, *_interval_text(result.accuracy), *counts])
        return [*rows, ["worst case", "", *_interval_text(self.worst), total, "", ""]]

    def notes(self) -> list[str]:
        """Remarks that a reader of the table needs."""
        notes = self._training_notes()
        if self.facts["on_survivors"]:
            notes.append(
                "Each attack ran on the examples that earlier ones left; accuracies are those after all so far."
            )
        if not all(result.bounded for result in self.attacks):
            notes.append("* not bound by ε: what it finds counts for the worst case only where it lies within ε.")
        if not self.clean.value:
            notes.append(
                "No example is classified correctly without an attack, so there was nothing to attack. Are the "
                "network, its options and the scaling of the images those of the training?"
            )
        elif self.worst == self.clean:
            notes.append("No attack broke anything, so checks that compare attacks with each other say little.")
        if self.facts["beyond"]:
            few = f"{self.facts['beyond']} of the first {self.facts['probed']} examples"
            notes.append(f"Within ε, checks broke {few} that the suite had left: a stronger one would leave fewer.")
        if self.facts["suite"] == "quick":
            notes.append("The quick suite is for tests: real attacks take more steps.")
        if self.facts["suite"] == "paper":
            notes.append("The paper's protocol is weaker than it should be: report the standard or the adaptive suite.")
        return notes

    def _training_notes(self) -> list[str]:
        """Warnings about examples that the model was trained on, or may have been. Earlier results have none."""
        rows, known = self.facts.get("training_rows", 0), self.facts.get("training_known", True)
        if rows:
            least = "" if known else "at least "
            return [
                f"Warning: {least}{rows:,} of the {self.facts['examples']:,} examples are rows that the model was "
                "trained on. Accuracies on them say nothing about new data: use test data."
            ]
        if self.clean.value == 1 and not known:
            return [
                "Warning: every example is right without an attack, and it is not known what the model was trained on. "
                "Are the examples its training data? Use test data."
            ]
        return []

    def summary(self) -> str:
        """One screen of plain text."""
        facts = self.facts
        ball = f"suite {facts['suite']}, ε = {facts['epsilon']:.4g} in {facts['norm']}"
        lines = [*_wrapped(f"{self.sentence}."), *_wrapped(f"{self.flags_raised}."), "", ball]
        lines += [f"  {row[0]:24s}{row[2]:>8s}   {row[3]:16s}{row[4]:>7s}{row[6]:>9s}" for row in self.table()]
        for flag in self.flags:
            lines += ["", *_wrapped(f"{flag.name}: {flag.seen}."), *_wrapped(f"{flag.meaning} {flag.advice}", "  ")]
        return "\n".join([*lines, "", *(line for note in self.notes() for line in _wrapped(note))])

    def to_json(self) -> str:
        """Everything, as JSON."""
        fields = {name: _plain(value) for name, value in vars(self).items()}
        return json.dumps({"flags_raised": self.flags_raised, **fields}, indent=1, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> "Robustness":
        """Read the result of `to_json`."""
        fields = json.loads(text)
        curves = {name: [CurvePoint(p["at"], Interval(**p["accuracy"])) for p in fields[name]] for name in _CURVES}
        return cls(
            clean=Interval(**fields["clean"]),
            worst=Interval(**fields["worst"]),
            attacks=[AttackResult(**{**row, "accuracy": Interval(**row["accuracy"])}) for row in fields["attacks"]],
            **curves,
            checks=[Flag(**flag) for flag in fields["checks"]],
            standing=fields["standing"],
            facts=fields["facts"],
        )


_CURVES = ("over_epsilon", "over_steps")


def _plain(value: Any) -> Any:
    """Named tuples as dictionaries, at any depth."""
    if hasattr(value, "_asdict"):
        return {name: _plain(part) for name, part in value._asdict().items()}
    return [_plain(part) for part in value] if isinstance(value, list) else value


def _interval_text(share: Interval) -> list[str]:
    return [f"{share.value:.1%}", f"{share.low:.1%} to {share.high:.1%}"]


def _wrapped(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(text, 78, initial_indent=indent, subsequent_indent=indent)
