"""`dissensus ood`: which score finds shifted examples, and how well?"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from dissensus.cli.models import load_model
from dissensus.cli.screen import (
    FIGURES,
    WRONG_USE,
    check_apart,
    check_drawn,
    check_file,
    console,
    errors,
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

WITHIN = "within"
"""The name of the first set, which the others are told from."""
KINDS = ("logits", "probabilities", "values", "gaussian", "quantiles")
"""Kinds of outputs, those of classes first. (The library's own, without the time that its import takes.)"""
OPTIONS = {"repeats": "--repeats", "false_alarms": "--false-alarms", "unpack_limit": "--unpack-limit"}
"""Options by the arguments of the library that they become."""


def ood(
    outside: Annotated[
        list[str],
        typer.Option(
            help="Member outputs on shifted data, as NAME=FILE (near=a.npz), or as FILE, whose name without its ending "
            "is then NAME; repeatable. With --model, shifted data itself."
        ),
    ],
    inside: Annotated[
        Path | None,
        typer.Argument(help="Member outputs [M, N, C] on data of the training distribution: .npy, .npz, ..."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Instead of stored outputs: a function that returns an Ensemble, a module or a callable "
            "x -> [M, B, ...], as package.module:function; modules of this folder are found."
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="With --model, data of the training distribution: .npz with x, a .parquet or .csv table, or a folder "
            "of images."
        ),
    ] = None,
    target: Annotated[str | None, typer.Option(help="The target's column of a table, which is left out.")] = None,
    image_size: Annotated[int, typer.Option(min=1, help="Height and width of images of a folder.")] = 224,
    batch_size: Annotated[int, typer.Option(min=1, help="Examples at once, with --model.")] = 1024,
    device: Annotated[str, typer.Option(help="cpu or cuda, with --model.")] = "cpu",
    kind: Annotated[
        str,
        typer.Option(
            help="What the outputs are: logits or probabilities of classes; values, gaussian (D means, then D "
            "log-variances) or quantiles (those of losses.quantile) of real targets."
        ),
    ] = "logits",
    false_alarms: Annotated[
        float, typer.Option(help="Share of examples of the first set that a threshold may flag.")
    ] = 0.05,
    repeats: Annotated[int, typer.Option(help="Number of bootstrap resamples.")] = 1000,
    unpack_limit: Annotated[
        float | None,
        typer.Option(help="Largest size of a compressed .npz when unpacked, in GB; half of the memory by default."),
    ] = None,
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
    """Compare scores of disagreement by how well each finds examples of shifted data.

    Shows AUROC with DeLong's interval, false positives at 95 % true positives, DeLong's test against the best score,
    and each score's threshold at the given share of false alarms.
    """
    if kind not in KINDS:
        fail(f"--kind must be {', '.join(KINDS[:-1])} or {KINDS[-1]}; got {kind}")
    first = data if model is not None else inside
    if (inside is None) == (model is None) or (model is None and data is not None) or first is None:
        fail("give INSIDE, or --model MODULE:FUNCTION with --data", WRONG_USE)
    where = torch_device(device) if model is not None else None
    check_file("--json", json_file)
    check_drawn("--figure", figure, FIGURES)
    check_drawn("--gallery", gallery, FIGURES)
    try:
        files = {WITHIN: first, **files_by_name("--outside", outside, reserved=(WITHIN,))}
        image_files = files_by_name("--pictures", pictures or [])
        places = {"--json": json_file, "--figure": figure, "--gallery": gallery}
        check_apart(places, [*files.values(), *image_files.values()])
        with progress_bar() as bar:
            if model is None:
                sets, inputs = _open_sets(files, unpack_limit), {}
            else:
                subject = load_model("--model", model, where)
                sets, inputs = _computed_sets(subject, files, target, image_size, batch_size, bar.update)
            images = {}
            if gallery is not None:
                images = inputs if inputs and not image_files else _open_images(image_files, sets)
            scores, comparison = _compare(sets, kind, false_alarms, repeats, bar.update)
    except (ValueError, TypeError, OSError, ImportError) as reason:
        fail(in_options(said(reason), OPTIONS))
    if json_file is not None:
        arguments = {
            "inside": str(first),
            **({"model": model} if model else {}),
            "kind": kind,
            "false_alarms": false_alarms,
        }
        write_file(json_file, (json.dumps({**arguments, **comparison}, indent=1) + "\n").encode())
    _print_sets(sets, "classes" if kind in KINDS[:2] else "outputs")
    for name, result in comparison["sets"].items():
        _print(name, result, comparison["thresholds"])
    _explain(false_alarms)
    _draw(scores, images, figure, gallery)


OnProgress = Callable[[str, float], None]
"""Called with the name of the current step and the share of work that is done."""


def _compare(
    sets: dict[str, Any], kind: str, false_alarms: float, repeats: int, on_progress: OnProgress
) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """Scores of every set, and how well they find it; thresholds are those of the first set."""
    from dissensus import metrics

    scores: dict[str, dict[str, Any]] = {}
    steps = 2 * len(sets) - 1
    for i, (name, members) in enumerate(sets.items()):
        on_progress(f"scores of {name}", i / steps)
        scores[name] = _scores(members, kind)
    thresholds = {name: metrics.threshold(values, false_alarms) for name, values in scores[WITHIN].items()}
    results = {}
    for i, name in enumerate(list(sets)[1:], len(sets)):

        def on_score(score: str, share: float, name: str = name, done: int = i) -> None:
            on_progress(f"intervals of {name}: {score.replace('_', ' ')}", (done + share) / steps)

        results[name] = _detection(scores[WITHIN], scores[name], repeats, on_score)
    return scores, {"sets": results, "thresholds": thresholds}


PICTURES_IN_A_ROW = 6


def _draw(scores: dict[str, dict[str, Any]], images: dict[str, Any], figure: Path | None, gallery: Path | None) -> None:
    """Write the figures that are asked for."""
    if figure is None and gallery is None:
        return
    try:
        from dissensus.pages import charts, figures, style

        if figure is not None:
            shifted = {name: values for name, values in scores.items() if name != WITHIN}
            curves = figures.detection(scores[WITHIN], shifted)
            write_file(figure, lambda file: style.save(curves, file))
            print_place("The figure is in", figure)
        if gallery is not None:
            rows = charts.gallery(_most_and_least(images, scores))
            write_file(gallery, lambda file: style.save(rows, file))
            print_place("The pictures are in", gallery)
    except (ValueError, ImportError) as reason:
        fail(said(reason))


def _most_and_least(
    images: dict[str, Any], scores: dict[str, dict[str, Any]]
) -> list[tuple[str, list[tuple[Any, str]]]]:
    """Rows of pictures that members disagree on most and least, for every set with images."""
    rows = []
    for name, pictures in images.items():
        order = scores[name]["predictive_diversity"].argsort()
        for which, places in (("most", order.flip(0)[:PICTURES_IN_A_ROW]), ("least", order[:PICTURES_IN_A_ROW])):
            row = [(_as_bytes(pictures[i]), f"example {i}") for i in places.tolist()]
            rows.append((f"{name}: {which} disagreement", row))
    return rows


def _open_images(files: dict[str, Path], sets: dict[str, Any]) -> dict[str, Any]:
    """Images of sets, one for every example; they are read when they are needed."""
    from dissensus.auditing import reading

    if not files:
        raise ValueError("--gallery needs --pictures NAME=FILE.npy, the images of a set; `within` is the first set")
    images = {}
    for name, path in files.items():
        if name not in sets:
            raise ValueError(f"--pictures names {name!r}, which is no set here: {', '.join(sets)}")
        if path.suffix != ".npy":
            raise ValueError(f"--pictures {path} must be one array in a .npy file; save it with numpy.save")
        images[name] = _checked_images(path, reading.read_array(path), sets[name].examples)
    return images


def _checked_images(path: Path, images: Any, count: int) -> Any:
    """Refuse anything but a finite grey or colour image for every example."""
    import numpy as np

    requirement = f"{path} must hold {count} images [N, C, H, W] of 1 or 3 channels, or [N, H, W], in numbers"
    if images.ndim not in (3, 4) or len(images) != count or images.dtype.kind not in "fiub":
        raise ValueError(f"{requirement}; got {list(images.shape)} {images.dtype}")
    if images.ndim == 4 and images.shape[1] not in (1, 3):
        fix = ". Channels last? Use numpy.moveaxis(images, -1, 1)" if images.shape[3] in (1, 3) else ""
        raise ValueError(f"{requirement}; got {list(images.shape)}{fix}")
    broken = next((i for i, image in enumerate(images) if not np.isfinite(image).all()), None)
    if broken is not None:
        raise ValueError(f"{path} must hold finite numbers; got NaN or infinity in image {broken}")
    return images


def _as_bytes(image: Any) -> Any:
    """An image ``[C, H, W]`` in bytes; floats are scaled so that they run from 0 to 255."""
    import numpy as np

    pixels = np.asarray(image)
    pixels = pixels[None] if pixels.ndim == 2 else pixels
    if pixels.dtype == np.uint8:
        return pixels
    low, high = float(pixels.min()), float(pixels.max())
    return ((pixels - low) / ((high - low) or 1.0) * 255).astype(np.uint8)


def _open_sets(files: dict[str, Path], unpack_limit: float | None = None) -> dict[str, Any]:
    """Stored outputs of all sets, with the same members and classes in each; they are read when they are needed."""
    from dissensus.auditing import reading
    from dissensus.auditing.streaming import OutputReader

    arrays = {name: reading.read_files([file], unpack_limit=unpack_limit) for name, file in files.items()}
    sets = {name: OutputReader(arrays[name]["outputs"], str(file)) for name, file in files.items()}
    _check_alike(sets, files)
    return sets


def _computed_sets(
    model: Any, files: dict[str, Path], target: str | None, image_size: int, batch_size: int, on_progress: OnProgress
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Outputs of a model on all sets, and the inputs of sets that are pictures."""
    from dissensus.auditing.streaming import OutputReader
    from dissensus.data.user_files import read_data
    from dissensus.reporting.reading import member_outputs

    sets: dict[str, Any] = {}
    images: dict[str, Any] = {}
    for name, path in files.items():
        own = read_data(path, target=target, image_size=image_size, labelled=False)
        inputs = own.tensors()[0]
        if not len(inputs):
            raise ValueError(f"{path} must hold at least one example; got none")

        def on_share(share: float, name: str = name) -> None:
            on_progress(f"outputs on {name}", share)

        sets[name] = OutputReader(member_outputs(model, inputs, batch_size, on_share), str(path))
        if inputs.ndim == _IMAGE_AXES and inputs.shape[1] in (1, 3):
            images[name] = inputs.numpy()
    _check_alike(sets, files)
    return sets, images


_IMAGE_AXES = 4


def _check_alike(sets: dict[str, Any], files: dict[str, Path]) -> None:
    """Refuse sets with other members or classes than the first."""
    first = sets[WITHIN]
    for name, members in sets.items():
        if (members.members, members.width) != (first.members, first.width):
            raise ValueError(
                f"{name!r} must have the members and classes of the set within, {_shape(first)}; got {_shape(members)} "
                f"in {files[name]}"
            )


def _print_sets(sets: dict[str, Any], columns: str) -> None:
    """Print how arrays were read, so that axes in the wrong order are noticed."""
    from dissensus.pages.parts import counted

    first = sets[WITHIN]
    examples = ", ".join(f"{members.examples:,} {name}" for name, members in sets.items())
    console.print(f"{counted(first.members, 'member')}, {first.width} {columns}, examples: {examples}", markup=False)
    if first.members > first.examples:
        words = f"there are more members than examples: arrays are [members, examples, {columns}]. Are examples first?"
        errors.print(f"note: {words} Use numpy.swapaxes(outputs, 0, 1).", markup=False, soft_wrap=True)


def _shape(members: Any) -> str:
    return f"[M={members.members}, N={members.examples}, C={members.width}]"


def _scores(members: Any, kind: str) -> dict[str, Any]:
    """Scores of stored outputs, read slice by slice."""
    import torch

    from dissensus import checks, scores

    takes = cast(scores.Takes, kind)
    if takes in KINDS[:2]:
        members.check_classes()
    slices: dict[str, list[Any]] = {}
    for _, part in members.slices():
        if takes == "logits":
            checks.member_logits(part, members.name, "Say --kind probabilities.")
        elif takes == "probabilities":
            checks.member_probs(part, members.name, "Logits? Say --kind logits.")
        for name, values in scores.table(part, kind=takes).items():
            slices.setdefault(name, []).append(values)
    return {name: torch.cat(parts).double() for name, parts in slices.items()}


def _detection(
    inside: dict[str, Any], outside: dict[str, Any], repeats: int, on_progress: OnProgress
) -> dict[str, Any]:
    """How well every score finds a set, and its difference from the best score."""
    from dissensus import metrics

    areas = {name: metrics.auroc(inside[name], outside[name]) for name in inside}
    best = max(areas, key=lambda name: areas[name].value)
    rows: dict[str, Any] = {}
    for name, area in sorted(areas.items(), key=lambda item: -item[1].value):
        on_progress(name, len(rows) / len(areas))
        rates = metrics.ood(inside[name], outside[name], repeats=repeats)
        behind = metrics.compared((inside[name], outside[name]), (inside[best], outside[best]))
        rows[name] = {
            "auroc": area,
            "aupr_out": rates.aupr_out,
            "aupr_in": rates.aupr_in,
            "fpr_at_95": rates.fpr_at_95,
            "behind_best": behind.difference.value,
            "p_value": behind.p_value,
        }
    return {"best": best, "scores": rows}


def _print(name: str, result: dict[str, Any], thresholds: dict[str, float]) -> None:
    rows = []
    for score, row in result["scores"].items():
        area = row["auroc"]
        rows.append(
            [
                score.replace("_", " "),
                f"{area.value:.3f}",
                f"[dim]{area.low:.2f} to {area.high:.2f}[/dim]",
                f"{row['fpr_at_95'].value:.3f}",
                "best" if score == result["best"] else f"p={row['p_value']:.1g}",
                f"{thresholds[score]:.3g}",
            ]
        )
    header = ("score", "AUROC", "95 %", "FPR95", "vs best", "threshold")
    console.print(table(f"{name}: how well each score tells it from the first set", header, rows, left=(0,)))


def _explain(false_alarms: float) -> None:
    """Print what the columns hold."""
    notes = (
        "AUROC: the chance that a shifted example scores higher than one of the first set; FPR95: share of shifted "
        "examples that are missed where 95 % of the first set pass; vs best: p tests the difference from the best "
        f"score (DeLong); threshold: flags {false_alarms:.0%} of the first set"
    )
    console.print(f"[dim]{notes}.[/dim]", highlight=False)
