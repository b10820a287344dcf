"""`dissensus ood`: which score finds examples from outside, and how well?"""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from dissensus.cli.screen import console, fail, table
from dissensus.storage import write_atomically


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
    from dissensus import metrics

    if kind not in ("logits", "probabilities"):
        fail(f"--kind must be logits or probabilities; got {kind}")
    sets = dict(_named(word) for word in outside)
    try:
        within = _scores(inside, kind)
        beyond = {name: _scores(file, kind) for name, file in sets.items()}
        told: dict[str, Any] = {"inside": str(inside), "kind": kind, "false_alarms": false_alarms, "sets": {}}
        told["thresholds"] = {name: metrics.threshold(scores, false_alarms) for name, scores in within.items()}
        for name, scores in beyond.items():
            told["sets"][name] = _judged(within, scores, repeats)
            _print(name, told["sets"][name], told["thresholds"], false_alarms)
        if json_file is not None:
            write_atomically(json_file, (json.dumps(told, indent=1) + "\n").encode())
        if figure is not None:
            from dissensus.studies import figures

            figures.save(figures.detection(within, beyond), figure)
            console.print(f"The figure is in {escape(str(figure))}", soft_wrap=True)
        if gallery is not None:
            _draw_gallery(dict(_named(word) for word in pictures or ()), {"within": within, **beyond}, gallery)
            console.print(f"The pictures are in {escape(str(gallery))}", soft_wrap=True)
    except (ValueError, TypeError, OSError, ImportError) as reason:
        fail(str(reason))


SHOWN = 6
"""Pictures of most and of least disagreement."""


def _draw_gallery(pictures: dict[str, Path], scores: dict[str, dict[str, Any]], file: Path) -> None:
    """The examples that members disagree on most and least, of every set that there are pictures of."""
    import numpy as np

    from dissensus.studies import figures

    if not pictures:
        raise ValueError("--gallery needs --pictures NAME=FILE.npy, the images of a set; `within` is the first one's")
    rows = []
    for name, path in pictures.items():
        if name not in scores:
            raise ValueError(f"--pictures names {name!r}, which is no set here: {', '.join(scores)}")
        held, order = np.load(path, mmap_mode="r", allow_pickle=False), scores[name]["predictive_diversity"].argsort()
        if held.ndim not in (3, 4) or len(held) != len(order):
            raise ValueError(f"{path} must hold {len(order)} images [N, C, H, W]; got {list(held.shape)}")
        for words, chosen in (("most", order.flip(0)[:SHOWN]), ("least", order[:SHOWN])):
            shown = [(_bytes(held[i]), f"example {i}") for i in chosen.tolist()]
            rows.append((f"{name}: {words} disagreement", shown))
    figures.save(figures.gallery(rows), file)


def _bytes(image: Any) -> Any:
    """An image ``[C, H, W]`` in bytes; floats are stretched from their least to their largest."""
    import numpy as np

    own = np.asarray(image)
    own = own[None] if own.ndim == 2 else own
    if own.dtype == np.uint8:
        return own
    low, high = float(own.min()), float(own.max())
    return ((own - low) / ((high - low) or 1.0) * 255).astype(np.uint8)


def _named(word: str) -> tuple[str, Path]:
    name, equals, file = word.partition("=")
    return (name, Path(file)) if equals else (Path(word).stem, Path(word))


def _scores(file: Path, kind: str) -> dict[str, Any]:
    """Scores of stored outputs, read slice by slice."""
    import torch

    from dissensus import scores
    from dissensus.auditing import reading
    from dissensus.auditing.streaming import Members

    found: dict[str, list[Any]] = {}
    for _, part in Members(reading.stored([file])["outputs"], str(file)).slices():
        for name, values in scores.table(part, kind="logits" if kind == "logits" else "probabilities").items():
            found.setdefault(name, []).append(values)
    return {name: torch.cat(parts).double() for name, parts in found.items()}


def _judged(within: dict[str, Any], beyond: dict[str, Any], repeats: int) -> dict[str, Any]:
    """Every score's worth, and its difference from the best one's."""
    from dissensus import metrics

    areas = {name: metrics.auroc(within[name], beyond[name]) for name in within}
    best = max(areas, key=lambda name: areas[name].value)
    rows: dict[str, Any] = {}
    for name, area in sorted(areas.items(), key=lambda item: -item[1].value):
        more = metrics.ood(within[name], beyond[name], repeats=repeats)
        behind = metrics.compared((within[name], beyond[name]), (within[best], beyond[best]))
        rows[name] = {"auroc": area, "aupr_out": more.aupr_out, "aupr_in": more.aupr_in, "fpr_at_95": more.fpr_at_95,
                      "behind_best": behind.difference.value, "p_value": behind.p_value}  # fmt: skip
    return {"best": best, "scores": rows}


def _print(name: str, found: dict[str, Any], thresholds: dict[str, float], false_alarms: float) -> None:
    rows = []
    for score, told in found["scores"].items():
        area, false = told["auroc"], told["fpr_at_95"]
        worse = "best" if score == found["best"] else f"p={told['p_value']:.1g}"
        rows.append([score.replace("_", " "), f"{area.value:.3f}", f"[dim]{area.low:.2f} to {area.high:.2f}[/dim]",
                     f"{false.value:.3f}", worse, f"{thresholds[score]:.3g}"])  # fmt: skip
    console.print(
        f"Thresholds are for {false_alarms:.0%} of false alarms; p is of a difference from the best (DeLong)."
    )
    header = ("score", "AUROC", "95 %", "FPR95", "vs best", "threshold")
    console.print(table(f"{name}: telling it from data within", header, rows, left=(0,)))
