"""The procedure "audit": the audit's verdicts on ensembles whose correct verdict is known."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict

from dissensus.studies import audit_cases
from dissensus.studies.audit_cases import EVIDENCE, AuditedEnsemble, AuditUnit
from dissensus.studies.measures import OutputMeasure
from dissensus.studies.procedures import requirements
from dissensus.studies.procedures.base import Procedure, StudyContext
from dissensus.studies.results import Row
from dissensus.studies.spec import Spec

_KEPT = ("data", "case", "count", "examples", "verdicts", "allowed", "truth")


def _is_clear(ensemble: AuditedEnsemble) -> bool:
    return ensemble.count >= 5 and ensemble.examples >= 500


SUMMARIES: dict[str, Callable[[AuditedEnsemble], bool]] = {
    "every sound ensemble": lambda ensemble: ensemble.truth in ("sound", "alike"),
    "every ensemble of guessers": lambda ensemble: ensemble.truth == "unskilled",
    "constant biases as large as the error": lambda ensemble: (
        ensemble.case == "constant biases, 1 times" and _is_clear(ensemble)
    ),
    "biases per example as large as the error": lambda ensemble: (
        ensemble.case == "biases per example, 1 times" and _is_clear(ensemble)
    ),
    "every jointly trained ensemble": lambda ensemble: (
        ensemble.case.startswith("networks jointly") and _is_clear(ensemble)
    ),
}
"""Ensembles that are shown together, over all cases and numbers of members; biases and joint training for at least five
members and 500 examples."""


def missing(spec: Spec, measures: Mapping[str, OutputMeasure]) -> list[str]:
    """Axes that a study of the audit needs or does not take, and cases that do not exist."""
    del measures
    lacks = [f"'grid' needs the axis {axis!r}" for axis in ("case", "seed") if axis not in spec.grid]
    lacks += requirements.missing_axes(spec, ("case", "members", "seed"))
    known = (audit_cases.EVERY, *audit_cases.CASES)
    return (
        lacks or [f"no case of 'grid.case' is called {case!r}" for case in spec.grid["case"] if case not in known][:1]
    )


def run(unit: AuditUnit, context: StudyContext) -> list[Row]:
    """One row per ensemble."""
    context.progress(unit.name, 0.0)
    return [
        Row(
            ensemble.group,
            {"case": ensemble.case, "members": ensemble.members},
            ensemble.seed,
            ensemble.measures,
            ensembles=[asdict(ensemble)],
        )
        for ensemble in audit_cases.audit_unit(context.spec, unit)
    ]


def combine(rows: Sequence[Row]) -> list[Row]:
    """The study's rows from those of single ensembles."""
    return pool([AuditedEnsemble(**values) for row in rows for values in row.ensembles or []])


def pool(ensembles: Sequence[AuditedEnsemble]) -> list[Row]:
    """One row per group of data sets, case, number of members and seed, and per entry of `SUMMARIES`."""
    groups: dict[tuple[str, str, int, int], list[AuditedEnsemble]] = {}
    for ensemble in ensembles:
        key = (ensemble.group, ensemble.case, ensemble.members, ensemble.seed)
        groups.setdefault(key, []).append(ensemble)
    for name, holds in SUMMARIES.items():
        for ensemble in filter(holds, ensembles):
            groups.setdefault((ensemble.group, name, 0, ensemble.seed), []).append(ensemble)
    return [_pooled_row(*key, members_of_group) for key, members_of_group in groups.items()]


def _pooled_row(group: str, case: str, members: int, seed: int, ensembles: list[AuditedEnsemble]) -> Row:
    names = dict.fromkeys(name for ensemble in ensembles for name in ensemble.measures)
    values = {name: [e.measures[name] for e in ensembles if name in e.measures] for name in names}
    return Row(
        group,
        {"case": case, "members": members},
        seed,
        {"ensembles": float(len(ensembles)), **{name: sum(v) / len(v) for name, v in values.items()}},
        verdict_counts={by: dict(Counter(e.verdicts[by] for e in ensembles if by in e.verdicts)) for by in EVIDENCE},
        summary=case if case in SUMMARIES else None,
        ensembles=[{key: getattr(ensemble, key) for key in _KEPT} for ensemble in ensembles],
    )


PROCEDURE = Procedure(audit_cases.units, run, missing, combine=combine, trials="ensembles")
