"""Tables of docs/speed.md: what benchmarks have measured."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from layout import BENCHMARKS, benchmark, benchmark_note, no_result, study, table

from dissensus.pages.parts import counted

Result = Mapping[str, Any]

WAYS = (
    "by hand",
    "loop, eager",
    "loop, graph",
    "vmap, eager",
    "vmap, graph",
    "batched, graph",
    "streams, graph",
    "stacked, graph",
)
KERNELS = (
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
"""Kinds of kernels, and a part of their names; the first that fits."""
OTHER_KERNELS = "other arithmetic, element by element"
COMPILED = """\
## Compiled members, on a {device}

Milliseconds a step, and in brackets the seconds until the first step is done. "By hand, compiled" is a loop over
modules of which each is compiled by `torch.compile`; "auto, compiled" is `fit(compile=True)`. The difference is the
largest one of any weight or statistic after 20 steps in float32 with and without compiling, beside that of two
trainings without.
"""
STACKED = """\
## Convolutions of all members in one kernel, on a GPU

Milliseconds a step. "By hand" is a loop over modules. "Auto, long" is what `"auto"` chooses for a training of 25,000
steps, with the seconds until its first step is done, which measuring and compiling take.
"""
STACKED_WAYS = ("by hand", "streams", "vmap", "stacked")
STACKED_LAYERS = """\
Microseconds of one operation of all members: cuDNN on a stream per member → the fastest tile of our kernels. The last
column is batch norm, the sum with a residual and ReLU, in both directions.
"""
OPERATIONS = {"forward": "outputs", "input gradient": "gradient of inputs", "weight gradient": "gradient of weights"}
COMPILED_WAYS = ("by hand", "by hand, compiled", "auto", "auto, compiled")
CAPTURED_ATTACKS = """\
## Attacks, on a GPU

Milliseconds of a whole call on 256 images of 3×32×32, ensembles of ResNet-20, capture included: ours with steps that
are replayed from CUDA graphs, and launched one by one; other libraries on a loop over members. Loops marked with a star
are written out from their libraries, which are not installed there.
"""
ATTACKERS = ("ours", "foolbox", "torchattacks", "pyautoattack")
ONE = ("one network", "one member")
GROWTH = """\
Ours on an ensemble, in times of one network as a plain module and of an ensemble of one member, whose pooling takes
less time. In brackets the same of a bare pass with its gradient.
"""


def measured(name: str, rendered: Callable[[Result], str]) -> str:
    """The table of a benchmark and how it was made; a sentence where it has not been run."""
    if not (BENCHMARKS / f"{name}.json").exists():
        return no_result(f"python benchmarks/{name}.py")
    result = benchmark(name)
    return f"{rendered(result)}\n\n{benchmark_note(result)}\n"


def section(name: str, introduction: str, rendered: Callable[[Result], str]) -> str:
    """Heading, introduction and table of a benchmark; nothing while the benchmark has no result."""
    if not (BENCHMARKS / f"{name}.json").exists():
        return ""
    return f"{introduction}\n{measured(name, rendered)}"


def members(result: Result) -> str:
    """Steps by backend, and what comes before the first step where a result has it: earlier ones do not."""
    ways = [
        way for way in ("loop", "vmap", "batched", "layerwise") if any(way in r["milliseconds"] for r in result["rows"])
    ]
    header = ["network", "members", "by hand", *ways, "auto"]
    has_first = "import_seconds" in result
    header += ["auto's choice / the best", "first step: by hand; auto"] if has_first else []
    rows = []
    for row in result["rows"]:
        times = row["milliseconds"]
        hand = times["by hand"]
        cells = [f"{times[way]:.2f} ({hand / times[way]:.1f}×)" if way in times else "–" for way in ways]
        auto = f"{times['auto']:.2f} ({hand / times['auto']:.1f}×), {row['auto']}"
        rows.append([row["case"], str(row["members"]), f"{hand:.2f}", *cells, auto])
        if has_first:
            first = row["first_step_ms"]
            rows[-1] += [f"{row['auto_over_best']:.2f}", f"{first['by hand']:.0f}; {first['auto']:.0f}"]
    if not has_first:
        return table(header, rows)
    seconds = result["import_seconds"]
    imports = f"Importing takes {seconds['dissensus']:.2f} s, of which {seconds['torch']:.2f} s are torch's."
    return f"{table(header, rows)}\n\n{imports}"


def sweeps(result: Result) -> str:
    rows = [
        [
            f"{row['runs']:,}",
            f"{row['networks']:,}",
            *(f"{row[key]:,.2f}" for key in ("loop_ms", "fits_ms", "sweep_ms", "us_per_network")),
            f"{row['loop_ms'] / row['sweep_ms']:,.0f}×",
        ]
        for row in result["rows"]
    ]
    header = ("runs", "networks", "by hand", "fits in turn", "sweep", "µs a network", "sweep against by hand")
    return table(header, rows)


def padding(result: Result) -> str:
    words = {"apart": "every shape by itself", "auto": "padded where that is faster", "together": "all padded together"}
    rows = [
        [words[row["way"]], f"{row['first_epoch_seconds']:.2f}", f"{row['epoch_seconds']:.2f}"]
        for row in result["rows"]
    ]
    return table(("runs", "first epoch and all before it, s", "each later epoch, s"), rows)


def gpu(result: Result) -> str:
    timed = [way for way in WAYS if any("ms" in row["ways"].get(way, {}) for row in result["rows"])]
    rows = []
    for row in result["rows"]:
        ways, auto = row["ways"], row["ways"]["auto"]
        times = [f"{ways[way]['ms']:.2f}" if "ms" in ways.get(way, {}) else "–" for way in timed]
        fastest = f"**{auto['ms']:.2f}** ({ways['by hand']['ms'] / auto['ms']:.1f}×), {auto['backend']}"
        floors = [f"{row['floor_ms']:.2f}", f"{auto['ms'] / row['floor_ms']:.0f}"]
        rows.append([row["case"], str(row["members"]), str(row["batch"]), *times, fastest, *floors])
    captured = [way for row in result["rows"] for name, way in row["ways"].items() if "graph" in name]
    spread = max((way["high"] - way["low"]) / way["ms"] for way in captured)
    ceilings = (
        f"Measured ceilings: {result['bandwidth'] / 1e12:.2f} TB/s copied, "
        f"{result['bf16_rate'] / 1e12:.0f} TFLOP/s in bf16. Quartiles of captured ways lie at most "
        f"{100 * spread:.0f} % apart."
    )
    header = ("network", "members", "batch", *timed, "auto", "floor", "auto, in floors")
    return f"{table(header, rows)}\n\n{ceilings}"


def stacked(result: Result) -> str:
    """Whole steps, then single layers."""
    cases: dict[tuple[str, int, int], dict[str, Result]] = {}
    for row in result["steps"]:
        cases.setdefault((row["case"], row["members"], row["batch"]), {})[row["backend"]] = row
    rows = []
    for (name, members, batch), ways in cases.items():
        times = [f"{ways[way]['ms']:.2f}" if "ms" in ways.get(way, {}) else "–" for way in STACKED_WAYS]
        best, hand = ways["stacked"]["ms"], ways.get("by hand", {}).get("ms")
        times[-1] = f"**{best:.2f}**" + (f" ({hand / best:.0f}×)" if hand else "")
        long = ways.get("auto, long", {})
        chosen = f"{long['ms']:.2f}, {long['ran']} ({long['first_step_s']:.0f})" if "ms" in long else "–"
        rows.append([name, str(members), str(batch), *times, chosen])
    steps = table(("network", "members", "batch", *STACKED_WAYS, "auto, long"), rows)
    if not result["layers"]:
        return steps
    layers = [layer for layer in result["layers"] if "microseconds" in layer]
    cells = [
        [
            layer["name"],
            f"{layer['size']} px, {layer['inputs']} → {layer['outputs']}",
            *(streams_and_kernel(layer["microseconds"][operation]) for operation in OPERATIONS),
            streams_and_kernel(layer["microseconds"]["norm, both"]),
        ]
        for layer in layers
    ]
    header = ("layer", "images, channels", *OPERATIONS.values(), "batch norm")
    return f"{steps}\n\n{STACKED_LAYERS}\n{table(header, cells)}"


def streams_and_kernel(times: Result) -> str:
    """Microseconds of cuDNN on streams, and of the fastest kernel of ours."""
    ours = [time for way, time in times.items() if way.startswith("kernel") and not isinstance(time, str)]
    return f"{times['streams']:.0f} → {min(ours):.0f}" if ours else f"{times['streams']:.0f} → –"


def heads(result: Result) -> str:
    rows = [
        [
            f"{row['members']}",
            f"{row['drawn']}",
            f"{row['pairs']:,}",
            f"{row['seconds_per_epoch']:.1f}",
            f"{row['milliseconds_per_step']:.2f}",
            f"{row['peak_mib']:,.0f}" if row["peak_mib"] else "",
            f"{row['paper_seconds'] or ''}",
        ]
        for row in result["rows"]
        if "without" not in row
    ]
    header = (
        "members",
        "drawn per step",
        "pairs",
        "seconds per epoch",
        "ms a step",
        "peak MiB",
        "the paper's seconds",
    )
    others = [
        f"Without {row['without']}, {row['members']} heads take {row['milliseconds_per_step']:.2f} ms a step."
        for row in result["rows"]
        if "without" in row
    ]
    return "\n\n".join([table(header, rows), *([" ".join(others)] if others else [])])


def heads_profile(result: Result) -> str:
    return "\n\n".join(map(kernels, result["rows"]))


def kernels(row: Result) -> str:
    """The time of a step by kinds of kernels."""
    totals: dict[str, tuple[float, float]] = {}
    for kernel in row["kernels"]:
        kind = next((kind for kind, part in KERNELS if part in kernel["kernel"]), OTHER_KERNELS)
        time, count = totals.get(kind, (0.0, 0.0))
        totals[kind] = time + kernel["microseconds"], count + kernel["per_step"]
    rows = [
        [kind, f"{count:.0f}", f"{time:,.0f}", f"{100 * time / row['microseconds']:.0f} %"]
        for kind, (time, count) in sorted(totals.items(), key=lambda item: -item[1][0])
    ]
    return table((f"{row['members']} heads: kernels", "per step", "microseconds", "share"), rows)


def cifar10(result: Result) -> str:
    row = [
        f"{result['seconds'] / 60:.1f}",
        f"{result['steps']:,}",
        f"{result['ms_per_step']:.2f}",
        result["backend"],
        result["precision"],
        ", ".join(f"{100 * error:.2f}" for error in result["member_error"]),
        f"{100 * result['ensemble_error']:.2f}",
    ]
    header = (
        "minutes",
        "steps",
        "ms a step",
        "backend",
        "precision",
        "members' error, %",
        "ensemble's error, %",
    )
    return table(header, [row])


def audits(result: Result) -> str:
    rows = [
        [
            f"{row['members']}",
            f"{row['examples']:,}",
            f"{row['classes']:,}",
            f"{row['gib_read']:.2f}",
            f"{row['seconds']:.0f}",
            f"{row['peak_mib']:,.0f}",
            f"{row['before_mib']:,.0f}",
        ]
        for row in result["rows"]
    ]
    header = (
        "members",
        "examples",
        "classes",
        "GiB read",
        "seconds",
        "peak MiB",
        "of which torch and its like",
    )
    return table(header, rows)


def masked(result: Result) -> str:
    parts = []
    for row in result["rows"]:
        times = []
        for kind, label in (("training", "training step"), ("inference", "inference")):
            ways = row[f"{kind}_ms"]
            times += [[f"{label}: {way}", f"{ms:.1f}", f"{ms / ways['one network']:.2f}"] for way, ms in ways.items()]
        parts.append(
            f"{row['case']}, batch {row['batch']}\n\n{table(('', 'milliseconds', 'times one network'), times)}"
        )
    scales = dict.fromkeys(row["scale"] for row in result["generation"])
    rows = []
    for width in dict.fromkeys(row["width"] for row in result["generation"]):
        entries = [row for row in result["generation"] if row["width"] == width]
        packages = [f"{entry['package_ms']:.1f}" if "package_ms" in entry else "fails" for entry in entries]
        cells = [f"{entry['ours_ms']:.2f}; {package}" for entry, package in zip(entries, packages, strict=True)]
        rows.append([f"{width:,}", *cells])
    generation = table(("channels", *(f"S = {scale:g}" for scale in scales)), rows)
    return "\n\n".join([*parts, f"Masks for a layer, milliseconds: ours, and the public package's\n\n{generation}"])


def compiled(result: Result) -> str:
    rows = []
    for row in result["rows"]:
        ways = [row["ways"].get(name, {}) for name in COMPILED_WAYS]
        cells = [f"{way['ms']:.2f} ({way['first_step_s']:.0f})" if "ms" in way else "–" for way in ways]
        backend = row["ways"].get("auto, compiled", {}).get("backend", "–")
        apart = f"{row['difference']:.1e}; {row['again']:.1e}" if "difference" in row else "–"
        rows.append([row["case"], str(row["members"]), str(row["batch"]), *cells, backend, apart])
    return table(("network", "members", "batch", *COMPILED_WAYS, "backend", "difference; without"), rows)


def attacks(result: Result) -> str:
    """Ours beside others on one network, and how times grow with members."""

    def cell(row: Result, name: str) -> str:
        if name not in row["milliseconds"]:
            return ""
        mark = "*" if row["how"][name] == "written out" else ""
        return f"{row['milliseconds'][name]:,.0f}{mark} ({row['passes'][name]:.0f})"

    rows = [
        [row["attack"], *(cell(row, name) for name in ATTACKERS), f"{of_the_best(row):.2f}"] for row in result["rows"]
    ]
    beside = table(("attack", *ATTACKERS, "ours / the best of them"), rows)
    counts = sorted({row["members"] for row in result["members"]})
    grown: dict[str, list[str]] = {}
    for row in sorted(result["members"], key=lambda row: row["members"]):
        times = [part["members"] / part[one] for part in (row["milliseconds"], row["pass"]) for one in ONE]
        grown.setdefault(row["attack"], []).append("{:.1f}, {:.1f} ({:.1f}, {:.1f})".format(*times))
    header = ("attack", *(counted(count, "member") for count in counts))
    growth = table(header, [[name, *cells] for name, cells in grown.items()])
    return f"{beside}\n\n{GROWTH}\n{growth}"


def of_the_best(row: Result) -> float:
    """Our time in times of the fastest other library's."""
    times = row["milliseconds"]
    return times["ours"] / min(times[name] for name in ATTACKERS[1:] if name in times)


def captured_attacks(result: Result) -> str:
    """Ours on ensembles of all sizes, beside others."""
    alone = {row["attack"]: row["milliseconds"]["ours"] for row in result["rows"] if row["members"] == 1}
    rows = []
    for row in sorted(result["rows"], key=lambda row: row["members"]):
        times, how = row["milliseconds"], row["how"]
        cells = [f"{times['step by step']:,.0f}" if "step by step" in times else "–"]
        for name in ATTACKERS[1:]:
            mark = "*" if how.get(name) == "written out" else ""
            cells.append(f"{times[name]:,.0f}{mark}" if name in times else "")
        one = alone.get(row["attack"])
        growth = "–" if one is None else f"{times['ours'] / one:.1f}"
        cells += [f"{of_the_best(row):.2f}", growth]
        rows.append([row["attack"], str(row["members"]), f"{times['ours']:,.0f}", *cells])
    header = (
        "attack",
        "members",
        "ours",
        "step by step",
        *ATTACKERS[1:],
        "ours / the best of them",
        "times one network",
    )
    return table(header, rows)


def adp(result: Result) -> str:
    ways = ("plain", "ADP(2, 0)", "ADP(2, 0.5)")
    rows = []
    for row in result["rows"]:
        times = [f"{row['milliseconds'][way]:.2f}" for way in ways]
        paper = "" if row["paper_added"] is None else f"{100 * row['paper_added']:.0f} %"
        rows.append([str(row["members"]), *times, f"{100 * row['added'][ways[-1]]:.1f} %", paper])
    return table(("members", *ways, "ADP(2, 0.5) adds", "the paper's adds"), rows)


def memory(result: Result) -> str:
    rows = [
        [
            f"{row['allowed_mib']:,.0f} MiB" if row["allowed_mib"] else "anything",
            str(row["planned"]),
            f"{row['taken_mib']:,.0f} MiB",
            f"{row['loss']:.4f}",
        ]
        for row in result["memory"].values()
    ]
    return table(("allowed", "planned", "taken", "loss after two epochs"), rows)


def equality(result: Result) -> str:
    rows = [
        [row["case"], row["backend"], "yes" if row["captured"] else "no", f"{row['difference']:.1e}"]
        for row in result["rows"]
        if row["backend"] != "batched" or not row["case"].startswith("fit") or "MLP" in row["case"]
    ]  # a network that is no chain of linear layers ran as a loop
    return table(("training", "backend", "captured in a graph", "largest difference"), rows)


TABLES = {
    "members": partial(measured, "members", members),
    "sweeps": partial(measured, "sweeps", sweeps),
    "padding": partial(measured, "padding", padding),
    "sweeps-gpu": partial(measured, "sweeps_gpu", sweeps),
    "gpu": partial(measured, "gpu", gpu),
    "stacked": partial(section, "stacked_kernels", STACKED, stacked),
    "compiling": partial(section, "compiling", COMPILED.format(device="CPU"), compiled),
    "compiling-gpu": partial(section, "compiling_gpu", COMPILED.format(device="GPU"), compiled),
    "heads": partial(measured, "heads", heads),
    "heads-profile": partial(measured, "heads_profile", heads_profile),
    "cifar10": partial(measured, "cifar10", cifar10),
    "audit": partial(measured, "audit", audits),
    "masks": partial(measured, "masks", masked),
    "attacks": partial(measured, "attacks", attacks),
    "attacks-gpu": partial(section, "attacks_gpu", CAPTURED_ATTACKS, captured_attacks),
    "adp": partial(measured, "adp", adp),
    "memory": partial(measured, "gpu_equality", memory),
    "equality": partial(measured, "gpu_equality", equality),
}


def values() -> dict[str, str]:
    """The cost of the collusion paper's figures on tables."""
    made = study("collusion/figure-2.paper").provenance
    return {
        "figures-minutes": f"{made.seconds / 60:.0f}",
        "figures-searched": f"{made.searched_networks:,}",
        "figures-networks": f"{made.networks:,}",
    }
