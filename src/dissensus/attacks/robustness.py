"""What an evaluation of robustness says: accuracies with intervals, curves and flags; as words, as rows, as JSON."""

import json
import textwrap
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dissensus.attacks.flags import Flag
from dissensus.metrics import Interval

HEADER = ("attack", "kind", "left", "95 % interval", "of", "tried", "seconds")
"""Of `Robustness.table`."""


class Attacked(NamedTuple):
    """One attack of a suite."""

    name: str
    kind: str
    """``"white-box"``, ``"black-box"`` or ``"transfer"``."""
    accuracy: Interval
    """Under this attack; where a suite runs attacks on survivors, under this one and all before it."""
    examples: int
    """Of how many that is."""
    tried: int
    """How many were attacked: those that were right, and with survivors those that no attack before had broken."""
    broken: int
    """How many of these it broke."""
    seconds: float
    bounded: bool
    """Whether it keeps to ε."""


class Point(NamedTuple):
    """A point of a curve: ε or steps, and accuracy there."""

    at: float
    accuracy: Interval


@dataclass(frozen=True)
class Robustness:
    """The result of `attacks.evaluate`."""

    clean: Interval
    """Accuracy without any attack."""
    worst: Interval
    """Accuracy where an example counts as wrong as soon as any attack within ε breaks it: the number to report."""
    attacks: list[Attacked]
    over_epsilon: list[Point]
    """On a few examples, by ε: the worst of APGD on cross-entropy and on logits."""
    over_steps: list[Point]
    """On a few examples, by steps: PGD on cross-entropy. It should have come to rest at the end."""
    checks: list[Flag]
    """Every check that was made, raised or not."""
    standing: list[int]
    """The examples, by their place, that no attack broke."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Suite, ε, norm, pool, examples, members and the like; ``beyond``: how many examples only the checks broke."""

    @property
    def flags(self) -> list[Flag]:
        """The checks that are raised."""
        return [flag for flag in self.checks if flag.raised]

    @property
    def sentence(self) -> str:
        """The headline, in words."""
        worst, facts = self.worst, self.facts
        return (
            f"{worst.value:.1%} of {facts['examples']:,} examples are left in the worst case"
            f" ({worst.low:.1%} to {worst.high:.1%}), of {self.clean.value:.1%} that were right without an attack"
        )

    @property
    def flags_raised(self) -> str:
        """``"flags raised: none"``, or which."""
        return "flags raised: " + (", ".join(flag.name for flag in self.flags) or "none")

    def table(self) -> list[list[str]]:
        """Rows of words, as `HEADER` names them: no attack, each attack, and the worst case."""
        rows = [["no attack", "", *_shown(self.clean), f"{self.facts['examples']:,}", "", ""]]
        for one in self.attacks:
            mark = "" if one.bounded else "*"
            told = [f"{one.examples:,}", f"{one.tried:,}", f"{one.seconds:.1f}"]
            rows.append([one.name + mark, one.kind, *_shown(one.accuracy), *told])
        return [*rows, ["worst case", "", *_shown(self.worst), f"{self.facts['examples']:,}", "", ""]]

    def notes(self) -> list[str]:
        """What a reader of the table must know."""
        found = []
        if self.facts["on_survivors"]:
            found.append("Each attack was run on what those before it had left; what is left is left by all of them.")
        if not all(one.bounded for one in self.attacks):
            found.append("* not bound by ε: what it finds counts for the worst case only where it lies within ε.")
        if self.worst == self.clean:
            found.append("No attack broke anything, so checks that set attacks against each other can tell little.")
        if self.facts["beyond"]:
            few = f"{self.facts['beyond']} of the first {self.facts['probed']} examples"
            found.append(f"Within ε, checks broke {few} that the suite had left: a stronger one would leave fewer.")
        if self.facts["suite"] == "quick":
            found.append("The quick suite is for tests: real attacks take more steps.")
        if self.facts["suite"] == "paper":
            found.append("The paper's protocol is weaker than it should be: report the standard or the adaptive suite.")
        return found

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
        told = {"flags_raised": self.flags_raised, **{name: _plain(part) for name, part in vars(self).items()}}
        return json.dumps(told, indent=1, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> "Robustness":
        """What `to_json` wrote."""
        told = json.loads(text)
        curves = {name: [Point(p["at"], Interval(**p["accuracy"])) for p in told[name]] for name in _CURVES}
        rows = [Attacked(**{**row, "accuracy": Interval(**row["accuracy"])}) for row in told["attacks"]]
        return cls(
            clean=Interval(**told["clean"]),
            worst=Interval(**told["worst"]),
            attacks=rows,
            **curves,
            checks=[Flag(**flag) for flag in told["checks"]],
            standing=told["standing"],
            facts=told["facts"],
        )


_CURVES = ("over_epsilon", "over_steps")


def _plain(part: Any) -> Any:
    """Named tuples as dictionaries, all the way down."""
    if hasattr(part, "_asdict"):
        return {name: _plain(value) for name, value in part._asdict().items()}
    return [_plain(each) for each in part] if isinstance(part, list) else part


def _shown(share: Interval) -> list[str]:
    return [f"{share.value:.1%}", f"{share.low:.1%} to {share.high:.1%}"]


def _wrapped(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(text, 78, initial_indent=indent, subsequent_indent=indent)
