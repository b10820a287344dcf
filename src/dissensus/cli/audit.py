"""`dissensus audit`: is this ensemble's diversity real?"""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.panel import Panel

from dissensus.cli.screen import check_drawn, check_file, console, fail, keep, table

COLOURS = {"good": "green", "fair": "yellow", "none": "cyan", "bad": "red"}
"""By the kind of news that a verdict is."""


def audit(
    files: Annotated[
        list[Path],
        typer.Argument(
            help="One .npz or .safetensors (arrays `outputs` [M, N, C] and `targets`), one .npy, or one "
            ".npy, .csv or .parquet per member."
        ),
    ],
    task: Annotated[str, typer.Option(help="classification or regression.")],
    kind: Annotated[
        str | None,
        typer.Option(help="What a classifier's outputs are: logits, probabilities, or labels (hard votes [M, N])."),
    ] = None,
    classes: Annotated[str | None, typer.Option(help="The labels of the columns, in their order: ant,bee,cat.")] = None,
    targets: Annotated[Path | None, typer.Option(help="Labels or values: .npy, .csv or .parquet.")] = None,
    train: Annotated[
        Path | None, typer.Option(help="Outputs on training data: .npz or .safetensors with `outputs`, `targets`.")
    ] = None,
    in_bag: Annotated[
        str | None,
        typer.Option(
            "--in-bag", help="Which training examples each member was trained on: all, or a .npy mask [M, N]."
        ),
    ] = None,
    groups: Annotated[
        Path | None, typer.Option(help="What belongs together (patients, series), one for each example: .npy or .csv.")
    ] = None,
    reference: Annotated[
        Path | None, typer.Option(help="Outputs of an independently trained ensemble on the same examples.")
    ] = None,
    ood: Annotated[Path | None, typer.Option(help="Outputs on shifted data.")] = None,
    loss: Annotated[str | None, typer.Option(help="cross_entropy, brier or zero_one; mse for regression.")] = None,
    pool: Annotated[str | None, typer.Option(help="probability, score or vote.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write everything as JSON.")] = None,
    page: Annotated[Path | None, typer.Option(help="Write a page with figures.")] = None,
    fail_on: Annotated[
        list[str] | None, typer.Option("--fail-on", help="Leave with code 3 at this verdict; repeatable.")
    ] = None,
) -> None:
    """Judge an ensemble by its members' outputs.

    Verdicts: healthy, redundant, dominated, collusive, unskilled or undecided.

    Codes: 0 when the verdict is none of `--fail-on`, 3 when it is one, 1 or 2 when something is wrong with the call.
    """
    import dissensus as ds
    from dissensus.auditing import reading
    from dissensus.auditing.judging import VERDICTS

    for verdict in fail_on or []:
        if verdict not in VERDICTS:
            fail(f"--fail-on must be one of {', '.join(VERDICTS)}; got {verdict}")
    check_file("--json", json_file)
    check_drawn("--page", page)
    try:
        held = reading.read_files(files)
        wanted = reading.read_array(targets) if targets is not None else held.get("targets")
        if wanted is None:
            fail("there are no targets: give --targets FILE, or a .npz with an array `targets`")
        settings: dict[str, Any] = {
            "task": task,
            "kind": kind,
            "classes": _names(classes),
            "loss": loss,
            "pool": pool,
            "train": _train(held, train),
            "in_bag": _in_bag(held, in_bag),
            "groups": reading.read_array(groups) if groups is not None else held.get("groups"),
            "reference": _more(held, "reference", reference),
            "ood": _more(held, "ood", ood),
        }
        result = ds.audit(held["outputs"], wanted, **settings)
    except (ValueError, TypeError, OSError) as reason:
        fail(str(reason))
    _print(result)
    if json_file is not None:
        keep(json_file, (result.to_json() + "\n").encode())
    if page is not None:
        keep(page, lambda file: result.page(file, files[0].stem))
        console.print(f"Open [bold]{escape(str(page))}[/bold]", soft_wrap=True)
    if result.verdict in (fail_on or []):
        raise typer.Exit(3)


def _names(text: str | None) -> list[Any] | None:
    """Names between commas; whole numbers where all of them are."""
    if text is None:
        return None
    words = [word.strip() for word in text.split(",")]
    return [int(word) for word in words] if all(word.lstrip("-").isdecimal() for word in words) else words


def _train(held: dict[str, Any], file: Path | None) -> tuple[Any, Any] | None:
    from dissensus.auditing import reading

    if file is not None:
        found = reading.read_files([file])
        if "targets" not in found:
            raise reading.ReadingError(f"{file} has no array `targets` beside `outputs`")
        return found["outputs"], found["targets"]
    parts = [held.get("train_outputs"), held.get("train_targets")]
    if (parts[0] is None) != (parts[1] is None):
        raise reading.ReadingError("`train_outputs` and `train_targets` must both be there, or neither")
    return None if parts[0] is None else (parts[0], parts[1])


def _in_bag(held: dict[str, Any], given: str | None) -> Any:
    from dissensus.auditing import reading

    if given is None:
        return held.get("train_in_bag")
    return given if given == "all" else reading.read_array(given)


def _more(held: dict[str, Any], name: str, file: Path | None) -> Any:
    from dissensus.auditing import reading

    return reading.read_files([file])["outputs"] if file is not None else held.get(name)


def _print(result: Any) -> None:
    from dissensus.auditing.page import KINDS

    colour = COLOURS[KINDS[result.verdict]]
    judgement = result.judgement
    lines = ["; ".join(judgement.reasons) + ".", *judgement.advice]
    if judgement.confidence:
        lines.append(f"Confidence: {judgement.confidence}.")
    words = "\n".join(escape(line) for line in lines)
    console.print(Panel(words, title=f"[bold {colour}]{result.verdict}[/bold {colour}]", title_align="left", style=""))
    if judgement.evidence:
        asked = [[escape(item.question), item.answer, escape(item.numbers())] for item in judgement.evidence]
        console.print(table("what was asked", ("question", "answer", "numbers"), asked, left=(0, 2)))
    facts = result.facts
    extra = [name for name in ("train", "reference") if getattr(result, name) is not None]
    rows, group = [], ""
    for finding in result.findings:
        if finding["group"] != group:
            group = finding["group"]
            rows.append([f"[bold]{escape(group)}[/bold]", "", "", *[""] * len(extra)])
        low, high = finding["low"], finding["high"]
        span = f"{low:.3g} to {high:.3g}" if low is not None and high is not None else ""
        others = [_value(finding[name]) if name in finding else "" for name in extra]
        rows.append([f"  {escape(finding['title'])}", _value(finding), f"[dim]{span}[/dim]", *others])
    title = f"{facts['members']} members, {facts['examples']:,} examples, {facts['outputs']} outputs"
    console.print(table(title, ("figure", "test", "95 % interval", *extra), rows, left=(0,)))
    if result.detection:
        shown = [
            [escape(n), f"{f.value:.3f}", f"[dim]{f.low:.3f} to {f.high:.3f}[/dim]"]
            for n, f in result.detection.items()
        ]
        console.print(table("telling shifted data apart", ("score", "ROC area", "95 % interval"), shown, left=(0,)))


def _value(numbers: dict[str, Any]) -> str:
    return "" if numbers["value"] is None else f"{numbers['value']:.4g}"
