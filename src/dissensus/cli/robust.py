"""`dissensus robust`: what attacks leave of an ensemble's accuracy, and whether they can be believed."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.panel import Panel

from dissensus.cli.screen import (
    check_drawn,
    check_file,
    check_folder,
    console,
    device_of,
    fail,
    resumable,
    shown,
    table,
    written,
)


def robust(
    ensemble: Annotated[Path, typer.Option(help="The folder that `Ensemble.save` wrote.")],
    network: Annotated[
        str,
        typer.Option(
            help="What its members are: a network of the studies, such as resnet20 or cnn, which has batch norm by "
            "default (without: --option batch_norm=false)."
        ),
    ],
    data: Annotated[str, typer.Option(help="Images: mnist, fashion-mnist, cifar10, digits, ...")],
    epsilon: Annotated[str, typer.Option(help="The largest change: 8/255 or 0.03 of a pixel; in L2 of the whole.")],
    suite: Annotated[str, typer.Option(help="standard, adaptive, paper (ADP's table 2) or quick.")] = "standard",
    attack: Annotated[
        list[str] | None,
        typer.Option(help="A further attack by its name, such as mim, run after the suite; repeatable."),
    ] = None,
    norm: Annotated[str, typer.Option(help="linf or l2.")] = "linf",
    pool: Annotated[str, typer.Option(help="How members become one: probability or score.")] = "probability",
    examples: Annotated[int, typer.Option(min=1, help="Only the first so many test images.")] = 1000,
    batch_size: Annotated[int, typer.Option(min=1, help="Examples at once.")] = 256,
    option: Annotated[
        list[str] | None, typer.Option(help="An option of the network, such as widths=[8,16]; repeatable.")
    ] = None,
    surrogate: Annotated[
        Path | None, typer.Option(help="Another ensemble's folder, of the same network, to craft examples on.")
    ] = None,
    standardise: Annotated[
        bool, typer.Option(help="Whether members were trained on images standardised by channel, as in studies.")
    ] = True,
    trained_on: Annotated[
        int | None,
        typer.Option(min=1, help="How many training images it saw, which the standardisation is of; else all."),
    ] = None,
    split_seed: Annotated[int, typer.Option(help="Of the test split, where the data has none of its own.")] = 0,
    seed: Annotated[int, typer.Option(help="Of random starts.")] = 0,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    folder: Annotated[
        Path | None, typer.Option(help="Keep what is finished there; the same call goes on where it was broken off.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write everything as JSON.")] = None,
    page: Annotated[Path | None, typer.Option(help="Write a page with figures.")] = None,
) -> None:
    """Attack an ensemble, report the pointwise worst case, and raise flags where the attacks look too weak.

    Images are in [0, 1], and ε is in these units. Standardisation is put inside the model.
    """
    from dissensus import attacks
    from dissensus.data.formats import DataError
    from dissensus.studies import datasets, stored_ensembles

    chosen = device_of(device)
    check_file("--json", json_file)
    check_drawn("--page", page)
    check_folder("--folder", folder)
    try:
        size, told = fraction(epsilon), _options(option or [])
        _check_options(network, told)
        problem = datasets.load_unscaled(data, train_examples=trained_on, seed=split_seed)
        standard: Any = {"options": told, "standardise": standardise}
        own = stored_ensembles.load(ensemble, network, problem, **standard)
        other = None if surrogate is None else stored_ensembles.load(surrogate, network, problem, **standard).model
        fixed = datasets.is_split_by_seed(data)
        console.print(_given(data, standardise, fixed), style="dim", markup=False, highlight=False)
        settings: Any = {"suite": suite, "norm": norm, "pool": pool}
        with resumable(folder is not None), shown() as bar:
            result = attacks.evaluate(
                own.model.to(chosen),
                own.data,
                epsilon=size,
                attacks=attack or [],
                examples=examples,
                batch_size=batch_size,
                surrogate=None if other is None else other.to(chosen),
                folder=folder,
                seed=seed,
                progress=lambda name, share: bar.update(f"{data}: {name}", share),
                **settings,
            )
    except (ValueError, TypeError, OSError, ImportError, DataError) as reason:
        fail(str(reason))
    result.facts["standardised"] = standardise and not fixed
    _print(result)

    def html() -> str:
        from dissensus.studies import robust_page

        return robust_page.html(result, f"{ensemble.name} on {data}")

    written(json_file, result.to_json, page, html)


def fraction(text: str) -> float:
    """A number, or a fraction such as ``8/255``."""
    top, slash, bottom = text.partition("/")
    try:
        return float(top) / float(bottom) if slash else float(top)
    except (ValueError, ZeroDivisionError) as reason:
        raise ValueError(f"--epsilon must be a number or a fraction, such as 0.03 or 8/255; got {text}") from reason


def _options(words: list[str]) -> dict[str, Any]:
    """``name=value`` with values as in TOML."""
    import tomllib

    found: dict[str, Any] = {}
    for word in words:
        try:
            found |= tomllib.loads(word)
        except tomllib.TOMLDecodeError as reason:
            raise ValueError(f"--option {word}: write it as name=value, such as width=64 ({reason})") from reason
    return found


def _check_options(network: str, options: dict[str, Any]) -> None:
    """Refuse options that a network of the studies does not have, and name those that it has."""
    from dissensus import checks
    from dissensus.studies.registry import NETWORKS, options_of

    known = options_of(network) if network in NETWORKS else list(options)
    for name in options:
        if name not in known:
            has = f"{network} has {', '.join(known)}" if known else f"{network} has none"
            raise ValueError(f"--option {name}: there is no such option; {has}. {checks.nearest(name, known)}".strip())


def _given(data: str, standardise: bool, fixed: bool) -> str:
    """How images are given to the ensemble, and how else they could be."""
    if fixed:
        return f"Images go to the ensemble as they are, in [0, 1]: those of {data} are never standardised."
    if standardise:
        way, other = "standardised with the training data's mean and deviation", "--no-standardise: as they are"
    else:
        way, other = "as they are, in [0, 1]", "--standardise: with the training data's mean and deviation"
    return f"Images go to the ensemble {way} ({other})."


def _print(result: Any) -> None:
    colour = "red" if result.flags else "cyan"
    words = [f"{result.sentence}.", *result.notes()]
    title = f"[bold {colour}]flags raised: {len(result.flags) or 'none'}[/bold {colour}]"
    console.print(Panel("\n".join(map(escape, words)), title=title, title_align="left", style=""))
    facts = result.facts
    ball = f"suite {facts['suite']}, ε = {facts['epsilon']:.4g} in {facts['norm']}, {facts['seconds']:,.0f} s"
    rows = []
    for name, _, left, span, count, tried, seconds in result.table():
        rows.append([escape(name), left, f"[dim]{span}[/dim]", count, tried, seconds])
    console.print(table(ball, ("attack", "left", "95 % interval", "of", "tried", "s"), rows, left=(0,)))
    for flag in result.flags:
        console.print(f"[red]{escape(flag.name)}[/red]: {escape(flag.seen)}", highlight=False)
    for advice in dict.fromkeys(flag.advice for flag in result.flags):
        console.print(f"[dim]→ {escape(advice)}[/dim]", highlight=False)
