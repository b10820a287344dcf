"""`dissensus report`: one page for an ensemble on a data set."""

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.panel import Panel

from dissensus.cli.models import load_model, load_saved
from dissensus.cli.screen import (
    COLOURS,
    WRONG_USE,
    check_apart,
    check_drawn,
    check_file,
    console,
    fail,
    files_by_name,
    in_options,
    print_place,
    progress_bar,
    said,
    table,
    torch_device,
    write_file,
)

OPTIONS = {
    "ens": "ENSEMBLE",
    "build": "--model",
    "trust": "--trust",
    "data": "--data",
    "target": "--target",
    "drop": "--drop",
    "task": "--task",
    "kind": "--kind",
    "loss": "--loss",
    "levels": "--levels",
    "pool": "--pool",
    "shifted": "--shifted",
    "training": "--training",
    "names": "--names",
    "examples": "--examples",
    "batch_size": "--batch-size",
}
"""Options by the arguments of `dissensus.report` that they become."""
VERDICTS = ("sound", "reservations", "problems", "undecided")


def report(
    ensemble: Annotated[
        Path | None,
        typer.Argument(
            help="Stored outputs: .npz or .safetensors with `outputs` [M, N, C] and `targets`, or .npy; or a folder "
            "that `Ensemble.save` wrote with its architecture."
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Instead: a function that returns an Ensemble, a module or a callable x -> [M, B, ...], as "
            "package.module:function; modules of this folder are found."
        ),
    ] = None,
    trust: Annotated[
        list[str] | None,
        typer.Option(help="A package of yours whose function a stored architecture may call; repeatable."),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="Data: .npz with x and y, a .parquet or .csv table with --target, or a folder of images by class."
        ),
    ] = None,
    target: Annotated[str | None, typer.Option(help="The target's column of a table.")] = None,
    drop: Annotated[list[str] | None, typer.Option(help="A column of a table to leave out; repeatable.")] = None,
    shifted: Annotated[
        list[str] | None,
        typer.Option(help="Shifted data as NAME=PATH, in any of these forms; stored outputs for stored outputs."),
    ] = None,
    training: Annotated[
        Path | None, typer.Option(help="Training data, in any of these forms. The audit then tells more.")
    ] = None,
    task: Annotated[str | None, typer.Option(help="classification or regression; by default that of the data.")] = None,
    kind: Annotated[
        str | None, typer.Option(help="What a classifier's outputs are: logits (of an Ensemble) or probabilities.")
    ] = None,
    loss: Annotated[
        str | None,
        typer.Option(help="cross_entropy, brier, zero_one; squared_error, mse, gaussian_nll or quantile (regression)."),
    ] = None,
    levels: Annotated[str | None, typer.Option(help="Levels of quantiles, such as 0.05,0.5,0.95.")] = None,
    pool: Annotated[
        str | None,
        typer.Option(help="How members become one prediction: probability or score (means), or vote (majority)."),
    ] = None,
    names: Annotated[
        str | None, typer.Option(help="Names of the classes, in the order of the outputs: ant,bee,cat.")
    ] = None,
    examples: Annotated[
        int, typer.Option(min=0, help="How many of the hardest and most disputed examples are shown.")
    ] = 9,
    image_size: Annotated[int, typer.Option(min=1, help="Height and width of images of a folder.")] = 224,
    batch_size: Annotated[int, typer.Option(min=1, help="Examples at once.")] = 1024,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    title: Annotated[str, typer.Option(help="The heading of the page.")] = "",
    page: Annotated[Path, typer.Option(help="Where to write the page.")] = Path("report.html"),
    json_file: Annotated[Path | None, typer.Option("--json", help="Write everything as JSON.")] = None,
    fail_on: Annotated[
        list[str] | None, typer.Option("--fail-on", help="Exit with code 3 at this verdict; repeatable.")
    ] = None,
) -> None:
    """Write a page on an ensemble: accuracy, calibration, refusal, uncertainty, examples, shifted data, and the audit.

    Verdicts: sound, reservations, problems or undecided.

    Exit codes: 0 if the verdict is none of `--fail-on`, 3 if it is one of them, 1 or 2 if the call is wrong.
    """
    for verdict in fail_on or []:
        if verdict not in VERDICTS:
            fail(f"--fail-on must be one of {', '.join(VERDICTS)}; got {verdict}")
    if (ensemble is None) == (model is None):
        got = "neither" if model is None else "both"
        fail(f"give ENSEMBLE, or --model MODULE:FUNCTION; got {got}", WRONG_USE)
    where = torch_device(device)
    check_file("--json", json_file)
    check_drawn("--page", page)
    try:
        others = files_by_name("--shifted", shifted or [])
    except ValueError as reason:
        fail(said(reason))
    check_apart({"--json": json_file, "--page": page}, [ensemble, data, training, *others.values()])
    options = OPTIONS if model is None else OPTIONS | {"ens": "--model"}
    try:
        read = partial(_read, target=target, drop=drop or [], image_size=image_size)
        arguments: dict[str, Any] = {
            "task": task,
            "kind": kind,
            "loss": _loss(loss, levels),
            "pool": pool,
            "names": None if names is None else [name.strip() for name in names.split(",")],
            "examples": examples,
            "batch_size": batch_size,
        }
        if ensemble is not None and not ensemble.expanduser().is_dir():
            arguments |= _stored(ensemble, data, others, training, read)
        else:
            subject = (
                load_saved(ensemble, trust or []).to(where)
                if ensemble is not None
                else load_model("--model", model, where)
            )
            arguments |= _computed(subject, data, others, training, read, arguments["names"])
        arguments["title"] = title or _title(ensemble, model, data)
        import dissensus as ds

        with progress_bar() as bar:
            result = ds.report(**arguments, progress=bar.update)
    except (ValueError, TypeError, OSError, ImportError) as reason:
        fail(in_options(said(reason), options))
    if json_file is not None:
        write_file(json_file, (result.to_json() + "\n").encode())
    write_file(page, result.page)
    _print(result)
    print_place("Open", page)
    if result.verdict in (fail_on or []):
        raise typer.Exit(3)


def _loss(name: str | None, levels: str | None) -> Any:
    if levels is None:
        return name
    if name != "quantile":
        fail(f"--levels goes with --loss quantile; got {'no --loss' if name is None else f'--loss {name}'}")
    from dissensus import losses

    try:
        numbers = losses.check_levels([float(level) for level in levels.split(",")])
    except ValueError as reason:
        fail(
            f"--levels must be numbers between 0 and 1 in rising order, such as 0.05,0.5,0.95; got {levels} ({reason})"
        )
    return partial(losses.quantile, levels=numbers)


def _title(ensemble: Path | None, model: str | None, data: Path | None) -> str:
    subject = model if ensemble is None else ensemble.stem
    return f"Report: {subject}" + (f" on {data.stem}" if data is not None else "")


def _read(path: Path, *, labelled: bool = True, **options: Any) -> Any:
    from dissensus.data.user_files import read_data

    return read_data(path, labelled=labelled, **options)


def _stored(
    ensemble: Path, data: Path | None, others: dict[str, Path], training: Path | None, read: Any
) -> dict[str, Any]:
    """Arguments for outputs that are stored; data only shows examples, and has targets where outputs have none."""
    from dissensus.auditing import reading

    arrays = reading.read_files([ensemble])
    targets, inputs, features = arrays.get("targets"), None, None
    if data is not None:
        own = read(data)
        inputs, features = own.tensors()[0], own.features or None
        targets = own.tensors()[1] if targets is None else targets
    if targets is None:
        fail(
            f"{ensemble} has no targets: give --data with targets, or an .npz with an array `targets` beside `outputs`"
        )
    if inputs is not None and len(inputs) != len(targets):
        fail(f"--data {data} must hold {len(targets)} examples, as the targets of {ensemble} do; got {len(inputs)}")
    arguments: dict[str, Any] = {
        "ens": _whole(arrays["outputs"]),
        "data": targets if inputs is None else (inputs, targets),
        "features": features,
    }
    if training is not None:
        stored = reading.read_files([training])
        if "targets" not in stored:
            fail(f"--training {training} has no array `targets` beside `outputs`")
        arguments["training"] = _whole(stored["outputs"]), stored["targets"]
    elif "train_outputs" in arrays and "train_targets" in arrays:
        arguments["training"] = _whole(arrays["train_outputs"]), arrays["train_targets"]
    sets: dict[str, Any] = {}
    if "ood" in arrays:
        sets["ood"] = _whole(arrays["ood"])
    for name, file in others.items():
        part = reading.read_files([file])
        sets[name] = (_whole(part["outputs"]), part["targets"]) if "targets" in part else _whole(part["outputs"])
    return arguments | {"shifted": sets or None}


def _whole(array: Any) -> Any:
    """An array that is read slice by slice, as a whole."""
    return array[:]


def _computed(
    model: Any, data: Path | None, others: dict[str, Path], training: Path | None, read: Any, names: Any
) -> dict[str, Any]:
    """Arguments for a model whose outputs are computed."""
    if data is None:
        fail("give --data: .npz with x and y, a .parquet or .csv table with --target, or a folder of images by class")
    own = read(data)
    arguments: dict[str, Any] = {"ens": model, "data": own.pair(), "features": own.features or None}
    if names is None and own.classes:
        arguments["names"] = list(own.classes)
    if training is not None:
        arguments["training"] = read(training).pair()
    sets: dict[str, Any] = {}
    for name, path in others.items():
        part = read(path, labelled=False)
        sets[name] = part.inputs if part.targets is None else part.pair()
    return arguments | {"shifted": sets or None}


def _print(result: Any) -> None:
    from dissensus.reporting.content import size, title
    from dissensus.reporting.judging import VERDICTS as NEWS
    from dissensus.reporting.page import number

    colour = COLOURS[NEWS[result.verdict]]
    rows = [
        [escape(item.question), f"[{COLOURS[item.news]}]{escape(item.answer)}[/]", escape(item.sentence)]
        for item in result.findings
    ]
    verdict = f"[bold {colour}]{result.verdict}[/bold {colour}]"
    console.print(Panel(escape(size(result.facts)), title=verdict, title_align="left", style=""))
    console.print(table("at a glance", ("question", "answer", "numbers"), rows, left=(0, 1, 2)))
    cells = []
    for name, value in result.numbers.items():
        shown, members = number(name, value, result.facts["task"]), result.members.get(name)
        beside = "" if members is None else number(name, members).text
        words = title(name, result.facts["task"])
        cells.append([escape(words), shown.text, f"[dim]{shown.interval}[/dim]", beside])
    console.print(table("", ("number", "ensemble", "95 % interval", "members"), cells, left=(0,)))
