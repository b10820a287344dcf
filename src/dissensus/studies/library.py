"""The library of studies: their names, and a study by its name or file."""

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dissensus import checks
from dissensus.data.sources import DATASETS, DatasetInfo
from dissensus.storage import read_regular
from dissensus.studies.procedures.base import Procedure
from dissensus.studies.procedures.builtin import PROCEDURES
from dissensus.studies.spec import Spec, SpecError, checked_value, merged, parse
from dissensus.studies.validation import check, check_statements

SPECS = Path(__file__).parent / "specs"
_NOT_INHERITED = ("title", "reference", "claim", "note", "figure", "expect", "cost", "uses")
"""Keys that a study never inherits from the study whose trainings it uses."""


def names() -> list[str]:
    """All studies, by paper, tables before figures, in the order of their numbers."""
    studies = [path.relative_to(SPECS).with_suffix("").as_posix() for path in SPECS.glob("*/*.toml")]
    return sorted(studies, key=_order)


def _order(name: str) -> tuple[str, str, int, str]:
    paper, _, rest = name.partition("/")
    kind, number = re.match(r"([a-z]+)-?(\d*)", rest).groups()  # pyright: ignore[reportOptionalMemberAccess]  # names are ours
    return paper, {"table": "a", "figure": "b"}.get(kind, kind), int(number or 0), rest


def load(
    name: str,
    procedures: Mapping[str, Procedure] = PROCEDURES,
    catalogue: Mapping[str, DatasetInfo] = DATASETS,
) -> Spec:
    """A study of the library by name, such as ``collusion/figure-2``, or from a TOML file."""
    path = Path(name)
    if path.suffix == ".toml" and _exists(path):
        return read(path, f"{path.parent.name}/{path.stem}", procedures, catalogue)
    known = names()
    if name not in known:
        same = next((n for n in known if n.endswith(f"/{name}")), name)  # without its paper
        hint = checks.nearest(same, known, "`dissensus study list` shows all.")
        raise SpecError(f"there is no study {name!r}. {hint}")
    return read(SPECS / f"{name}.toml", name, procedures, catalogue)


def read(
    path: Path,
    name: str,
    procedures: Mapping[str, Procedure] = PROCEDURES,
    catalogue: Mapping[str, DatasetInfo] = DATASETS,
) -> Spec:
    """A study from a file, with the settings that it inherits from the study whose trainings it uses."""
    settings = _toml(path)
    if settings.get("uses", "") != "":
        check_used(settings["uses"], path.name)
        base = _toml(SPECS / f"{settings['uses']}.toml")
        settings = merged(_inherited(base, settings, path.name), settings)
    spec = parse(settings, name, path.name)
    check(spec, path.name, procedures, catalogue)
    check_statements(spec, path.name)
    return spec


def check_used(name: object, file: str) -> None:
    """Refuse trainings of a study that the library does not have, and paths that lead out of the library."""
    known = names()
    if name not in known:
        hint = checks.nearest(str(name), known, "`dissensus study list` shows all.")
        raise SpecError(f"{file}: key 'uses' must name a study of the library; got {name!r}. {hint}")


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # a name that is too long, or no name at all
        return False


def _inherited(base: dict[str, Any], settings: dict[str, Any], file: str) -> dict[str, Any]:
    """How another study trains, at the scales that this one has; not what it measures."""
    checked_value(settings.get("scales", {}), dict[str, dict[str, Any]], "scales", file)
    for section in ("members", "optimisation", "search"):
        if section in settings:
            raise SpecError(f"{file}: key {section!r} is that of {settings['uses']}, whose trainings this study uses.")
    excluded = (*_NOT_INHERITED, "evaluation", "scales", "by_data")
    inherited = {key: value for key, value in base.items() if key not in excluded}
    scales = settings["scales"] if isinstance(settings.get("scales"), dict) else {}
    for key in ("scales", "by_data"):
        sections = {name: section for name, section in base.get(key, {}).items() if key != "scales" or name in scales}
        inherited[key] = {
            name: {inner: value for inner, value in section.items() if inner != "evaluation"}
            for name, section in sections.items()
        }
    return inherited


def _toml(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise SpecError(f"{path.name}: there is no such file.")
    try:
        return tomllib.loads(read_regular(path).decode("utf-8-sig"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as reason:
        raise SpecError(f"{path.name}: this is no TOML: {reason}.") from reason
    except OSError as reason:
        raise SpecError(f"{path.name} cannot be read: {reason.strerror}.") from reason
