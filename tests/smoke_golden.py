"""Golden numbers of all studies at scale smoke: they change only together with the version of a procedure.

Usage: python tests/smoke_golden.py [NAME ...]    (runs studies and writes their numbers; all by default)
"""

import json
import sys
import tempfile
from pathlib import Path

import fixed_times

from dissensus.studies import library
from dissensus.studies import run as runner
from dissensus.studies.procedures.builtin import PROCEDURES
from dissensus.studies.run_folders import read_report
from dissensus.studies.summary import summarise
from dissensus.studies.validation import missing

FILE = Path(__file__).parent / "golden" / "smoke.json"
_MEASURED_TIMES = ("seconds", "speed")


def golden() -> dict:
    """Stored numbers by study."""
    return json.loads(FILE.read_text()) if FILE.exists() else {}


def numbers(folder: Path) -> dict:
    """What is compared of a run: procedure and version, settings, and means of measures over all points."""
    summary = summarise(read_report(folder))
    names = dict.fromkeys(name for point in summary.points for name in point.measures)
    means = {name: [m for point in summary.points if (m := point.mean(name)) is not None] for name in names}
    procedure = summary.settings["procedure"]
    return {
        "procedure": procedure,
        "version": PROCEDURES[procedure].version,
        "settings": summary.provenance.fingerprint,
        "measures": {
            name: float(f"{sum(values) / len(values):.5g}")
            for name, values in means.items()
            if values and not any(word in name for word in _MEASURED_TIMES)
        },
    }


def main() -> None:
    fixed_times.fix(setattr)
    stored = golden()
    with tempfile.TemporaryDirectory() as root:
        for name in sys.argv[1:] or library.names():
            if not missing(library.load(name)):
                stored[name] = numbers(runner.run(name, "smoke", root=Path(root)))
                print(name, flush=True)
    kept = {name: stored[name] for name in library.names() if name in stored}
    FILE.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
