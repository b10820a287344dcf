"""Tables of docs/papers/: every study of a paper, and where it stands."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace

from layout import table

from dissensus.studies import library, verdicts
from dissensus.studies.page import SETTINGS, standing
from dissensus.studies.run_folders import find_all
from dissensus.studies.spec import PAPERS

_NOWHERE = Path("/dev/null/no-runs")
"""A folder without runs: the tables are of results that are shipped with the package."""


HOW_TO_READ = """\
In bold is the verdict on the claim, computed from our numbers; after it, all statements of the study are counted. A
reduced setting has smaller networks, fewer seeds or other data than the paper's.
[How verdicts are made](../studies.md#verdicts)."""


def studies(paper: str) -> str:
    """The studies of a paper with their claims and verdicts."""
    rows = []
    for name in library.names():
        spec = library.load(name)
        if spec.paper != paper:
            continue
        results = find_all(name, _NOWHERE, spec)
        cells = []
        for setting in SETTINGS:
            where = standing(spec, results, setting)
            claim = verdicts.NOT_RUN if where.claim.startswith((verdicts.NOT_RUN, "cannot")) else where.claim
            cells.append(f"**{claim}**: {where.statements}" if where.statements else claim)
        rows.append([f"{spec.reference} `{name}`", spec.claim, *cells])
    return f"{HOW_TO_READ}\n\n{table(('study', 'claim', *SETTINGS.values()), rows)}\n"


PAGES = {f"docs/papers/{paper}.md": SimpleNamespace(TABLES={"studies": partial(studies, paper)}) for paper in PAPERS}
