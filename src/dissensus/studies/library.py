"""The library of studies: which there are, and one by its name."""

import re
import tomllib
from pathlib import Path
from typing import Any

from dissensus import checks
from dissensus.studies import registry
from dissensus.studies.spec import Spec, SpecError, merged, parse

SPECS = Path(__file__).parent / "specs"
_OWN = ("title", "reference", "claim", "note", "figure", "expect", "cost", "uses")
"""What a study that uses another's trainings never takes over from it."""


def names() -> list[str]:
    """All studies, by paper, tables before figures, in the order of their numbers."""
    found = [path.relative_to(SPECS).with_suffix("").as_posix() for path in SPECS.glob("*/*.toml")]
    return sorted(found, key=_order)


def _order(name: str) -> tuple[str, str, int]:
    paper, _, rest = name.partition("/")
    kind, number = re.match(r"([a-z]+)-?(\d*)", rest).groups()  # pyright: ignore[reportOptionalMemberAccess]  # names are ours
    return paper, {"table": "a", "figure": "b"}.get(kind, kind), int(number or 0)


def load(name: str) -> Spec:
    """A study of the library by name, such as ``collusion/figure-2``, or from a TOML file."""
    path = Path(name)
    if path.suffix == ".toml" and path.exists():
        return read(path, f"{path.parent.name}/{path.stem}")
    known = names()
    if name not in known:
        same = next((n for n in known if n.endswith(f"/{name}")), name)  # its paper was left out
        hint = checks.nearest(same, known, "`dissensus study list` shows all.")
        raise SpecError(f"there is no study {name!r}. {hint}")
    return read(SPECS / f"{name}.toml", name)


def read(path: Path, name: str) -> Spec:
    """A study from a file, with what it takes over from the study that it uses."""
    told = _toml(path)
    if "uses" in told:
        base = _toml(SPECS / f"{told['uses']}.toml")
        told = merged(_taken_over(base, told, path.name), told)
    spec = parse(told, name, path.name)
    registry.check(spec, path.name)
    return spec


def _taken_over(base: dict[str, Any], told: dict[str, Any], file: str) -> dict[str, Any]:
    """How another study trains, at the scales that this one names; not what it measures."""
    for section in ("members", "optimisation", "search"):
        if section in told:
            raise SpecError(f"{file}: key {section!r} is that of {told['uses']}, whose trainings this study uses.")
    kept = {key: value for key, value in base.items() if key not in (*_OWN, "evaluation", "scales", "by_data")}
    for key in ("scales", "by_data"):
        sections = {
            name: section for name, section in base.get(key, {}).items() if key != "scales" or name in told[key]
        }
        kept[key] = {
            name: {inner: value for inner, value in section.items() if inner != "evaluation"}
            for name, section in sections.items()
        }
    return kept


def _toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as reason:
        raise SpecError(f"{path.name}: this is no TOML: {reason}.") from reason
    except FileNotFoundError as reason:
        raise SpecError(f"{path.name}: there is no such file.") from reason
