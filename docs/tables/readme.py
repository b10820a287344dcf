"""The demo's and the audit's output in README.md, and its numbers."""

import io
import math
import textwrap
from functools import cache

import robustness
from layout import benchmark, rounded, span
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


def demo() -> str:
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


def audit() -> str:
    """What the audit prints of docs/audit.md's example, shortened."""
    result = benchmark("audit_example")
    panel = result["printed"][: next(i for i, line in enumerate(result["printed"]) if line.startswith("╰"))]
    shown = [line for line in panel if not line.startswith("│ Confidence")]
    return "\n".join(["```console", f"$ {' '.join(result['command'])}", *shown[:6], "  ...", "```\n"])


def values() -> dict[str, str]:
    """The numbers of the page's sentences."""
    result = demo_result()
    problem = result.problems[0].name
    diversity, ensemble, bias = (
        demo_page.means_over_seeds(result, problem, name) for name in ("diversity", "ensemble", "bias")
    )
    fastest = next(
        row["ways"]
        for row in benchmark("gpu")["rows"]
        if (row["case"], row["members"], row["batch"]) == ("ResNet-20", 20, 64)
    )
    return {
        "demo-diversity": f"{diversity[-1] / diversity[0]:.0f}",
        "demo-bias": f"{bias[-1]:.0f}",
        "demo-error": rounded(ensemble[-1] / ensemble[0] - 1),
        "demo-networks": f"{result.made['networks']}",
        "gpu-times": f"{math.floor(fastest['by hand']['ms'] / fastest['auto']['ms'])}",
        **_robustness_values(),
    }


def _robustness_values() -> dict[str, str]:
    known = robustness.values()
    left = {key[1:]: share for key, share in robustness.shares("adp/table-4.gpu").items()}
    three = robustness.shares("adp/table-2.gpu")
    adp, plain, masks = robustness.ADP, robustness.PLAIN, robustness.MASKS
    against, worst = ("fgsm", "pgd"), "standard_0.02"

    def worst_cases(method: str) -> str:
        return span(100 * left[a, method, worst] for a in against)

    suites = ("standard_0.01", "adaptive_0.01")
    return {
        **{name: known[name] for name in ("pgd-adp", "pgd-adp-paper", "pgd-plain", "pgd-plain-paper")},
        "worst-adp": span((100 * three["cifar10", adp, suite] for suite in suites), ".1f"),
        "worst-plain": span((100 * three["cifar10", plain, suite] for suite in suites), ".1f"),
        "worst-mnist-adp": known["worst-mnist-adp"],
        "worst-mnist-plain": known["worst-mnist-plain"],
        "hard-plain": worst_cases(plain),
        "hard-cost": span(100 * (left["none", plain, "accuracy"] - left[a, plain, "accuracy"]) for a in against),
        "hard-adp": worst_cases(adp),
        "hard-masks": worst_cases(masks),
        "soft-worst": known["soft-worst"],
        "hard-images": known["hard-images"],
    }


TABLES = {"demo": demo, "audit": audit}
