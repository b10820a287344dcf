"""`dissensus ood`: which score finds examples from outside, and how well?"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from dissensus.cli.screen import FIGURES, check_drawn, check_file, console, errors, fail, keep, shown, table

WITHIN = "within"
"""The name of the set that others are told from."""


def ood(
    inside: Annotated[Path, typer.Argument(help="Member outputs [M, N, C] on data from within: .npy, .npz, ...")],
    outside: Annotated[
        list[str], typer.Option(help="Outputs on data from outside, as NAME=FILE (near=a.npz); repeatable.")
    ],
    kind: Annotated[str, typer.Option(help="What outputs are: logits or probabilities.")] = "logits",
    false_alarms: Annotated[float, typer.Option(help="Share of examples from within that may be called out.")] = 0.05,
    repeats: Annotated[int, typer.Option(help="Bootstrap resamples.")] = 1000,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write everything as JSON.")] = None,
    figure: Annotated[Path | None, typer.Option(help="Write histograms and ROC curves: .png, .pdf or .svg.")] = None,
    pictures: Annotated[
        list[str] | None,
        typer.Option(help="Images [N, C, H, W] or [N, H, W] of a set, as NAME=FILE.npy (within=x.npy); repeatable."),
    ] = None,
    gallery: Annotated[
        Path | None, typer.Option(help="Write the pictures of most and least disagreement: .png, .pdf or .svg.")
    ] = None,
) -> None:
    """Score examples by every way there is to read disagreement, and tell how well each finds those from outside.

    AUROC with DeLong's interval, false positives at 95 %, and whether a score is worse than the best one by DeLong's
    test; and the threshold of each score for the share of false alarms that is asked for.
    """
    if kind not in ("logits", "probabilities"):
        fail(f"--kind must be logits or probabilities; got {kind}")
    check_file("--json", json_file)
    check_drawn("--figure", figure, FIGURES)
    check_drawn("--gallery", gallery, FIGURES)
    try:
        sets = _opened({WITHIN: inside, **_named("--outside", outside, taken=(WITHIN,))})
        images = _images(_named("--pictures", pictures or []), sets) if gallery is not None else {}
        with shown() as bar:
            scores, told = _worked(sets, kind, false_alarms, repeats, bar.update)
    except (ValueError, TypeError, OSError, ImportError) as reason:
        fail(str(reason))
    _print_sets(sets)
    for name, found in told["sets"].items():
        _print(name, found, told["thresholds"], false_alarms)
    if json_file is not None:
        own = {"inside": str(inside), "kind": kind, "false_alarms": false_alarms}
        keep(json_file, (json.dumps({**own, **told}, indent=1) + "\n").encode())
    _draw(scores, images, figure, gallery)


Progress = Callable[[str, float], None]
"""Called with what is being done and the share of work that is done."""


def _worked(
    sets: dict[str, Any], kind: str, false_alarms: float, repeats: int, progress: Progress
) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """Scores of every set, and what they are worth; thresholds are of the data within."""
    from dissensus import metrics

    scores: dict[str, dict[str, Any]] = {}
    pieces = 2 * len(sets) - 1
    for i, (name, members) in enumerate(sets.items()):
        progress(f"scores of {name}", i / pieces)
        scores[name] = _scores(members, kind)
    within, judged = scores[WITHIN], {}
    thresholds = {name: metrics.threshold(values, false_alarms) for name, values in within.items()}
    for i, name in enumerate(list(sets)[1:], len(sets)):

        def on_score(score: str, share: float, name: str = name, done: int = i) -> None:
            progress(f"intervals of {name}: {score.replace('_', ' ')}", (done + share) / pieces)

        judged[name] = _judged(within, scores[name], repeats, on_score)
    return scores, {"sets": judged, "thresholds": thresholds}


SHOWN = 6
"""Pictures of most and of least disagreement."""


def _draw(scores: dict[str, dict[str, Any]], images: dict[str, Any], figure: Path | None, gallery: Path | None) -> None:
    """Write the figures that are asked for."""
    if figure is None and gallery is None:
        return
    try:
        from dissensus.pages import figures

        if figure is not None:
            drawn = figures.detection(scores[WITHIN], {name: own for name, own in scores.items() if name != WITHIN})
            keep(figure, lambda file: figures.save(drawn, file))
            console.print(f"The figure is in {escape(str(figure))}", soft_wrap=True)
        if gallery is not None:
            rows = figures.gallery(_chosen(images, scores))
            keep(gallery, lambda file: figures.save(rows, file))
            console.print(f"The pictures are in {escape(str(gallery))}", soft_wrap=True)
    except (ValueError, ImportError) as reason:
        fail(str(reason))


def _chosen(images: dict[str, Any], scores: dict[str, dict[str, Any]]) -> list[tuple[str, list[tuple[Any, str]]]]:
    """The examples that members disagree on most and least, of every set that there are pictures of."""
    rows = []
    for name, held in images.items():
        order = scores[name]["predictive_diversity"].argsort()
        for words, chosen in (("most", order.flip(0)[:SHOWN]), ("least", order[:SHOWN])):
            pictures = [(_bytes(held[i]), f"example {i}") for i in chosen.tolist()]
            rows.append((f"{name}: {words} disagreement", pictures))
    return rows


def _images(files: dict[str, Path], sets: dict[str, Any]) -> dict[str, Any]:
    """Pictures of sets, not yet read, one for every example."""
    from dissensus.auditing import reading

    if not files:
        raise ValueError("--gallery needs --pictures NAME=FILE.npy, the images of a set; `within` is the first one's")
    found = {}
    for name, path in files.items():
        if name not in sets:
            raise ValueError(f"--pictures names {name!r}, which is no set here: {', '.join(sets)}")
        if path.suffix != ".npy":
            raise ValueError(f"--pictures {path} must be one array in a .npy file; save it with numpy.save")
        found[name] = _checked_images(path, reading.read_array(path), sets[name].examples)
    return found


def _checked_images(path: Path, held: Any, count: int) -> Any:
    """Refuse what is no grey or coloured image of every example."""
    import numpy as np

    wanted = f"{path} must hold {count} images [N, C, H, W] of 1 or 3 channels, or [N, H, W], in numbers"
    if held.ndim not in (3, 4) or len(held) != count or held.dtype.kind not in "fiub":
        raise ValueError(f"{wanted}; got {list(held.shape)} {held.dtype}")
    if held.ndim == 4 and held.shape[1] not in (1, 3):
        last = held.shape[3] in (1, 3)
        fix = ". Channels last? Use numpy.moveaxis(images, -1, 1)" if last else ""
        raise ValueError(f"{wanted}; got {list(held.shape)}{fix}")
    broken = next((i for i, image in enumerate(held) if not np.isfinite(image).all()), None)
    if broken is not None:
        raise ValueError(f"{path} must hold finite numbers; got NaN or infinity in image {broken}")
    return held


def _bytes(image: Any) -> Any:
    """An image ``[C, H, W]`` in bytes; floats are stretched from their least to their largest."""
    import numpy as np

    own = np.asarray(image)
    own = own[None] if own.ndim == 2 else own
    if own.dtype == np.uint8:
        return own
    low, high = float(own.min()), float(own.max())
    return ((own - low) / ((high - low) or 1.0) * 255).astype(np.uint8)


def _named(option: str, words: list[str], taken: tuple[str, ...] = ()) -> dict[str, Path]:
    """Files by the names that are given to them; no name is given twice."""
    found: dict[str, Path] = {}
    for word in words:
        name, equals, file = word.partition("=")
        name, path = (name, Path(file)) if equals else (Path(word).stem, Path(word))
        if not name or (equals and not file):
            raise ValueError(f"{option} {word}: write it as NAME=FILE")
        if name in taken:
            raise ValueError(f"{option} {word}: the name {name!r} is taken by the first set; give another one")
        if name in found:
            raise ValueError(f"{option} names {name!r} twice: {found[name]} and {path}; give each its own NAME=FILE")
        found[name] = path
    return found


def _opened(files: dict[str, Path]) -> dict[str, Any]:
    """Stored outputs of all sets, not yet read; members and classes are as many in each."""
    from dissensus.auditing import reading
    from dissensus.auditing.streaming import OutputReader

    sets = {name: OutputReader(reading.read_files([file])["outputs"], str(file)) for name, file in files.items()}
    first = sets[WITHIN]
    for name, own in sets.items():
        if (own.members, own.width) != (first.members, first.width):
            raise ValueError(
                f"{name!r} must have the members and classes of the set within, {_shape(first)}; got {_shape(own)} "
                f"in {files[name]}"
            )
    return sets


def _print_sets(sets: dict[str, Any]) -> None:
    """How arrays were read, so that axes in another order are seen."""
    first = sets[WITHIN]
    examples = ", ".join(f"{own.examples:,} {name}" for name, own in sets.items())
    console.print(f"{first.members} members, {first.width} classes, examples: {examples}", markup=False)
    if first.members > first.examples:
        words = "there are more members than examples: arrays are [members, examples, classes]. Are examples first?"
        errors.print(f"note: {words} Use numpy.swapaxes(outputs, 0, 1).", markup=False, soft_wrap=True)


def _shape(own: Any) -> str:
    return f"[M={own.members}, N={own.examples}, C={own.width}]"


def _scores(members: Any, kind: str) -> dict[str, Any]:
    """Scores of stored outputs, read slice by slice."""
    import torch

    from dissensus import checks, scores

    members.check_classes()
    check = checks.member_logits if kind == "logits" else checks.member_probs
    fix = "Say --kind probabilities." if kind == "logits" else "Logits? Say --kind logits."
    found: dict[str, list[Any]] = {}
    for _, part in members.slices():
        check(part, members.name, fix)
        for name, values in scores.table(part, kind="logits" if kind == "logits" else "probabilities").items():
            found.setdefault(name, []).append(values)
    return {name: torch.cat(parts).double() for name, parts in found.items()}


def _judged(within: dict[str, Any], beyond: dict[str, Any], repeats: int, progress: Progress) -> dict[str, Any]:
    """Every score's worth, and its difference from the best one's."""
    from dissensus import metrics

    areas = {name: metrics.auroc(within[name], beyond[name]) for name in within}
    best = max(areas, key=lambda name: areas[name].value)
    rows: dict[str, Any] = {}
    for name, area in sorted(areas.items(), key=lambda item: -item[1].value):
        progress(name, len(rows) / len(areas))
        more = metrics.ood(within[name], beyond[name], repeats=repeats)
        behind = metrics.compared((within[name], beyond[name]), (within[best], beyond[best]))
        rows[name] = {
            "auroc": area,
            "aupr_out": more.aupr_out,
            "aupr_in": more.aupr_in,
            "fpr_at_95": more.fpr_at_95,
            "behind_best": behind.difference.value,
            "p_value": behind.p_value,
        }
    return {"best": best, "scores": rows}


def _print(name: str, found: dict[str, Any], thresholds: dict[str, float], false_alarms: float) -> None:
    rows = []
    for score, told in found["scores"].items():
        area, false = told["auroc"], told["fpr_at_95"]
        worse = "best" if score == found["best"] else f"p={told['p_value']:.1g}"
        rows.append(
            [
                score.replace("_", " "),
                f"{area.value:.3f}",
                f"[dim]{area.low:.2f} to {area.high:.2f}[/dim]",
                f"{false.value:.3f}",
                worse,
                f"{thresholds[score]:.3g}",
            ]
        )
    console.print(
        f"Thresholds are for {false_alarms:.0%} of false alarms; p is of a difference from the best (DeLong)."
    )
    header = ("score", "AUROC", "95 %", "FPR95", "vs best", "threshold")
    console.print(table(f"{name}: telling it from data within", header, rows, left=(0,)))
