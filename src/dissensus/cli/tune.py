"""`dissensus tune`: how much diversity is best on a data set, as a page."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.markup import escape
from rich.panel import Panel

from dissensus.cli.models import named_function
from dissensus.cli.screen import (
    WRONG_USE,
    check_apart,
    check_drawn,
    check_file,
    check_folder,
    console,
    fail,
    in_options,
    print_place,
    progress_bar,
    resumable,
    said,
    table,
    torch_device,
    write_file,
)

OPTIONS = {
    "data": "DATA",
    "space": "--space",
    "objective": "--objective",
    "epochs": "--epochs",
    "budget": "--budget",
    "factor": "--factor",
    "first_rung": "--first-rung",
    "splits": "--splits",
    "seeds": "--seeds",
    "metric": "--metric",
    "test": "--test",
    "validation": "--validation",
    "checkpoint": "--checkpoint",
    "loss": "--loss",
    "pool": "--pool",
    "target": "--target",
}
"""Options by the arguments of `dissensus.tune` that they become."""


def tune(
    data: Annotated[
        str,
        typer.Argument(
            help="A file (.npz with x and y, or a .parquet or .csv table with --target), a folder of images by class, "
            "or a data set of `dissensus data list`."
        ),
    ],
    space: Annotated[
        list[str] | None,
        typer.Option(
            help="A setting and its values: beta=0.2,0.5,0.8, or a range lr=1e-4..1e-2:log, or members=2..8:int. "
            "Settings are those of the objective, lr, weight_decay, members, batch_size, width and depth; repeatable."
        ),
    ] = None,
    objective: Annotated[
        str, typer.Option(help="An objective of dissensus.objectives, or MODULE:FUNCTION.")
    ] = "augmented",
    target: Annotated[str | None, typer.Option(help="The target's column of a table.")] = None,
    drop: Annotated[list[str] | None, typer.Option(help="A column of a table to leave out; repeatable.")] = None,
    task: Annotated[str | None, typer.Option(help="classification or regression; by default that of the data.")] = None,
    loss: Annotated[str | None, typer.Option(help="The loss: cross_entropy or squared_error by default.")] = None,
    pool: Annotated[str | None, typer.Option(help="How members are pooled: probability or score.")] = None,
    model: Annotated[
        str | None, typer.Option(help="A function that returns a new member, as MODULE:FUNCTION; by default a network.")
    ] = None,
    width: Annotated[int, typer.Option(min=1, help="Units of a hidden layer.")] = 32,
    depth: Annotated[int, typer.Option(min=1, help="Hidden layers.")] = 2,
    members: Annotated[int, typer.Option(min=2, help="Members of every ensemble.")] = 5,
    epochs: Annotated[int, typer.Option(min=1, help="Epochs of a whole training.")] = 27,
    batch_size: Annotated[int, typer.Option(min=1, help="Examples of a step.")] = 64,
    lr: Annotated[float, typer.Option(help="Learning rate.")] = 1e-3,
    weight_decay: Annotated[float, typer.Option(help="Weight decay.")] = 0.0,
    splits: Annotated[int, typer.Option(min=1, help="Splits into training, validation and test rows.")] = 5,
    seeds: Annotated[int, typer.Option(min=1, help="Runs per candidate and split.")] = 2,
    validation: Annotated[float, typer.Option(help="Share of rows for validation.")] = 0.2,
    test: Annotated[float, typer.Option(help="Share of rows for the test.")] = 0.2,
    factor: Annotated[float, typer.Option(help="Of n candidates, about n / factor go on at each rung.")] = 4.0,
    first_rung: Annotated[int, typer.Option(min=1, help="Epochs before the first rung, at least.")] = 1,
    budget: Annotated[
        float | None, typer.Option(help="What may be spent, in whole trainings of one candidate.")
    ] = None,
    metric: Annotated[str, typer.Option(help="loss, accuracy, error, rmse or mae.")] = "loss",
    allow_collusive: Annotated[
        bool, typer.Option("--allow-collusive", help="Let candidates be chosen that the audit calls collusive.")
    ] = False,
    examples: Annotated[int | None, typer.Option(min=30, help="Use this many examples, drawn at random.")] = None,
    image_size: Annotated[int, typer.Option(min=1, help="Height and width of images of a folder.")] = 32,
    seed: Annotated[int, typer.Option(min=0, help="Seed of splits, runs and proposals.")] = 0,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    checkpoint: Annotated[
        Path | None, typer.Option(help="A folder that keeps everything; the same command goes on with it.")
    ] = None,
    save: Annotated[Path | None, typer.Option(help="A folder for the ensemble of the choice.")] = None,
    title: Annotated[str, typer.Option(help="The heading of the page.")] = "",
    page: Annotated[Path, typer.Option(help="Where to write the page.")] = Path("tune.html"),
    json_file: Annotated[Path | None, typer.Option("--json", help="Write everything as JSON.")] = None,
) -> None:
    """Find how much diversity is best, and write a page on what that gains over independent training.

    Candidates start as runs of one stacked training, and the worst drop out at rungs. Tables are standardised over all
    rows, targets of a regression included. The space is beta=0.2,0.4,0.6,0.8,0.9,1 by default.
    """
    where = torch_device(device)
    check_file("--json", json_file)
    check_drawn("--page", page)
    check_folder("--checkpoint", checkpoint)
    check_folder("--save", save)
    file = Path(data)
    check_apart(
        {"--json": json_file, "--page": page},
        [file if file.exists() else None],
        folders={"--checkpoint": checkpoint, "--save": save},
    )
    values = _space(space or ["beta=0.2,0.4,0.6,0.8,0.9,1"])
    try:
        problem = _problem(data, task, target, drop or [], image_size, examples, seed)
        build = _build(model, problem, width, depth, loss)
        function = _objective(objective, problem, loss, pool)
        import dissensus as ds

        with resumable(checkpoint is not None), progress_bar() as bar:
            tuned = ds.tune(
                build,
                (problem.x.to(where), problem.y.to(where)),
                function,
                space=values,
                members=members,
                epochs=epochs,
                batch_size=batch_size,
                lr=lr,
                weight_decay=weight_decay,
                splits=splits,
                seeds=seeds,
                validation=validation,
                test=test,
                factor=factor,
                first_rung=first_rung,
                budget=budget,
                metric=metric,
                allow_collusive=allow_collusive,
                checkpoint=checkpoint,
                resume=checkpoint is not None,
                progress=lambda moment: bar.update(f"{moment.runs} runs", moment.step / moment.steps, str(moment)),
                seed=seed,
            )
    except (ValueError, TypeError, OSError, ImportError, RuntimeError) as reason:
        fail(in_options(said(reason), OPTIONS))
    if json_file is not None:
        write_file(json_file, (tuned.to_json() + "\n").encode())
    if save is not None:
        tuned.ensemble.save(save)
    write_file(page, tuned.page(title=title or f"How much diversity? {Path(data).stem}").encode())
    _print(tuned)
    print_place("Open", page)


_TAKEN = {"classification": ("logits",), "regression": ("values", "gaussian", "quantiles")}
"""Kinds of outputs that losses of a task take."""


class _Problem(NamedTuple):
    """Data in memory and what is predicted."""

    x: Any
    y: Any
    task: str
    outputs: int


def _space(words: list[str]) -> dict[str, Any]:
    """Settings written as ``name=1,2,3`` or ``name=low..high``, with ``:log`` and ``:int`` for ranges."""
    space: dict[str, Any] = {}
    for word in words:
        name, sign, text = (part.strip() for part in word.partition("="))
        if not sign or not name or not text:
            fail(f"--space {word}: write it as NAME=VALUES, such as beta=0.2,0.5,0.8 or lr=1e-4..1e-2:log", WRONG_USE)
        if name in space:
            fail(f"--space {word}: {name} is given twice", WRONG_USE)
        try:
            space[name] = _range(text) if ".." in text else [_value(value) for value in text.split(",")]
        except ValueError as reason:
            fail(f"--space {word}: {reason}", WRONG_USE)
    return space


def _range(text: str) -> Any:
    from dissensus.train import Range

    ends, *kinds = text.split(":")
    unknown = set(kinds) - {"log", "int"}
    if unknown:
        raise ValueError(f"a range may end in :log or :int; got :{sorted(unknown)[0]}")
    low, _, high = ends.partition("..")
    try:
        numbers = float(low), float(high)
    except ValueError:
        raise ValueError(f"a range goes from a number to a number, as 0.1..1; got {ends}") from None
    return Range(*numbers, log="log" in kinds, integer="int" in kinds)


def _value(text: str) -> Any:
    text = text.strip()
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    if not text:
        raise ValueError("a value is missing")
    return text


def _problem(
    data: str, task: str | None, target: str | None, drop: list[str], image_size: int, examples: int | None, seed: int
) -> _Problem:
    """Inputs and targets as tensors, scaled."""
    import torch

    from dissensus import checks
    from dissensus.data import sources
    from dissensus.data.tables import TableScaler
    from dissensus.data.user_files import read_data

    if task is not None:
        checks.one_of("task", task, ("classification", "regression"))
    if not Path(data).expanduser().exists() and data in sources.DATASETS:
        info = sources.DATASETS[data]
        part = info.parts[0] if info.parts else None
        x, targets = sources.load(data, part)
        x = x.float() / 255 if x.dtype == torch.uint8 else x
    elif not Path(data).expanduser().exists() and not Path(data).suffix:
        fail(f"DATA {data}: there is no such file, and no such data set. {checks.nearest(data, sources.DATASETS)}")
    else:
        x, targets = read_data(data, target=target, drop=drop, image_size=image_size).tensors()
    y, names = _targets(targets, task)
    classifies = bool(names) or not y.is_floating_point()
    if examples is not None and examples < len(x):
        chosen = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))[:examples]
        x, y = x[chosen], y[chosen]
    if x.ndim == 2:
        values = y.unsqueeze(1).double() if y.ndim == 1 else y.double()
        x, scaled = TableScaler.fit(x.double(), values).transform(x.double(), values)
        y = y if classifies else scaled.float()
    elif not classifies:
        y = ((y - y.mean(0)) / y.std(0)).float()
        y = y.unsqueeze(1) if y.ndim == 1 else y
    return _Problem(
        x.float(),
        y,
        "classification" if classifies else "regression",
        int(y.max()) + 1 if classifies else y.shape[1],
    )


def _targets(targets: Any, task: str | None) -> tuple[Any, list[str]]:
    """Targets as a tensor, and the names of classes where they are classes."""
    import numpy as np
    import torch

    values = targets.numpy() if isinstance(targets, torch.Tensor) else np.asarray(targets)
    if task == "regression":
        if values.dtype.kind not in "fiu":
            fail("--task regression needs targets that are numbers")
        return torch.as_tensor(values.astype(np.float64)), []
    if task == "classification" or values.dtype.kind not in "f":
        names, codes = np.unique(values, return_inverse=True)
        return torch.as_tensor(codes.reshape(values.shape).astype(np.int64)), [str(name) for name in names]
    return torch.as_tensor(values.astype(np.float64)), []


def _build(model: str | None, problem: _Problem, width: int, depth: int, loss: str | None) -> Callable[..., Any]:
    """The function that returns a new member."""
    if model is not None:
        return named_function("--model", model)
    from dissensus import checks, losses, nets

    if loss is not None:
        checks.one_of(
            "loss", loss, [name for name, kind in losses.LOSSES.items() if kind.takes in _TAKEN[problem.task]]
        )
    outputs = problem.outputs * (1 if loss is None else losses.outputs_per_target(loss))
    shape = problem.x.shape[1:]
    if len(shape) not in (1, 3) or (len(shape) == 3 and shape[1] != shape[2]):
        got = " × ".join(map(str, shape))
        fail(f"DATA: inputs have shape {got}; use --model MODULE:FUNCTION for a network that takes them")
    default_width, default_depth = width, depth

    def build(width: int = default_width, depth: int = default_depth) -> Any:
        if len(shape) == 1:
            return nets.mlp(shape[0], outputs, (width,) * depth)
        return nets.cnn(shape[0], outputs, shape[1], tuple(width * 2**level for level in range(depth)))

    return build


def _objective(name: str, problem: _Problem, loss: str | None, pool: str | None) -> Callable[..., Any]:
    """The objective with the loss and the pool bound."""
    from dissensus import checks, losses, objectives
    from dissensus.objectives.declaration import hyperparameters

    if ":" in name:
        function = named_function("--objective", name)
    else:
        checks.one_of("objective", name, objectives.OBJECTIVES)
        function = objectives.OBJECTIVES[name]
    default = "cross_entropy" if problem.task == "classification" else "squared_error"
    takes = hyperparameters(function)
    bound: Mapping[str, Any] = {}
    if "loss" in takes:
        loss = loss or default
        bound = {"loss": loss}
        if "pool" in takes:
            bound = {**bound, "pool": pool or losses.named(loss).pools[0]}
    elif loss is not None:
        fail(f"--loss does not go with --objective {name}, which has its own")
    if pool is not None and "pool" not in bound:
        fail(f"--pool does not go with --objective {name}, which has its own")
    return partial(function, **bound) if bound else function


def _print(tuned: Any) -> None:
    from dissensus.train.tuning.page import badge
    from dissensus.train.tuning.records import opening

    colour = {"good": "green", "fair": "yellow", "bad": "red", "none": "cyan"}[badge(tuned).news]
    heading = f"[bold {colour}]{escape(badge(tuned).text)}[/bold {colour}]"
    console.print(Panel(escape(opening(tuned.sentence)), title=heading, title_align="left", style=""))
    rows = [[escape(candidate.name), candidate.status, *map(_text, _numbers(candidate))] for candidate in tuned.ordered]
    header = ("settings", "stage", "validation", "test", "members", "diversity")
    console.print(table("", header, rows, left=(0, 1)))
    spent = tuned.spent
    console.print(
        f"{spent.run_epochs:,} epochs of {spent.runs:,} runs in {spent.seconds:.0f} s, {spent.share:.0%} of training "
        "every candidate to the end",
        highlight=False,
    )


def _text(value: float) -> str:
    return f"{value:.4g}" if math.isfinite(value) else ""


def _numbers(candidate: Any) -> tuple[float, ...]:
    return candidate.value, candidate.test, candidate.members, candidate.diversity
