"""One page for an ensemble on a data set: what a team attaches to a model's release."""

from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import torch

import dissensus.reporting.classification as classification
import dissensus.reporting.regression as regression
from dissensus import checks
from dissensus.axes import PerExampleLoss, Pool
from dissensus.reporting.content import Content, shown_inputs
from dissensus.reporting.curves import as_columns, as_rows
from dissensus.reporting.judging import LIMITS, Finding, Limits, findings
from dissensus.reporting.measures import Measured, ShiftedResult
from dissensus.reporting.reading import ReportArguments, ReportData, read
from dissensus.reporting.record import Report

__all__ = ["LIMITS", "Finding", "Limits", "Report", "report"]

_READING = 0.6
"""Share of the work that computing outputs counts for."""


def report(
    ens: Any,
    data: Any,
    *,
    page: str | Path | None = None,
    task: Literal["classification", "regression"] | None = None,
    kind: Literal["logits", "probabilities"] | None = None,
    loss: str | PerExampleLoss | None = None,
    pool: Pool | None = None,
    shifted: Any = None,
    training: Any = None,
    names: Sequence[Any] | None = None,
    features: Sequence[str] | None = None,
    examples: int = 9,
    title: str = "",
    batch_size: int = 1024,
    limits: Limits = LIMITS,
    progress: Callable[[str, float], None] | None = None,
) -> Report:
    """Report on an ensemble: accuracy, calibration, refusal, uncertainty, examples, shifted data and the audit.

    Args:
        ens: An `Ensemble`; a module or callable ``x -> [M, B, ...]``; a list of models; a fitted scikit-learn ensemble;
            or outputs that are stored, ``[M, N, C]``.
        data: ``(x, y)``, a ``Dataset`` or a ``DataLoader``. For stored outputs the targets ``y``, or ``(x, y)`` with
            inputs that only illustrate examples.
        page: Where to write the page, one HTML file that needs no network.
        task: ``"classification"`` or ``"regression"``. By default that of `loss` or of the estimator, else
            classification where targets are names or whole numbers ``[N]``.
        kind: What a classifier's outputs are: ``"logits"`` (of an Ensemble, by default) or ``"probabilities"``.
        loss: The loss that members were trained on. For regression it says what outputs are: ``"squared_error"``
            (default) or ``"mse"`` values, ``"gaussian_nll"`` means and log-variances, ``"quantile"`` quantiles, for
            other levels ``partial(dissensus.losses.quantile, levels=...)``.
        pool: How members become one prediction: ``"probability"`` (default for classes), ``"score"`` or ``"vote"``.
        shifted: Shifted data by name, ``{"noise": x}`` or ``{"noise": (x, y)}``; for stored outputs, outputs instead of
            ``x``. With targets, the report also says what the shift does to the predictions.
        training: Training data ``(x, y)``, or ``(outputs, y)`` for stored outputs. The audit then tells more.
        names: Names of the classes in the order of the columns, or of the targets of a regression.
        features: Names of the numbers of an input; those of a frame's columns by default.
        examples: How many of the hardest and of the most disputed examples are shown.
        title: The heading of the page.
        batch_size: Examples that go through a network at once.
        limits: Lines that answers are judged by.
        progress: Called with the name of the current step and the share of work that is done.

    >>> truth = torch.arange(60) % 3
    >>> noise = torch.randn(5, 60, 3, generator=torch.Generator().manual_seed(0))
    >>> result = report(noise + 3 * torch.eye(3)[truth], truth, kind="logits")
    >>> round(result.numbers["accuracy"].value, 2), result.findings[0].answer
    (1.0, 'better than a guess')
    """
    checks.count("examples", examples, 0)
    if not isinstance(limits, Limits):
        checks.refuse("limits", "be a dissensus.reporting.Limits", type(limits).__name__, error=TypeError)
    if progress is not None:
        checks.function("progress", progress, "(name, share)")
    tell = progress or (lambda *_: None)
    arguments = ReportArguments(ens, data, task, kind, loss, pool, shifted, training, names, features, batch_size)
    contents = read(arguments, lambda name, share: tell(name, _READING * share))
    room = classification if contents.settings.task == "classification" else regression
    measured = room.measured(contents, examples, lambda name, share: tell(name, _READING + (1 - _READING) * share))
    result = _record(contents, measured, limits, title)
    if page is not None:
        tell("the page", 0.95)
        result.page(page)
    tell("done", 1.0)
    return result


def _record(data: ReportData, measured: Measured, limits: Limits, title: str) -> Report:
    chosen = dict.fromkeys([*measured.hardest, *measured.disputed])
    curves: dict[str, Any] = {
        "calibration": as_rows(measured.calibration),
        "risk_coverage": {"best": measured.best_risk, **as_columns(measured.risk)},
        "uncertainty": {name: as_rows(bins) for name, bins in measured.uncertainty.items()},
        **{name: rows for name, rows in measured.tables.items() if name != "predictions"},
    }
    shown = {
        name: [measured.examples[row]._asdict() for row in rows]
        for name, rows in (("hardest", measured.hardest), ("disputed", measured.disputed))
    }
    return Report(
        _facts(data, title),
        findings(data, measured, limits),
        measured.numbers,
        measured.members,
        {name: _numbers_of(result) for name, result in measured.shifted.items()},
        curves,
        shown,
        measured.audit,
        Content(data.settings, data.classes, measured, shown_inputs(data, chosen)),
    )


def _numbers_of(result: ShiftedResult) -> dict[str, Any]:
    areas = {f"auroc: {name}": area for name, area in result.detection.items()}
    return {**result.numbers, **areas, "fpr_at_95": result.false_positives}


def _facts(data: ReportData, title: str) -> dict[str, Any]:
    settings, members = data.settings, len(data.outputs)
    facts: dict[str, Any] = {
        "title": title or ("Report on a model" if members == 1 else f"Report on an ensemble of {members} members"),
        "members": members,
        "examples": data.outputs.shape[1],
        "outputs": data.outputs.shape[2],
        "task": settings.task,
        "kind": settings.kind,
        "loss": settings.loss,
        "pool": settings.pool,
        "names": list(data.classes),
        "training": 0 if data.training is None else data.training.outputs.shape[1],
        "shifted": {name: part.outputs.shape[1] for name, part in data.shifted.items()},
        "dissensus": _version(),
        "torch": torch.__version__,
    }
    if settings.levels:
        facts["levels"] = list(settings.levels)
    return facts | dict(data.facts)


def _version() -> str:
    try:
        return version("dissensus")
    except PackageNotFoundError:
        return "unknown"
