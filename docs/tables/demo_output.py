"""What the demo has measured, and what its command prints."""

import io
import textwrap
from functools import cache

from layout import benchmark
from rich.console import Console

from dissensus.cli import screen
from dissensus.studies import demo_page
from dissensus.studies.demo import DemoResult

WIDTH = 80
"""Columns of the terminal whose picture is shown."""


@cache
def demo_result() -> DemoResult:
    """What `dissensus demo` has measured."""
    return DemoResult.from_dict(benchmark("demo"))


def printed() -> str:
    """What the command prints of its first data set, shortened. Its time depends on what else a machine does."""
    result = demo_result()
    problem = result.problems[0]
    terminal = Console(file=io.StringIO(), width=WIDTH, color_system=None)
    with terminal.capture() as capture:
        terminal.print(screen.table(problem.title, demo_page.TABLE_HEADER, demo_page.table_rows(result, problem.name)))
    title, *head, _last, bottom = [line.rstrip() for line in capture.get().rstrip().splitlines()]
    lines = [title, *head[:4], "  ...", _last, bottom]
    lines += [*textwrap.wrap(demo_page.finding(result, problem.name), WIDTH), "  ..."]
    return "\n".join(["```text", *lines, "```\n"])
