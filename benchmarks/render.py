"""Write docs/speed.md, and tables of other pages, from results that benchmarks and studies have left.

Usage: python benchmarks/render.py [--check]
"""

import json
import sys
import tomllib
from collections import Counter
from functools import partial
from pathlib import Path
from statistics import fmean
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
    lines = [
        "| runs | networks | by hand | fits in turn | sweep | µs a network | sweep against by hand |",
        "|---|---|---|---|---|---|---|",
    ]
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
    lines += [
        "",
        f"Measured ceilings: {result['bandwidth'] / 1e12:.2f} TB/s copied, "
        f"{result['bf16_rate'] / 1e12:.0f} TFLOP/s in bf16. Quartiles of captured ways lie at most "
        f"{100 * spread:.0f} % apart.",
    ]
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
    lines = [
        "| members | examples | classes | GiB read | seconds | peak MiB | of which torch and its like |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['members']} | {row['examples']:,} | {row['classes']:,} | {row['gib_read']:.2f} | "
        f"{row['seconds']:.0f} | {row['peak_mib']:,.0f} | {row['before_mib']:,.0f} |"
        for row in result["rows"]
    ]
    return "\n".join(lines)


def masked(result: dict[str, Any]) -> str:
    parts: list[str] = []
    for row in result["rows"]:
        single = {kind: row[f"{kind}_ms"]["one network"] for kind in ("training", "inference")}
        lines = [f"{row['case']}, batch {row['batch']}", "", "| | milliseconds | times one network |", "|---|---|---|"]
        for kind, words in (("training", "training step"), ("inference", "inference")):
            for way, ms in row[f"{kind}_ms"].items():
                lines.append(f"| {words}: {way} | {ms:.1f} | {ms / single[kind]:.2f} |")
        parts.append("\n".join(lines))
    scales = dict.fromkeys(row["scale"] for row in result["generation"])
    lines = ["Masks for a layer, milliseconds: ours, and the public package's", ""]
    lines += [f"| channels | {' | '.join(f'S = {s:g}' for s in scales)} |", "|---|" + "---|" * len(scales)]
    for width in dict.fromkeys(row["width"] for row in result["generation"]):
        own = [row for row in result["generation"] if row["width"] == width]
        cells = [f"{r['ours_ms']:.2f}; " + (f"{r['package_ms']:.1f}" if "package_ms" in r else "fails") for r in own]
        lines.append(f"| {width:,} | {' | '.join(cells)} |")
    return "\n\n".join([*parts, "\n".join(lines)])


def heads(result: dict[str, Any]) -> str:
    lines = [
        "| members | drawn per step | pairs | seconds per epoch | ms a step | peak MiB | the paper's seconds |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        peak = f"{row['peak_mib']:,.0f}" if row["peak_mib"] else ""
        cells = [
            f"{row['members']}",
            f"{row['drawn']}",
            f"{row['pairs']:,}",
            f"{row['seconds_per_epoch']:.1f}",
            f"{row['milliseconds_per_step']:.2f}",
            peak,
            f"{row['paper_seconds'] or ''}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


KINDS = (
    ("Adam, one kernel over all weights", "adam_rows"),
    ("matrix products", "nvjet"),
    ("copies and casts", "copy"),
    ("copies and casts", "memcpy"),
    ("copies and casts", "Memcpy"),
    ("concatenations", "CatArray"),
    ("sums, means, maxima", "reduce_kernel"),
    ("softmax", "softmax"),
    ("gather and scatter", "scatter_gather"),
    ("fills", "Fill"),
    ("fills", "Memset"),
)
"""Kinds of kernels, by what their names hold; the first that fits."""


def heads_profile(result: dict[str, Any]) -> str:
    return "\n\n".join(map(_kernels, result["rows"]))


def _kernels(row: dict[str, Any]) -> str:
    """Where the time of a step goes, by kinds of kernels."""
    found: dict[str, tuple[float, float]] = {}
    for kernel in row["kernels"]:
        kind = next(
            (words for words, mark in KINDS if mark in kernel["kernel"]), "other arithmetic, element by element"
        )
        time, count = found.get(kind, (0.0, 0.0))
        found[kind] = time + kernel["microseconds"], count + kernel["per_step"]
    lines = [f"| {row['members']} heads: kernels | per step | microseconds | share |", "|---|---|---|---|"]
    for kind, (time, count) in sorted(found.items(), key=lambda item: -item[1][0]):
        lines.append(f"| {kind} | {count:.0f} | {time:,.0f} | {100 * time / row['microseconds']:.0f} % |")
    return "\n".join(lines)


def attacks(result: dict[str, Any]) -> str:
    names = ("ours", "foolbox", "torchattacks", "pyautoattack")
    lines = [f"| attack | {' | '.join(names)} |", "|---|" + "---|" * len(names)]
    for row in result["rows"]:
        cells = [f"{row['milliseconds'][name]:,.0f}" if name in row["milliseconds"] else "" for name in names]
        lines.append(f"| {row['attack']} | {' | '.join(cells)} |")
    grown = ", ".join(f"{row['members']} members {row['times_one']:.2f}" for row in result["members"])
    return "\n".join([*lines, "", f"PGD on an ensemble, in times of one network: {grown}."])


def captured_attacks(result: dict[str, Any]) -> str:
    lines = ["| attack | members | step by step | from graphs | faster |", "|---|---|---|---|---|"]
    for row in result["rows"]:
        times = row["milliseconds"]
        cells = [
            row["attack"],
            str(row["members"]),
            f"{times['eager']:,.0f}",
            f"{times['captured']:,.0f}",
            f"{times['eager'] / times['captured']:.1f}×",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def adp_overhead(result: dict[str, Any]) -> str:
    ways = ("plain", "ADP(2, 0)", "ADP(2, 0.5)")
    lines = [f"| members | {' | '.join(ways)} | ADP(2, 0.5) adds | the paper's adds |", "|" + "---|" * (len(ways) + 3)]
    for row in result["rows"]:
        paper = "" if row["paper_added"] is None else f"{100 * row['paper_added']:.0f} %"
        cells = [*(f"{row['milliseconds'][way]:.2f}" for way in ways), f"{100 * row['added'][ways[-1]]:.1f} %", paper]
        lines.append(f"| {row['members']} | {' | '.join(cells)} |")
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
        "heads.json",
        "## Heads on features of ImageNet's size, on a GPU",
        "LDR on 1,281,167 synthetic features of 768 numbers, 1,000 classes, heads 768-768-1000, batches of 256, AdamW: "
        "all pairs, or those of members drawn per step. The paper's times (its Table 10) are of another card, and of "
        "a loop. Peaks are of one process that measures row after row: what a row left may still have been there.",
        heads,
    ),
    (
        "heads_profile.json",
        "### Where a step of 50 heads goes",
        "By PyTorch's profiler, of a step as it was before gradients of weights came out of products as the weights "
        "lie, which copies in bf16 turned round, and before gradients of pairs went into one tensor instead of three. "
        "The table above has the step as it is now.",
        heads_profile,
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
        "masks.json",
        "## An ensemble from one network, on a CPU",
        "Masksembles with four masks (S = 2) beside one network, four networks, and the public package `masksembles` "
        'on the same network with the same masks. "Split" trains each example under one mask, "all" every example '
        "under all of them.",
        masked,
    ),
    (
        "attacks.json",
        "## Attacks, on a CPU",
        "Milliseconds on 64 images of 3×32×32 and one small network, beside three libraries in the same process. All "
        "steps are taken, but torchattacks' C&W may end before. Ours try every result again in a pass of its own, and "
        "`square` draws for every example by itself.",
        attacks,
    ),
    (
        "attacks_gpu.json",
        "## Attacks, on a GPU",
        "Milliseconds of a whole call on 256 images of 3×32×32, ensembles of ResNet-20: steps launched one by one, and "
        "replayed from CUDA graphs, capture included.",
        captured_attacks,
    ),
    (
        "adp.json",
        "## What ADP adds to a training step, on a GPU",
        "Milliseconds a step of ResNet-20 at batches of 64, in turns in one process. The paper's are of batches of 32.",
        adp_overhead,
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


DOCS, SHIPPED = ROOT / "docs", ROOT / "src/dissensus/studies/results"
END = "<!-- end -->"
EVIDENCE = {"alone": "test outputs alone", "train": "with training outputs", "reference": "with a reference"}


def confusion() -> str:
    """What the audit said of ensembles whose truth is known, over all data sets, members and seeds."""
    result = shipped("audit/table-1.paper")
    lines = _verdicts_by_evidence(result)
    data = ", ".join(dict.fromkeys(point["data"] for point in result["points"]))
    made = result["made"]
    words = (
        f"*{data}; {len(made['seeds'])} seeds; dissensus {made['version']}, {made['hardware']}, "
        f"{made['seconds'] / 60:.1f} minutes*"
    )
    return "\n".join(lines) + f"\n\n{words}\n"


def _verdicts_by_evidence(result: dict[str, Any]) -> list[str]:
    """One line per case: how many ensembles, and the verdicts by what the audit was given."""
    said: dict[str, dict[str, Counter[str]]] = {}
    for point in result["points"]:
        if point.get("members"):  # without a number of members it is a summary of several cases
            row = said.setdefault(point["case"], {by: Counter() for by in EVIDENCE})
            for by, counts in point["said"].items():
                row[by].update(counts)
    lines = [f"| how it was made | ensembles | {' | '.join(EVIDENCE.values())} |", "|---|---|" + "---|" * len(EVIDENCE)]
    for case, row in said.items():
        cells = [", ".join(f"{count} {verdict}" for verdict, count in row[by].most_common()) for by in EVIDENCE]
        lines.append(f"| {case} | {row['alone'].total()} | {' | '.join(cells)} |")
    return lines


def first_judgement() -> str:
    """How often sound ensembles were accused and others caught, before the rules were changed."""
    result = json.loads((RESULTS / "audit_judged_first.json").read_text())
    kinds = {
        "sound": "called collusive",
        "unskilled": "called healthy",
        "networks jointly": "called collusive",
        "constant biases, 1 times": "called collusive",
    }
    lines = [f"| ensembles | | {' | '.join(EVIDENCE.values())} |", "|---|---|" + "---|" * len(EVIDENCE)]
    for kind, words in kinds.items():
        truths = ("sound", "alike") if kind == "sound" else (kind,)
        rows = [row for row in result["rows"] if row["truth"] in truths or row["case"] == kind]
        verdict = words.split()[-1]
        counts = [sum(row["said"][by].get(verdict, 0) for row in rows) for by in EVIDENCE]
        total = sum(row["ensembles"] for row in rows)
        lines.append(f"| {total:,} {kind} | {words} | " + " | ".join(str(count) for count in counts) + " |")
    return "\n".join(lines) + f"\n\n{header(result['made'])}\n"


def rotation_size() -> str:
    """How often the rotation test's p-value lies below a level for independent members, by kind and dimensions."""
    result = json.loads((RESULTS / "audit_size.json").read_text())
    kinds = dict.fromkeys(row["kind"] for row in result["rows"])
    titles = ("errors", "members", "dimensions", "below 0.05", "below 0.001", "below 0.0002")
    lines = [f"| {' | '.join(titles)} |", "|" + "---|" * len(titles)]
    for kind in kinds:
        rows = [row for row in result["rows"] if row["kind"] == kind]
        members, wide = ({row[name] for row in rows} for name in ("members", "dimensions"))
        spans = [
            f"{min(row['below'][level] for row in rows):.5f} to {max(row['below'][level] for row in rows):.5f}"
            for level in ("0.05", "0.001", "0.0002")
        ]
        lines.append(
            f"| {kind} | {min(members)} to {max(members)} | {min(wide)} to {max(wide):,} | {' | '.join(spans)} |"
        )
    return "\n".join(lines) + f"\n\n{header(result['made'])}\n"


def coverage() -> str:
    """How often intervals held the truth: the mean over figures, and the lowest figure."""
    result = json.loads((RESULTS / "audit_coverage.json").read_text())
    lines = ["| task | members | examples | held, mean over figures | lowest |", "|---|---|---|---|---|"]
    for row in result["rows"]:
        held = row["held"]
        worst = min(held, key=held.__getitem__)
        lines.append(
            f"| {row['task']} | {row['members']} | {row['examples']:,} | {fmean(held.values()):.3f} | "
            f"{held[worst]:.2f} ({worst}) |"
        )
    return "\n".join(lines) + f"\n\n{header(result['made'])}\n"


def shipped(name: str) -> dict[str, Any]:
    """A study's result."""
    return json.loads((SHIPPED / f"{name}.json").read_text())


def made_by(*results: dict[str, Any]) -> str:
    """How studies were made, in a line."""
    minutes = sum(result["made"]["seconds"] for result in results) / 60
    seeds = sorted({len(result["made"]["seeds"]) for result in results})
    machines = ", ".join(dict.fromkeys(result["made"]["hardware"] for result in results))
    few = "1 seed" if seeds == [1] else f"{' to '.join(map(str, dict.fromkeys((seeds[0], seeds[-1]))))} seeds"
    return f"*{few}; {machines}, {minutes:.0f} minutes*"


def uci() -> str:
    """The collusion paper's tables, from β = 0 to β = 1."""
    result = shipped("collusion/figure-2.paper")
    words = {
        "facebook": "facebook, without the columns that sum up to the target",
        "facebook-leaky": "facebook, with them",
    }
    lines = [
        "| data | diversity | ensemble's error | diversity that is bias | rise without 20 % of members |",
        "|---|---|---|---|---|",
    ]
    for data in dict.fromkeys(point["data"] for point in result["points"]):
        low, high = (_at(result, data=data, beta=beta) for beta in (0.0, 1.0))
        shares = [f"{100 * low[m]:.2g} % → {100 * high[m]:.2g} %" for m in ("bias_share", "codependence_0.2")]
        both = [f"{low[m]:.2g} → {high[m]:.2g}" for m in ("diversity",)] + [f"{low['error']:.3g} → {high['error']:.3g}"]
        lines.append(f"| {words.get(data, data)} | {' | '.join([*both, *shares])} |")
    return "\n".join(lines) + f"\n\n{made_by(result)}\n"


def _at(result: dict[str, Any], **place: Any) -> dict[str, float]:
    (point,) = [p for p in result["points"] if all(p[key] == value for key, value in place.items())]
    return {name: value[0] for name, value in point["measures"].items()}


NETWORKS = (
    ("collusion/figure-6.gpu", "five ResNet-18, CIFAR-10, probabilities averaged", "beta", "β"),
    ("collusion/figure-13.gpu", "ten ResNet-18, CIFAR-10, probabilities averaged", "beta", "β"),
    ("collusion/figure-14.gpu", "five ResNet-18, CIFAR-10, scores averaged", "beta", "β"),
    ("collusion/figure-16.gpu", "five VGG, Fashion-MNIST (for SVHN), probabilities averaged", "beta", "β"),
    ("collusion/figure-18.gpu", "five ResNet-18, CIFAR-10, joint, members dropped at random", "drop", "share"),
)


def networks() -> str:
    """Large networks over β, and over the share of members that joint training leaves out."""
    lines = [
        "| ensembles | at | accuracy | members' accuracy | ensemble's loss | diversity |",
        "|---|---|---|---|---|---|",
    ]
    for name, words, axis, symbol in NETWORKS:
        for point in shipped(name)["points"]:
            told = {key: value[0] for key, value in point["measures"].items()}
            shares = [f"{100 * told[key]:.1f} %" for key in ("accuracy", "member_accuracy")]
            cells = [*shares, f"{told['error']:.3g}", f"{told['diversity']:.3g}"]
            lines.append(f"| {words} | {symbol} = {point[axis]:g} | {' | '.join(cells)} |")
    return "\n".join(lines) + f"\n\n{made_by(*(shipped(name) for name, *_ in NETWORKS))}\n"


def converged() -> str:
    """Figures 6 and 17 of the collusion paper, trained to convergence: means over seeds."""
    units = json.loads((RESULTS / "collusion_cifar10.json").read_text())["units"]
    titles = ("β", "accuracy, by seed", "members' accuracy", "ensemble's loss", "members' loss", "diversity", "audit")
    lines = [f"| {' | '.join(titles)} |", f"|{'---|' * len(titles)}"]
    for beta in sorted({unit["made"]["beta"] for unit in units}):
        same = [unit for unit in units if unit["made"]["beta"] == beta]
        accuracies = ", ".join(f"{100 * unit['test']['accuracy']:.2f} %" for unit in same)
        members = [share for unit in same for share in unit["test"]["member_accuracy"]]
        losses = [f"{fmean(unit['test'][key] for unit in same):.3f}" for key in ("error", "individual", "diversity")]
        said = {way: [unit["audit"][way]["verdict"] for unit in same] for way in same[0]["audit"] if way != "with both"}
        ways = [f"{way}: {', '.join(dict.fromkeys(verdicts))}" for way, verdicts in said.items()]
        cells = [accuracies, f"{100 * fmean(members):.1f} %", *losses, "; ".join(ways)]
        lines.append(f"| {beta:g} | {' | '.join(cells)} |")
    first, seconds = units[0]["made"], sum(unit["made"]["seconds"] for unit in units)
    seeds = len({unit["made"]["seed"] for unit in units})
    made = (
        f"Five members, {first['epochs']} epochs, {seeds} seeds; {first['device']}, {seconds / 60:.0f} minutes of "
        "training. `python benchmarks/collusion_cifar10.py` makes it again."
    )
    return "\n".join(lines) + f"\n\n{made}\n"


def methods() -> str:
    """Masksembles beside what they are compared with."""
    both = shipped("masksembles/figure-2.laptop")
    lines = [
        "| data | method | accuracy | members' accuracy | diversity (eq. 7) | calibration error | likelihood |",
        "|---|---|---|---|---|---|---|",
    ]
    for point in both["points"]:
        told = {key: value[0] for key, value in point["measures"].items()}
        shares = [f"{100 * told[key]:.1f} %" for key in ("accuracy", "member_accuracy")]
        cells = [*shares, f"{told['normalised_disagreement']:.2f}", f"{100 * told['ece']:.1f} %", f"{-told['nll']:.3f}"]
        lines.append(f"| {point['data']} | {point['method']} | {' | '.join(cells)} |")
    return "\n".join(lines) + f"\n\n{made_by(both)}\n"


SETS = ("corrupted-1", "corrupted-2", "corrupted-3", "corrupted-4", "corrupted-5", "unseen", "mnist", "fashion-mnist")
OOD = ("ldr/table-2.gpu", "ldr/table-2.laptop")


def ood() -> str:
    """Every method with two scores on every set: areas under the ROC curve, in per cent, with standard errors."""
    lines = [
        f"| data | method | score | {' | '.join(SETS)} | accuracy | members | the audit says |",
        "|---|---|---|" + "---|" * (len(SETS) + 3),
    ]
    results = [shipped(name) for name in OOD if (SHIPPED / f"{name}.json").exists()]
    for point in (point for result in results for point in result["points"]):
        told = point["measures"]
        for score, words in (("model_average", "BMA"), ("predictive_diversity", "PDS")):
            if point["method"] == "single" and score == "predictive_diversity":
                continue  # one member's probabilities sum to one: the score is the same for every example
            cells = [_percent(told.get(f"auroc_{score}_{name}")) for name in SETS]
            first = words == "BMA"
            shares = [_percent(told[key]) if first else "" for key in ("accuracy", "member_accuracy")]
            said = ", ".join(f"{word} {n}" for word, n in point.get("audited", {}).items()) if first else ""
            names = [point["data"], point["method"]] if first else ["", ""]
            lines.append(f"| {' | '.join([*names, words, *cells, *shares, said])} |")
    return "\n".join(lines) + f"\n\n{made_by(*results)}\n"


def _percent(value: list[float | None] | None) -> str:
    if value is None or value[0] is None:
        return ""
    return f"{100 * value[0]:.1f}" + (f" ± {100 * value[1]:.1f}" if value[1] else "")


AUDITED = ("audit/figure-1.paper", "audit/figure-1.laptop")


def audited() -> str:
    """LDR at every strength: what members and ensemble can do, and what the audit says."""
    lines = [
        "| data | members drawn | λ | accuracy | members | worst member | distinct classes of 5 | "
        "PDS, corrupted-5 | PDS, unseen | the audit says |",
        "|" + "---|" * 10,
    ]
    results = [shipped(name) for name in AUDITED if (SHIPPED / f"{name}.json").exists()]
    for point in (point for result in results for point in result["points"]):
        told = point["measures"]
        shares = [_percent(told[key]) for key in ("accuracy", "member_accuracy", "worst_member_accuracy")]
        areas = [_percent(told.get(f"auroc_predictive_diversity_{name}")) for name in ("corrupted-5", "unseen")]
        said = ", ".join(f"{word} {n}" for word, n in point["audited"].items())
        cells = [
            point["data"],
            str(point["sampled"]),
            f"{point['strength']:g}",
            *shares,
            f"{told['distinct_predictions'][0]:.2f}",
            *areas,
            said,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + f"\n\n{made_by(*results)}\n"


LIBRARY = ROOT / "src/dissensus/studies/specs"
ADP_METHODS = {"baseline": "plain", "adp-2-0": "ADP(2, 0)", "adp-2-0.5": "ADP(2, 0.5)"}
ATTACK_WORDS = {
    "fgsm": "FGSM, ε =",
    "bim": "BIM, ε =",
    "pgd": "PGD, ε =",
    "mim": "MIM, ε =",
    "jsma": "JSMA, γ =",
    "carlini_wagner": "C&W, c =",
    "elastic_net": "EAD, c =",
    "apgd": "APGD, ε =",
}
SUITE_WORDS = {"standard": "**worst case**, standard, ε =", "adaptive": "**worst case**, adaptive, ε ="}


def paper_numbers(name: str) -> dict[tuple[str, str, str], float]:
    """A study's numbers of the paper by data, method and measure."""
    told = tomllib.loads((LIBRARY / f"{name}.toml").read_text())
    return {
        (data, e["at"]["method"], e["measure"]): e["paper"]
        for e in told["expect"]
        if "paper" in e
        for data in e["data"]
    }


def adp_errors() -> str:
    """Table 1 of the ADP paper beside ours, and what members' predictions and features look like."""
    result, paper = shipped("adp/table-1.gpu"), paper_numbers("adp/table-1")
    volumes, features = (shipped(f"adp/figure-{number}.gpu") for number in (5, 2))
    lines = [
        "| data | training | ensemble's error, paper | ours | worst member's, paper | ours | members', ours | "
        "median log ED | features alike (CKA) | the audit says |",
        "|" + "---|" * 10,
    ]
    for point in result["points"]:
        place = {"data": point["data"], "method": point["method"]}
        cells = [place["data"], ADP_METHODS[place["method"]]]
        for measure in ("error_rate", "worst_member_error_rate"):
            cells += [_share(paper.get((*place.values(), measure))), _share(point["measures"][measure][0])]
        cells.append(_share(point["measures"]["member_error_rate"][0]))
        for other, measure, form in (
            (volumes, "log_nonmaximal_volume", "#.2g"),
            (features, "features_similarity", ".2f"),
        ):
            known = any(p["data"] == place["data"] for p in other["points"])
            cells.append(f"{_at(other, **place)[measure]:{form}}" if known else "")
        cells.append(", ".join(f"{word} {n}" for word, n in point["audited"].items()))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + f"\n\n{made_by(result, volumes, features)}\n"


def _share(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.2f} %"


DETECTORS = {
    "nonmaximal_volume": "ED",
    "predictive_diversity": "PDS",
    "probability_variance": "variance",
    "model_average": "BMA",
    "mean_energy": "energy",
    "mean_entropy": "members' entropy",
}


def adp_detection() -> str:
    """How well scores tell what attacks have turned from what they began with."""
    result = shipped("adp/figure-4.gpu")
    attacks = [name.removeprefix("fooled_") for name in result["points"][0]["measures"] if name.startswith("fooled_")]
    heads = [ATTACK_WORDS[name].split(",")[0] for name in attacks]
    tables = []
    for data in dict.fromkeys(point["data"] for point in result["points"]):
        lines = [f"| {data} | score | {' | '.join(heads)} |", "|---|---|" + "---|" * len(attacks)]
        for point in result["points"]:
            if point["data"] != data:
                continue
            told = point["measures"]
            lines.append(
                f"| {ADP_METHODS[point['method']]} | turned, % | "
                f"{' | '.join(_percent(told[f'fooled_{name}']) for name in attacks)} |"
            )
            for score, words in DETECTORS.items():
                cells = [_percent(told[f"auroc_{score}_{name}"]) for name in attacks]
                lines.append(f"| | {words} | {' | '.join(cells)} |")
        tables.append("\n".join(lines))
    return "\n\n".join(tables) + f"\n\n{made_by(result)}\n"


def to_come(name: str) -> str:
    """What stands where a result is missing."""
    return f"*No result yet: `dissensus study run {name} --scale gpu --device cuda` makes it.*\n"


def under_attack(name: str) -> str:
    """A table of the ADP paper under attack: ours by its protocol, with its own numbers in brackets; the worst case."""
    if not (SHIPPED / f"{name}.gpu.json").exists():
        return to_come(name)
    result, paper = shipped(f"{name}.gpu"), paper_numbers(name)
    tables = []
    for data in dict.fromkeys(point["data"] for point in result["points"]):
        points = {point["method"]: point for point in result["points"] if point["data"] == data}
        methods = [method for method in ADP_METHODS if method in points]
        few = points[methods[0]]["examples"]
        heads = [data, "images", *(ADP_METHODS[method] for method in methods)]
        lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
        measures = [name for name in points[methods[0]]["measures"] if name == "accuracy" or name in few]
        for measure in sorted(measures, key=lambda name: name.partition("_")[0] in SUITE_WORDS):
            cells = []
            for method in methods:
                theirs = paper.get((data, method, measure))
                ours = _percent(points[method]["measures"][measure])
                cells.append(ours if theirs is None else f"{ours} ({100 * theirs:.1f})")
            images = f"{few[measure]:,}" if measure in few else "all"
            named = _attack(measure).replace(" ", "\N{NO-BREAK SPACE}")
            lines.append(f"| {named} | {images} | {' | '.join(cells)} |")
        tables.append("\n".join(lines))
    return "\n\n".join(tables) + f"\n\n{made_by(result)}\n"


TRAINED_AGAINST = {"none": "nothing", "fgsm": "FGSM", "pgd": "PGD"}


def hardened() -> str:
    """Table 4 of the ADP paper: what was trained against attacks, a row each, with the paper's numbers in brackets."""
    if not (SHIPPED / "adp/table-4.gpu.json").exists():
        return to_come("adp/table-4")
    result = shipped("adp/table-4.gpu")
    told = tomllib.loads((LIBRARY / "adp/table-4.toml").read_text())["expect"]
    paper = {(e["at"]["adversarial"], e["at"]["method"], e["measure"]): e["paper"] for e in told if "paper" in e}
    first = result["points"][0]
    measures = [measure for measure in first["measures"] if measure == "accuracy" or measure in first["examples"]]
    measures.sort(key=lambda name: name != "accuracy" and name.partition("_")[0] not in SUITE_WORDS)
    heads = [_attack(measure).replace("**worst case**, ", "").split(",")[0] for measure in measures]
    lines = [
        f"| trained against | ensemble | {' | '.join(heads)} | the audit says |",
        "|---|---|" + "---|" * (len(heads) + 1),
    ]
    for point in result["points"]:
        cells = []
        for measure in measures:
            theirs = paper.get((point["adversarial"], point["method"], measure))
            cells.append(_percent(point["measures"][measure]) + ("" if theirs is None else f" ({100 * theirs:.1f})"))
        words = ADP_METHODS.get(point["method"], "Masksembles")
        said = ", ".join(point.get("audited", {}))
        lines.append(f"| {TRAINED_AGAINST[point['adversarial']]} | {words} | {' | '.join(cells)} | {said} |")
    return "\n".join(lines) + f"\n\n{made_by(result)}\n"


def _attack(measure: str) -> str:
    """A measure under attack as people say it."""
    name, _, parameter = measure.removeprefix("accuracy_").rpartition("_")
    words = SUITE_WORDS.get(name) or ATTACK_WORDS.get(name)
    return f"{words} {parameter}" if words else "none"


TABLES = {
    "detection.md": {"ood": ood, "audited": audited},
    "audit.md": {"audit": confusion, "first": first_judgement, "size": rotation_size, "coverage": coverage},
    "diversity.md": {"uci": uci, "networks": networks, "converged": converged},
    "masks.md": {"methods": methods},
    "robustness.md": {
        "adp-errors": adp_errors,
        "adp-attacks": partial(under_attack, "adp/table-2"),
        "adp-five": partial(under_attack, "adp/table-5"),
        "adp-hardened": hardened,
        "adp-detection": adp_detection,
    },
}
"""Tables of pages, by the mark that they stand behind."""


def page(name: str) -> str:
    """A page with its tables put in."""
    text = (DOCS / name).read_text()
    for mark, table in TABLES[name].items():
        before, rest = text.split(f"<!-- {mark} -->\n")
        text = f"{before}<!-- {mark} -->\n\n{table()}\n{END}{rest.split(END, 1)[1]}"
    return text


if __name__ == "__main__":
    if any(word != "--check" for word in sys.argv[1:]):
        sys.exit(f"usage: python {sys.argv[0]} [--check]: write the tables of the docs, or tell which are stale")
    pages = {PAGE: rendered, **{DOCS / name: partial(page, name) for name in TABLES}}
    if "--check" in sys.argv:
        stale = [file.name for file, render in pages.items() if file.read_text() != render()]
        sys.exit(f"stale: {', '.join(stale)}; run python benchmarks/render.py" if stale else 0)
    for file, render in pages.items():
        file.write_text(render())
