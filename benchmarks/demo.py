"""The numbers of `dissensus demo`, for README.md and docs/diversity.md.

Usage: python benchmarks/demo.py [--json FILE]
"""

import argparse
import json
from pathlib import Path

from provenance import how_made

from dissensus.studies import demo, demo_page


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    result = demo.run(demo.DemoSettings())
    for problem in result.problems:
        print(problem.title, demo_page.finding(result, problem.name), sep="\n")
    values = result.to_dict()
    values["made"] |= how_made()
    if options.json:
        options.json.write_text(json.dumps(values, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
