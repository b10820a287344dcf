"""`dissensus robust`: an ensemble's accuracy under attack, and whether the attacks can be trusted."""

import sys
from pathlib import Path
from typing import Annotated, Any, NamedTuple

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
    check_folder,
    console,
    fail,
    in_options,
    parsed_settings,
    print_place,
    progress_bar,
    resumable,
    said,
    table,
    torch_device,
    write_file,
)

OPTIONS = {
    "model": "--model",
    "target": "--target",
    "network": "--network",
    "build": "--network",
    "options": "--option",
    "trust": "--trust",
    "data": "--data",
    "part": "--data",
    "epsilon": "--epsilon",
    "suite": "--suite",
    "attacks": "--attack",
    "norm": "--norm",
    "pool": "--pool",
    "examples": "--examples",
    "batch_size": "--batch-size",
    "surrogate": "--surrogate",
    "folder": "--folder",
    "seed": "--seed",
}
"""Options by the arguments of `dissensus.attacks.evaluate` that they become."""
WITHOUT_ARCHITECTURE = "Ensembles that were saved without an architecture"
"""Title of options in the help."""


def robust(
    data: Annotated[
        str,
        typer.Option(
            help="Images: mnist, fashion-mnist, cifar10, digits, ... With --model or a stored architecture also a file "
            "or a folder: .npz with x in [0, 1] and y, a .parquet or .csv table with --target, or a folder of images "
            "by class."
        ),
    ],
    epsilon: Annotated[
        str, typer.Option(help="The largest change: of every pixel (8/255 or 0.03), or in L2 of the whole image.")
    ],
    ensemble: Annotated[Path | None, typer.Option(help="The folder that `Ensemble.save` wrote.")] = None,
    network: Annotated[
        str | None,
        typer.Option(
            help="The network of its members, one of the studies', such as resnet20 or cnn.",
            rich_help_panel=WITHOUT_ARCHITECTURE,
        ),
    ] = None,
    trust: Annotated[
        list[str] | None,
        typer.Option(help="A package of yours whose function a stored architecture may call; repeatable."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Instead of --ensemble and --network: a function that returns an Ensemble, a module or a callable "
            "x -> [M, B, C], as package.module:function; modules of this folder are found. It takes images in [0, 1]."
        ),
    ] = None,
    target: Annotated[str | None, typer.Option(help="The target's column of a table.")] = None,
    image_size: Annotated[int, typer.Option(min=1, help="Height and width of images of a folder.")] = 224,
    suite: Annotated[str, typer.Option(help="standard, adaptive, paper (ADP's table 2) or quick.")] = "standard",
    attack: Annotated[
        list[str] | None,
        typer.Option(help="A further attack by its name, such as mim, run after the suite; repeatable."),
    ] = None,
    norm: Annotated[str, typer.Option(help="linf or l2.")] = "linf",
    pool: Annotated[
        str, typer.Option(help="How members become one prediction: probability or score (means).")
    ] = "probability",
    examples: Annotated[int, typer.Option(min=1, help="Number of test images; the first ones are taken.")] = 1000,
    batch_size: Annotated[int, typer.Option(min=1, help="Examples at once.")] = 256,
    option: Annotated[
        list[str] | None,
        typer.Option(
            help="An option of the network, such as widths=[8,16], or batch_norm=false for a cnn without; repeatable.",
            rich_help_panel=WITHOUT_ARCHITECTURE,
        ),
    ] = None,
    surrogate: Annotated[
        str | None,
        typer.Option(
            help="Another ensemble of the same network, to craft examples on: its folder, or with --model a function."
        ),
    ] = None,
    standardise: Annotated[
        bool,
        typer.Option(
            help="Whether members were trained on images standardised by channel, as in studies.",
            rich_help_panel=WITHOUT_ARCHITECTURE,
        ),
    ] = True,
    trained_on: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Number of training images that the standardisation was computed on; all by default.",
            rich_help_panel=WITHOUT_ARCHITECTURE,
        ),
    ] = None,
    split_seed: Annotated[int, typer.Option(help="Seed of the test split, for data without a test set.")] = 0,
    seed: Annotated[int, typer.Option(help="Seed of random starts.")] = 0,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    folder: Annotated[
        Path | None, typer.Option(help="Keep finished parts in this folder; the same call then goes on from there.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write everything as JSON.")] = None,
    page: Annotated[Path | None, typer.Option(help="Write an HTML page with figures.")] = None,
) -> None:
    """Attack an ensemble, report the pointwise worst case, and raise flags where the attacks look too weak.

    Images are in [0, 1], and ε is in these units. Standardisation is part of the attacked model.
    """
    from dissensus import attacks, storage
    from dissensus.attacks.page import page as robustness_page
    from dissensus.data.formats import DataError
    from dissensus.pages import html

    if (ensemble is None) == (model is None):
        got = "neither" if model is None else "both"
        fail(f"give --ensemble, or --model MODULE:FUNCTION; got {got}", WRONG_USE)
    where = torch_device(device)
    check_file("--json", json_file)
    check_drawn("--page", page)
    check_folder("--folder", folder)
    stored = [Path(place) for place in (ensemble, surrogate) if place is not None and model is None]
    stored += [file for place in stored for file in storage.files_of(place)]
    stored += [Path(data)] if model is not None or network is None else []
    check_apart({"--json": json_file, "--page": page}, stored, folders={"--folder": folder})
    try:
        largest = fraction(epsilon)
        own_data = Path(data).expanduser().exists() or bool(Path(data).suffix)
        if model is None and (ensemble is None or not own_data or network is not None):
            subject = _stored(
                ensemble or Path(),
                network,
                data,
                option or [],
                surrogate,
                standardise,
                trained_on,
                split_seed=split_seed,
                trust=trust or [],
            )
        else:
            if network is not None or option:
                fail("--network and --option go with --ensemble; the function of --model makes its networks", WRONG_USE)
            if ensemble is not None:
                target_model = load_saved(ensemble, trust or [])
                other = None if surrogate is None else load_saved(Path(surrogate), trust or [])
            else:
                target_model = load_model("--model", model)
                other = None if surrogate is None else load_model("--surrogate", surrogate)
            inputs = _inputs(data, own_data, target, image_size, examples, split_seed)
            words = "The model gets inputs as they are, in [0, 1]. Its own preprocessing is part of what is attacked."
            subject = _Subject(target_model, inputs, other, False, words)
        console.print(subject.preparation, style="dim", markup=False, highlight=False)
        choices: Any = {"suite": suite, "norm": norm, "pool": pool}
        with resumable(folder is not None), progress_bar() as bar:
            result = attacks.evaluate(
                _moved(subject.model, where),
                subject.data,
                attacks=attack or [],
                epsilon=largest,
                examples=examples,
                batch_size=batch_size,
                surrogate=None if subject.surrogate is None else _moved(subject.surrogate, where),
                folder=folder,
                seed=seed,
                progress=lambda name, share: bar.update(f"{data}: {name}", share),
                **choices,
            )
    except (ValueError, TypeError, OSError, ImportError, DataError) as reason:
        fail(in_options(said(reason), OPTIONS))
    result.facts["standardised"] = subject.standardised
    if json_file is not None:
        write_file(json_file, (result.to_json() + "\n").encode())
    if page is not None:
        write_file(
            page, html(robustness_page(result, f"{model if ensemble is None else ensemble.name} on {data}")).encode()
        )
    _print(result)
    if page is not None:
        print_place("Open", page)


class _Subject(NamedTuple):
    """What is attacked."""

    model: Any
    data: tuple[Any, Any]
    surrogate: Any
    standardised: bool
    preparation: str


def _stored(
    ensemble: Path,
    network: str | None,
    data: str,
    options: list[str],
    surrogate: str | None,
    standardise: bool,
    trained_on: int | None,
    *,
    split_seed: int,
    trust: list[str],
) -> _Subject:
    """A stored ensemble, of a study's network or with its architecture, on images of a study."""
    from dissensus.studies import datasets, stored_ensembles

    network_options = parsed_settings("--option", options, "width=64")
    if network is not None:
        _check_options(network, network_options)
    if trust and "" not in sys.path:
        sys.path.insert(0, "")  # modules of the working folder are found
    images = datasets.load_unscaled(data, train_examples=trained_on, seed=split_seed)
    building: Any = {"options": network_options, "standardise": standardise, "trust": trust}
    subject = stored_ensembles.load(ensemble, network, images, **building)
    other = None if surrogate is None else stored_ensembles.load(surrogate, network, images, **building).model
    is_fixed = datasets.is_split_by_seed(data)
    words = _preparation(data, standardise, is_fixed)
    return _Subject(subject.model, subject.data, other, standardise and not is_fixed, words)


def _inputs(
    data: str, own_data: bool, target: str | None, image_size: int, examples: int, split_seed: int
) -> tuple[Any, Any]:
    """Inputs in [0, 1] and labels: of a study's data set, or of a file or folder."""
    import numpy as np
    import torch

    if not own_data:
        from dissensus.studies import datasets

        return datasets.load_unscaled(data, seed=split_seed).test
    from dissensus.data.user_files import read_data

    x, labels = read_data(data, target=target, image_size=image_size).tensors(examples)
    y = labels if isinstance(labels, torch.Tensor) else torch.as_tensor(_class_numbers(np.asarray(labels), data))
    if not len(x):
        raise ValueError(f"--data {data} must hold at least one example; got none")
    low, high = float(x.min()), float(x.max())
    if not x.is_floating_point() or low < 0 or high > 1:
        fix = "Scale them, and undo it inside the model."
        raise ValueError(f"--data {data} must hold inputs in [0, 1], real numbers; got {low:g} to {high:g}. {fix}")
    return x, y


def _class_numbers(labels: Any, data: str) -> Any:
    """Labels as whole numbers; names are numbered in sorted order."""
    import numpy as np

    if labels.dtype.kind in "US":
        return np.unique(labels, return_inverse=True)[1]
    if labels.dtype.kind not in "iu" or labels.ndim != 1:
        raise ValueError(f"--data {data} must hold labels, whole numbers [N]; got {labels.dtype} {list(labels.shape)}")
    return labels.astype(np.int64)


def _moved(model: Any, device: Any) -> Any:
    """A model on a device, where it is one that can be moved."""
    from torch import nn

    for part in model if isinstance(model, list | tuple) else [model]:
        if isinstance(part, nn.Module):
            part.to(device)
    return model


def fraction(text: str) -> float:
    """A number, or a fraction such as ``8/255``."""
    top, slash, bottom = text.partition("/")
    try:
        return float(top) / float(bottom) if slash else float(top)
    except (ValueError, ZeroDivisionError) as reason:
        raise ValueError(f"--epsilon must be a number or a fraction, such as 0.03 or 8/255; got {text}") from reason


def _check_options(network: str, options: dict[str, Any]) -> None:
    """Refuse options that a network of the studies does not have, and name those that it has."""
    from dissensus import checks
    from dissensus.studies.registry import NETWORKS, option_types
    from dissensus.studies.spec import checked_value

    types = option_types(network) if network in NETWORKS else {}
    known = list(types) if network in NETWORKS else list(options)
    for name, value in options.items():
        if name in types:
            checked_value(value, types[name], name, "--option")
        if name not in known:
            has = f"{network} has {', '.join(known)}" if known else f"{network} has none"
            raise ValueError(f"--option {name}: there is no such option; {has}. {checks.nearest(name, known)}".strip())


def _preparation(data: str, standardise: bool, is_fixed: bool) -> str:
    """How images are prepared for the ensemble, and the option for the other way."""
    if is_fixed:
        return f"Images go to the ensemble as they are, in [0, 1]: those of {data} are never standardised."
    if standardise:
        way, other = "standardised with the training data's mean and deviation", "--no-standardise: as they are"
    else:
        way, other = "as they are, in [0, 1]", "--standardise: with the training data's mean and deviation"
    return f"Images go to the ensemble {way} ({other})."


def _print(result: Any) -> None:
    from dissensus.attacks.page import NORMS

    colour = COLOURS["bad" if result.flags else "none"]
    words = [f"{result.sentence}.", *result.notes()]
    title = f"[bold {colour}]flags raised: {len(result.flags) or 'none'}[/bold {colour}]"
    console.print(Panel("\n".join(map(escape, words)), title=title, title_align="left", style=""))
    facts = result.facts
    ball = f"suite {facts['suite']}, ε = {facts['epsilon']:.4g} in {NORMS[facts['norm']]}, {facts['seconds']:,.0f} s"
    rows = [
        [escape(name), left, f"[dim]{interval}[/dim]", count, tried, seconds]
        for name, _, left, interval, count, tried, seconds in result.table()
    ]
    console.print(table(ball, ("attack", "accuracy", "95 % interval", "of", "attacked", "s"), rows, left=(0,)))
    columns = "accuracy: share still classified correctly; of: examples; attacked: those right until then; s: seconds"
    console.print(f"[dim]{columns}.[/dim]", highlight=False)
    for flag in result.flags:
        console.print(f"[red]{escape(flag.name)}[/red]: {escape(flag.seen)}", highlight=False)
    for advice in dict.fromkeys(flag.advice for flag in result.flags):
        console.print(f"[dim]→ {escape(advice)}[/dim]", highlight=False)
