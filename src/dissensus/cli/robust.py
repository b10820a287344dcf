"""`dissensus robust`: an ensemble's accuracy under attack, and whether the attacks can be trusted."""

import sys
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


def robust(
    ensemble: Annotated[Path, typer.Option(help="The folder that `Ensemble.save` wrote.")],
    data: Annotated[str, typer.Option(help="Images: mnist, fashion-mnist, cifar10, digits, ...")],
    epsilon: Annotated[
        str, typer.Option(help="The largest change: of every pixel (8/255 or 0.03), or in L2 of the whole image.")
    ],
    network: Annotated[
        str | None,
        typer.Option(
            help="The network of its members, one of the studies', such as resnet20 or cnn. cnn has batch norm unless "
            "--option batch_norm=false. Not needed if the ensemble was saved with an architecture."
        ),
    ] = None,
    trust: Annotated[
        list[str] | None,
        typer.Option(help="A package of yours whose function a stored architecture may call; repeatable."),
    ] = None,
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
        list[str] | None, typer.Option(help="An option of the network, such as widths=[8,16]; repeatable.")
    ] = None,
    surrogate: Annotated[
        Path | None, typer.Option(help="Folder of another ensemble of the same network, to craft examples on.")
    ] = None,
    standardise: Annotated[
        bool, typer.Option(help="Whether members were trained on images standardised by channel, as in studies.")
    ] = True,
    trained_on: Annotated[
        int | None,
        typer.Option(min=1, help="Number of training images that the standardisation was computed on; all by default."),
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
    from dissensus.studies import datasets, stored_ensembles

    where = torch_device(device)
    check_file("--json", json_file)
    check_drawn("--page", page)
    check_folder("--folder", folder)
    stored = [ensemble, *([] if surrogate is None else [surrogate])]
    stored += [file for place in stored for file in storage.files_of(place)]
    check_apart({"--json": json_file, "--page": page}, stored, folders={"--folder": folder})
    try:
        largest = fraction(epsilon)
        network_options = parsed_settings("--option", option or [], "width=64")
        if network is not None:
            _check_options(network, network_options)
        if trust and "" not in sys.path:
            sys.path.insert(0, "")  # modules of the working folder are found
        images = datasets.load_unscaled(data, train_examples=trained_on, seed=split_seed)
        building: Any = {"options": network_options, "standardise": standardise, "trust": trust or []}
        subject = stored_ensembles.load(ensemble, network, images, **building)
        other = None if surrogate is None else stored_ensembles.load(surrogate, network, images, **building).model
        is_fixed = datasets.is_split_by_seed(data)
        console.print(_preparation(data, standardise, is_fixed), style="dim", markup=False, highlight=False)
        choices: Any = {"suite": suite, "norm": norm, "pool": pool}
        with resumable(folder is not None), progress_bar() as bar:
            result = attacks.evaluate(
                subject.model.to(where),
                subject.data,
                attacks=attack or [],
                epsilon=largest,
                examples=examples,
                batch_size=batch_size,
                surrogate=None if other is None else other.to(where),
                folder=folder,
                seed=seed,
                progress=lambda name, share: bar.update(f"{data}: {name}", share),
                **choices,
            )
    except (ValueError, TypeError, OSError, ImportError, DataError) as reason:
        fail(in_options(said(reason), OPTIONS))
    result.facts["standardised"] = standardise and not is_fixed
    _print(result)
    if json_file is not None:
        write_file(json_file, (result.to_json() + "\n").encode())
    if page is not None:
        write_file(page, html(robustness_page(result, f"{ensemble.name} on {data}")).encode())
        print_place("Open", page)


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
    colour = COLOURS["bad" if result.flags else "none"]
    words = [f"{result.sentence}.", *result.notes()]
    title = f"[bold {colour}]flags raised: {len(result.flags) or 'none'}[/bold {colour}]"
    console.print(Panel("\n".join(map(escape, words)), title=title, title_align="left", style=""))
    facts = result.facts
    ball = f"suite {facts['suite']}, ε = {facts['epsilon']:.4g} in {facts['norm']}, {facts['seconds']:,.0f} s"
    rows = [
        [escape(name), left, f"[dim]{interval}[/dim]", count, tried, seconds]
        for name, _, left, interval, count, tried, seconds in result.table()
    ]
    console.print(table(ball, ("attack", "left", "95 % interval", "of", "tried", "s"), rows, left=(0,)))
    for flag in result.flags:
        console.print(f"[red]{escape(flag.name)}[/red]: {escape(flag.seen)}", highlight=False)
    for advice in dict.fromkeys(flag.advice for flag in result.flags):
        console.print(f"[dim]→ {escape(advice)}[/dim]", highlight=False)
