"""`dissensus audit`: is this ensemble's diversity real?"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.panel import Panel

from dissensus.cli.screen import (
    COLOURS,
    check_apart,
    check_drawn,
    check_file,
    console,
    fail,
    in_options,
    print_place,
    said,
    table,
    write_file,
)

OPTIONS = {
    "task": "--task",
    "kind": "--kind",
    "classes": "--classes",
    "targets": "--targets",
    "train": "--train",
    "in_bag": "--in-bag",
    "groups": "--groups",
    "class_axis": "--class-axis",
    "ignore_index": "--ignore-index",
    "reference": "--reference",
    "ood": "--ood",
    "loss": "--loss",
    "levels": "--levels",
    "pool": "--pool",
    "unpack_limit": "--unpack-limit",
}
"""Options by the arguments of `dissensus.audit` that they become."""
ARRAYS = {
    "targets": "targets",
    "train_outputs": "train",
    "train_in_bag": "in_bag",
    "groups": "groups",
    "reference": "reference",
    "ood": "ood",
}
"""Arrays that a file may hold beside `outputs`, and the arguments that they become."""
Reader = Callable[[list[Path]], dict[str, Any]]
"""Reads the arrays of files by name."""


def audit(
    files: Annotated[
        list[Path],
        typer.Argument(
            help="Member outputs: one .npz or .safetensors (arrays `outputs` [M, N, C] and `targets`), one .npy, or "
            "one .npy, .csv or .parquet per member."
        ),
    ],
    task: Annotated[str, typer.Option(help="classification, multilabel or regression.")],
    kind: Annotated[
        str | None,
        typer.Option(help="What a classifier's outputs are: logits, probabilities, or labels (hard votes [M, N])."),
    ] = None,
    classes: Annotated[
        str | None, typer.Option(help="Labels of the columns, in the order of the columns: ant,bee,cat.")
    ] = None,
    targets: Annotated[Path | None, typer.Option(help="True labels or values: .npy, .csv or .parquet.")] = None,
    train: Annotated[
        Path | None,
        typer.Option(help="Outputs on training data: .npz or .safetensors with arrays `outputs` and `targets`."),
    ] = None,
    in_bag: Annotated[
        str | None,
        typer.Option(
            "--in-bag",
            help="The training examples that each member was trained on: all, or a .npy mask [M, N]. Needs --train.",
        ),
    ] = None,
    groups: Annotated[
        Path | None,
        typer.Option(
            help="Groups of examples that belong together (patients, series), one name per example: .npy or .csv."
        ),
    ] = None,
    class_axis: Annotated[
        int | None,
        typer.Option("--class-axis", help="Axis of the classes of dense outputs: 2 by default, -1 for [M, N, T, V]."),
    ] = None,
    ignore_index: Annotated[
        int | None,
        typer.Option("--ignore-index", help="Label of positions or examples that do not count, such as -100."),
    ] = None,
    reference: Annotated[
        Path | None, typer.Option(help="Outputs of an independently trained ensemble on the same examples.")
    ] = None,
    ood: Annotated[Path | None, typer.Option(help="Outputs on shifted data.")] = None,
    loss: Annotated[
        str | None,
        typer.Option(
            help="cross_entropy, brier or zero_one; bce for several labels; mse, squared_error, gaussian_nll, quantile "
            "or poisson for regression."
        ),
    ] = None,
    levels: Annotated[
        str | None, typer.Option(help="Levels of the quantiles, with --loss quantile: 0.05,0.5,0.95 by default.")
    ] = None,
    pool: Annotated[
        str | None,
        typer.Option(help="How members become one prediction: probability or score (means), or vote (majority)."),
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write everything as JSON.")] = None,
    page: Annotated[Path | None, typer.Option(help="Write an HTML page with figures.")] = None,
    unpack_limit: Annotated[
        float | None,
        typer.Option(help="Largest size of a compressed .npz when unpacked, in GB; half of the memory by default."),
    ] = None,
    fail_on: Annotated[
        list[str] | None, typer.Option("--fail-on", help="Exit with code 3 at this verdict; repeatable.")
    ] = None,
) -> None:
    """Judge an ensemble by its members' outputs.

    Verdicts: healthy, redundant, dominated, collusive, unskilled or undecided.

    Exit codes: 0 if the verdict is none of `--fail-on`, 3 if it is one of them, 1 or 2 if the call is wrong.
    """
    import dissensus as ds
    from dissensus.auditing import reading
    from dissensus.auditing.judging import VERDICTS

    for verdict in fail_on or []:
        if verdict not in VERDICTS:
            fail(f"--fail-on must be one of {', '.join(VERDICTS)}; got {verdict}")
    check_file("--json", json_file)
    check_drawn("--page", page)
    mask = None if in_bag in (None, "all") else Path(in_bag)
    check_apart({"--json": json_file, "--page": page}, [*files, targets, train, mask, groups, reference, ood])
    options = OPTIONS
    try:
        read = partial(reading.read_files, unpack_limit=unpack_limit)
        arrays = read(files)
        options = _options_used(arrays, {"targets": targets, "train": train, "in_bag": in_bag, "reference": reference})
        labels = reading.read_array(targets) if targets is not None else arrays.get("targets")
        if labels is None:
            fail("there are no targets: give --targets FILE, or a .npz with an array `targets`")
        arguments: dict[str, Any] = {
            "task": task,
            "kind": kind,
            "classes": _class_names(classes),
            "loss": _loss(loss, levels),
            "pool": pool,
            "train": _training_pair(arrays, train, read),
            "in_bag": _in_bag(arrays, in_bag),
            "groups": reading.read_array(groups) if groups is not None else arrays.get("groups"),
            "class_axis": class_axis,
            "ignore_index": ignore_index,
            "reference": _outputs(arrays, "reference", reference, read),
            "ood": _outputs(arrays, "ood", ood, read),
        }
        result = ds.audit(arrays["outputs"], labels, **arguments)
    except (ValueError, TypeError, OSError) as reason:
        fail(in_options(said(reason), options))
    if json_file is not None:  # files come first: who reads the screen through a pipe may close it
        write_file(json_file, (result.to_json() + "\n").encode())
    if page is not None:
        write_file(page, lambda file: result.page(file, files[0].stem))
    _print(result)
    if page is not None:
        print_place("Open", page)
    if result.verdict in (fail_on or []):
        raise typer.Exit(3)


def _options_used(arrays: dict[str, Any], values: dict[str, Any]) -> dict[str, str]:
    """Options by argument, without arguments that come as arrays of the first file."""
    from_file = {argument for name, argument in ARRAYS.items() if name in arrays and values.get(argument) is None}
    return {argument: option for argument, option in OPTIONS.items() if argument not in from_file}


def _class_names(text: str | None) -> list[Any] | None:
    """Names between commas; whole numbers where all of them are."""
    if text is None:
        return None
    names = [name.strip() for name in text.split(",")]
    return [int(name) for name in names] if all(name.lstrip("-").isdecimal() for name in names) else names


def _loss(name: str | None, levels: str | None) -> Any:
    """The loss of that name, with levels of quantiles between commas where they are given."""
    if levels is None:
        return name
    from dissensus import losses

    if name != "quantile":
        fail("--levels goes with --loss quantile")
    try:
        values = tuple(float(level) for level in levels.split(","))
    except ValueError:
        fail(f"--levels must be numbers between commas, such as 0.1,0.5,0.9; got {levels}")
    return partial(losses.quantile, levels=losses.check_levels(values))


def _training_pair(arrays: dict[str, Any], file: Path | None, read: Reader) -> tuple[Any, Any] | None:
    from dissensus.auditing import reading

    if file is not None:
        stored = read([file])
        if "targets" not in stored:
            raise reading.ReadingError(f"{file} has no array `targets` beside `outputs`")
        return stored["outputs"], stored["targets"]
    outputs, targets = arrays.get("train_outputs"), arrays.get("train_targets")
    if (outputs is None) != (targets is None):
        raise reading.ReadingError("`train_outputs` and `train_targets` must both be there, or neither")
    return None if outputs is None else (outputs, targets)


def _in_bag(arrays: dict[str, Any], value: str | None) -> Any:
    from dissensus.auditing import reading

    if value is None:
        return arrays.get("train_in_bag")
    return value if value == "all" else reading.read_array(value)


def _outputs(arrays: dict[str, Any], name: str, file: Path | None, read: Reader) -> Any:
    return read([file])["outputs"] if file is not None else arrays.get(name)


def _print(result: Any) -> None:
    from dissensus.auditing.page import MEANINGS, number, size
    from dissensus.pages import Number

    colour = COLOURS[MEANINGS[result.verdict].news]
    judgement = result.judgement
    lines = ["; ".join(judgement.reasons) + ".", *judgement.advice, *result.notes]
    if judgement.confidence:
        lines.append(f"Confidence: {judgement.confidence}.")
    words = "\n".join(escape(line) for line in lines)
    console.print(Panel(words, title=f"[bold {colour}]{result.verdict}[/bold {colour}]", title_align="left", style=""))
    if judgement.evidence:
        questions = [[escape(item.question), item.answer, escape(item.numbers())] for item in judgement.evidence]
        console.print(table("what was asked", ("question", "answer", "numbers"), questions, left=(0, 1, 2)))
    extra = [name for name in ("train", "reference") if getattr(result, name) is not None]
    rows, group = [], ""
    for finding in result.findings:
        if finding["group"] != group:
            group = finding["group"]
            rows.append([f"[bold]{escape(group)}[/bold]", "", "", *[""] * len(extra)])
        others = [number(finding[name]).text if name in finding else "" for name in extra]
        rows.append([f"  {escape(finding['title'])}", *_cells(number(finding)), *others])
    header = ("number", "test", "95 % interval", *extra)
    console.print(table(size(result.facts), header, rows, left=(0,)))
    if result.detection:
        areas = [
            [escape(name), *_cells(Number(area.value, area.low, area.high, form=".3f"))]
            for name, area in result.detection.items()
        ]
        console.print(table("telling shifted data apart", ("score", "ROC area", "95 % interval"), areas, left=(0,)))


def _cells(value: Any) -> list[str]:
    """A number and its interval, as two cells."""
    return [value.text, f"[dim]{value.interval}[/dim]"]
