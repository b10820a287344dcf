"""Write docs/speed.md, and the table of docs/audit.md, from results that benchmarks and studies have left.

Usage: python benchmarks/render.py [--check]
"""

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS, PAGE = ROOT / "benchmarks" / "results", ROOT / "docs" / "speed.md"

INTRODUCTION = """# Speed

Every number here was written by a benchmark of this project and is rendered from `benchmarks/results`. Times are
medians of one run in one process; ratios compare things measured side by side. "By hand" is what one would write
without this library: a Python loop over modules, each with an optimiser of its own.
"""


def header(made: dict[str, Any]) -> str:
    return (
        "*"
        + ", ".join(f"{key}: {value}" for key, value in made.items() if key != "command")
        + f"*  \n`{made['command']}`"
    )


def members(result: dict[str, Any]) -> str:
    lines = ["| network | members | by hand | loop | vmap | batched | auto |", "|---|---|---|---|---|---|---|"]
    for row in result["rows"]:
        times = row["milliseconds"]
        hand = times["by hand"]
        cells = [f"{times[b]:.2f} ({hand / times[b]:.1f}×)" if b in times else "–" for b in ("loop", "vmap", "batched")]
        auto = f"{times['auto']:.2f} ({hand / times['auto']:.1f}×), {row['auto']}"
        lines.append(f"| {row['case']} | {row['members']} | {hand:.2f} | {' | '.join(cells)} | {auto} |")
    return "\n".join(lines)


def sweeps(result: dict[str, Any]) -> str:
    lines = ["| runs | networks | by hand | fits in turn | sweep | µs a network | sweep against by hand |",
             "|---|---|---|---|---|---|---|"]  # fmt: skip
    for row in result["rows"]:
        cells = [f"{row[key]:,.2f}" for key in ("loop_ms", "fits_ms", "sweep_ms", "us_per_network")]
        ratio = f"{row['loop_ms'] / row['sweep_ms']:,.0f}×"
        lines.append(f"| {row['runs']:,} | {row['networks']:,} | {' | '.join(cells)} | {ratio} |")
    return "\n".join(lines)


WAYS = ("by hand", "loop, eager", "loop, graph", "vmap, eager", "vmap, graph", "batched, graph", "streams, graph")


def gpu(result: dict[str, Any]) -> str:
    lines = [
        f"| network | members | batch | {' | '.join(WAYS)} | auto | floor | auto, in floors |",
        "|" + "---|" * (len(WAYS) + 6),
    ]
    for row in result["rows"]:
        ways, hand = row["ways"], row["ways"]["by hand"]["ms"]
        cells = [f"{ways[w]['ms']:.2f}" if "ms" in ways.get(w, {}) else "–" for w in WAYS]
        auto = f"**{ways['auto']['ms']:.2f}** ({hand / ways['auto']['ms']:.1f}×), {ways['auto']['backend']}"
        floors = f"{row['floor_ms']:.2f} | {ways['auto']['ms'] / row['floor_ms']:.0f}"
        lines.append(f"| {row['case']} | {row['members']} | {row['batch']} | {' | '.join(cells)} | {auto} | {floors} |")
    spread = max((w["high"] - w["low"]) / w["ms"] for r in result["rows"] for n, w in r["ways"].items() if "graph" in n)
    lines += ["", f"Measured ceilings: {result['bandwidth'] / 1e12:.2f} TB/s copied, "
              f"{result['bf16_rate'] / 1e12:.0f} TFLOP/s in bf16. Quartiles of captured ways lie at most "
              f"{100 * spread:.0f} % apart."]  # fmt: skip
    return "\n".join(lines)


def cifar10(result: dict[str, Any]) -> str:
    errors = ", ".join(f"{100 * error:.2f}" for error in result["member_error"])
    return (
        "| minutes | steps | ms a step | backend | precision | members' error, % | ensemble's error, % |\n"
        "|---|---|---|---|---|---|---|\n"
        f"| {result['seconds'] / 60:.1f} | {result['steps']:,} | {result['ms_per_step']:.2f} | {result['backend']} | "
        f"{result['precision']} | {errors} | {100 * result['ensemble_error']:.2f} |"
    )


def memory(result: dict[str, Any]) -> str:
    lines = ["| allowed | planned | taken | loss after two epochs |", "|---|---|---|---|"]
    for row in result["memory"].values():
        allowed = f"{row['allowed_mib']:,.0f} MiB" if row["allowed_mib"] else "anything"
        lines.append(f"| {allowed} | {row['planned']} | {row['taken_mib']:,.0f} MiB | {row['loss']:.4f} |")
    return "\n".join(lines)


def equality(result: dict[str, Any]) -> str:
    lines = ["| training | backend | captured in a graph | largest difference |", "|---|---|---|---|"]
    for row in result["rows"]:
        if row["backend"] == "batched" and row["case"].startswith("fit") and "MLP" not in row["case"]:
            continue  # a network that is no chain of linear layers ran as a loop
        captured = "yes" if row["captured"] else "no"
        lines.append(f"| {row['case']} | {row['backend']} | {captured} | {row['difference']:.1e} |")
    return "\n".join(lines)


def audits(result: dict[str, Any]) -> str:
    lines = ["| members | examples | classes | GiB read | seconds | peak MiB | of which torch and its like |",
             "|---|---|---|---|---|---|---|"]  # fmt: skip
    lines += [
        f"| {row['members']} | {row['examples']:,} | {row['classes']:,} | {row['gib_read']:.2f} | "
        f"{row['seconds']:.0f} | {row['peak_mib']:,.0f} | {row['before_mib']:,.0f} |"
        for row in result["rows"]
    ]
    return "\n".join(lines)


SECTIONS = (
    (
        "members.json",
        "## A training step of M members, on a CPU",
        "Milliseconds a step, and how many times faster than by hand. A step is everything: batch, forward, loss, "
        "backward, AdamW.",
        members,
    ),
    (
        "sweeps.json",
        "## A step of many runs, on a CPU",
        'Milliseconds a step of R runs × 20 MLPs (10-30-30-1, batch 32). "By hand" and "fits in turn" are R times '
        "what one run takes, measured in the same process.",
        sweeps,
    ),
    (
        "sweeps_gpu.json",
        "## A step of many runs, on a GPU",
        "The same; the sweep's whole step is one CUDA graph.",
        sweeps,
    ),
    (
        "gpu.json",
        "## A training step of K networks, on a GPU",
        "Milliseconds a step. A step is everything: batch by index, forward, an objective in which members interact, "
        "backward, Adam, batch-norm statistics; bf16, images channels last. "
        '"By hand" is a `ModuleList` in a Python loop with one optimiser, as in torch-uncertainty\'s deep ensembles. '
        '"Graph" is a whole step in a CUDA graph. The floor is the larger of two times: operations at the measured '
        "bf16 rate, and the bytes that must be moved at the measured bandwidth.",
        gpu,
    ),
    (
        "cifar10.json",
        "## A whole training: three ResNet-20 on CIFAR-10",
        "The ADP paper's protocol: 180 epochs, batch 64, Adam, shifts and flips drawn inside the graph. The paper's "
        "own baseline has members at 8.30, 8.52 and 8.67 % and an ensemble at 6.78 % (its Table 1).",
        cifar10,
    ),
    (
        "audit.json",
        "## An audit of outputs on disk",
        "Half-precision logits in a memory-mapped `.npy` file, read once in slices; every figure with its interval.",
        audits,
    ),
    (
        "gpu_equality.json",
        "## Memory that is kept to",
        "Five ResNet-18 at batch 128 under a limit on memory (`max_memory`), on a GPU.",
        memory,
    ),
    (
        "gpu_equality.json",
        "## Is it still the same training?",
        "Largest difference of any weight or statistic between a training on the GPU and the same training in a loop "
        'on the CPU, in float64. "Resumed" is a training that was stopped three times against one that was not; '
        '"augmented" and "foreign loader" compare captured with eager steps on the GPU, whose generator draws other '
        'numbers than the CPU\'s; "one kernel" compares updates in float32 with the passes they replace; "predict" is '
        "inference, GPU against CPU.",
        equality,
    ),
)


def rendered() -> str:
    parts = [INTRODUCTION]
    for name, title, text, table in SECTIONS:
        file = RESULTS / name
        if file.exists():
            result = json.loads(file.read_text())
            parts.append(f"{title}\n\n{text}\n\n{table(result)}\n\n{header(result['made'])}\n")
    return "\n".join(parts)


AUDIT, MARKS = ROOT / "docs" / "audit.md", ("<!-- audit -->\n", "<!-- end -->")
CONFUSION = ROOT / "src/dissensus/studies/results/audit/table-1.paper.json"
VERDICTS = ("healthy", "redundant", "collusive", "dominated", "undecided")


def confusion() -> str:
    """What the audit said of ensembles whose state is known, over all data sets, members and seeds."""
    result = json.loads(CONFUSION.read_text())
    said: dict[str, dict[str, int]] = {}
    for point in result["points"]:
        row = said.setdefault(point["case"], dict.fromkeys(VERDICTS, 0))
        for verdict, count in point["said"].items():
            row[verdict] += count
    lines = [f"| how it was made | {' | '.join(VERDICTS)} |", "|---|" + "---|" * len(VERDICTS)]
    lines += [f"| {case} | {' | '.join(str(row[v] or '') for v in VERDICTS)} |" for case, row in said.items()]
    data = ", ".join(dict.fromkeys(point["data"] for point in result["points"]))
    made = result["made"]
    words = (f"*{data}; {len(made['seeds'])} seeds; dissensus {made['version']}, {made['hardware']}, "
             f"{made['seconds'] / 60:.1f} minutes*")  # fmt: skip
    return "\n".join(lines) + f"\n\n{words}\n"


def audit_page() -> str:
    """The page with its table put in."""
    before, rest = AUDIT.read_text().split(MARKS[0])
    return before + MARKS[0] + "\n" + confusion() + "\n" + MARKS[1] + rest.split(MARKS[1])[1]


if __name__ == "__main__":
    pages = {PAGE: rendered, AUDIT: audit_page}
    if "--check" in sys.argv:
        stale = [page.name for page, render in pages.items() if page.read_text() != render()]
        sys.exit(f"stale: {', '.join(stale)}; run python benchmarks/render.py" if stale else 0)
    for page, render in pages.items():
        page.write_text(render())
