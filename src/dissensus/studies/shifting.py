"""The procedures "detect", "generalise" and "timing": several methods, measured on data they were not trained on."""

import base64
import json
import statistics
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dissensus import objectives, pooling, scores, train
from dissensus.ensemble import Ensemble
from dissensus.studies import rows as rows_of
from dissensus.studies import shift_measures
from dissensus.studies.backbones import head, ready
from dissensus.studies.optimising import training_arguments
from dissensus.studies.problems import Problem
from dissensus.studies.registry import HEADS, METHODS, NETWORKS, MethodError, maker, objective_with, options_of
from dissensus.studies.shift_measures import AUDITED, OURS, SOUP, Seen
from dissensus.studies.shifts import CONFIDENCE, Shifted, shifted
from dissensus.studies.spec import Spec
from dissensus.train import History, Progress, TrainingDiverged, fit
from dissensus.train.grid import points

SHOWN = 5
"""Pictures of most and of least disagreement that are kept."""
RANGES: dict[str, tuple[float, float]] = {
    "lr": (0.1, 1.0),
    "weight_decay": (0.1, 10.0),
    "smoothing": (0.0, 0.1),
    "initial_scale": (0.5, 2.0),
}
"""What diverse hyperparameters are drawn from; rate and decay in those of the study."""
FIRST = 1000
"""Added to the seed of the network that chooses examples in two stages."""

Say = Callable[[str, float], None]


def rows(spec: Spec, seeds: tuple[int, ...], name: str, own: Path, device: torch.device, say: Say) -> list[Any]:
    """Train and measure every point of the grid on a data set."""
    assert spec.members is not None
    grid = points({**spec.grid, "seed": list(seeds)})
    told = [told_of(spec, point) for point in grid]
    wanted = [str(one["unlabelled"]) for one in told if one.get("unlabelled")]
    others = [other for other in dict.fromkeys(wanted) if not CONFIDENCE.fullmatch(other)]
    raw = shifted(name, spec, shift_measures.sets_of(spec.evaluation.measures), others)
    say("preparing the data", 0.0)
    data = _Ready(raw, spec, device, own.parents[3] / "features")  # beside all studies
    found: list[dict[str, Any]] = []
    references: dict[tuple[object, ...], Tensor] = {}
    for number, (point, one) in enumerate(zip(grid, told, strict=True)):
        title = ", ".join(str(value) for value in point.values())
        on_progress = partial(_say, say, f"{number + 1} of {len(grid)}, {title}", number / len(grid), 1 / len(grid))
        done = _trained(spec, one, point, number, data.of(one), device, on_progress)
        found.append(_row(spec, one, done, data.of(one), raw, own, references))
    _leave(data.any(), raw, own)
    return found


def told_of(spec: Spec, point: dict[str, Any]) -> dict[str, Any]:
    """What a point of the grid trains: the study's options, the method's, the point's own."""
    assert spec.members is not None
    assert spec.objective is not None
    options = {key: value for key, value in spec.objective.options.items() if key != METHODS}
    methods = spec.objective.options.get(METHODS, {})
    name = point.get("method", "")
    if name and name not in methods:
        raise MethodError(f"grid.method names {name!r}, which {METHODS} do not hold: {', '.join(methods)}")
    told = {"objective": spec.objective.name, "members": spec.members.count, **spec.members.options, **options}
    return {**told, **methods.get(name, {}), **{key: v for key, v in point.items() if key not in ("method", "seed")}}


class _Ready:
    """Inputs as networks take them, prepared once per backbone."""

    def __init__(self, raw: Shifted, spec: Spec, device: torch.device, cache: Path) -> None:
        self.raw, self.spec, self.device, self.cache = raw, spec, device, cache
        self.known: dict[str, Shifted] = {}

    def of(self, told: dict[str, Any]) -> Shifted:
        """For a method."""
        key = str(told.get("backbone", ""))
        if key not in self.known:
            self.known[key] = ready(self.raw, self.spec, told, self.device, self.cache)
        return self.known[key]

    def any(self) -> Shifted:
        """For whatever does not look at inputs."""
        return next(iter(self.known.values()))


def _say(say: Say, title: str, done: float, share: float, moment: Progress) -> None:
    say(f"{title}: {moment}", done + share * moment.step / moment.steps)


def build_of(spec: Spec, told: dict[str, Any], problem: Problem) -> Callable[[], nn.Module]:
    """The function that builds a member."""
    assert spec.members is not None
    if spec.members.network == HEADS:
        return partial(head, problem.shape[0], problem.outputs, int(told.get("layers", 2)))
    name, options = spec.members.network, dict(spec.members.options)
    if name in NETWORKS:
        options |= {key: told[key] for key in options_of(name) if key in told}
    return maker(name, problem, {key: value for key, value in options.items() if key not in ("backbone", "layers")})


def _trained(
    spec: Spec,
    told: dict[str, Any],
    point: dict[str, Any],
    number: int,
    data: Shifted,
    device: torch.device,
    on_progress: Callable[[Progress], None],
) -> rows_of.Done:
    problem, seed, members = data.problem(), int(point["seed"]), int(told["members"])
    ensemble = Ensemble(build_of(spec, told, problem), members, seed=seed).to(device)
    settings = training_arguments(spec.optimisation, point)
    smoothing: dict[str, Any] = {}
    if told.get("diverse"):
        scale = {key: settings[key] for key in ("lr", "weight_decay")}
        ranges = {
            key: (RANGES[key][0] * scale.get(key, 1.0), RANGES[key][1] * scale.get(key, 1.0)) for key in told["diverse"]
        }
        drawn = train.drawn_hyperparameters(members, seed, **ranges)
        train.scale_weights(ensemble, drawn.pop("initial_scale", 1.0))
        smoothing = {"smoothing": drawn.pop("smoothing")} if "smoothing" in drawn else {}
        settings |= drawn
    labelled, unlabelled = _to_disagree_on(spec, told, problem, data, point, device)
    sampled = int(told.get("sampled", members))
    objective = partial(objective_with(str(told["objective"]), {"loss": "cross_entropy", **told}), **smoothing)
    status = "done"
    try:
        history = fit(
            ensemble,
            labelled,
            objective,
            unlabelled=unlabelled,
            active_members=sampled if sampled < members else None,
            sequential=bool(told.get("sequential")),
            seed=seed,
            progress=on_progress,
            **settings,
        )
    except TrainingDiverged as reason:
        history, status = reason.history, "failed"
    return rows_of.Done(number, point, ensemble, history, status)


def _to_disagree_on(
    spec: Spec, told: dict[str, Any], problem: Problem, data: Shifted, point: dict[str, Any], device: torch.device
) -> tuple[tuple[Tensor, Tensor], Tensor | None]:
    """What is fitted, and what is disagreed on: another set, or training examples that a first network finds hard."""
    name = told.get("unlabelled")
    if not name:
        return problem.train, None
    chosen = CONFIDENCE.fullmatch(str(name))
    if chosen is None:
        other = data.disagreed_on[str(name)]
        assert isinstance(other, Tensor)
        return problem.train, other
    seed = int(point["seed"]) + FIRST
    first = Ensemble(build_of(spec, told, problem), 1, seed=seed).to(device)
    alone = partial(objectives.independent, loss="cross_entropy")
    fit(first, problem.train, alone, seed=seed, **training_arguments(spec.optimisation, point))
    x, y = problem.train
    hard = train.low_confidence(first.predict(x)[0].log_softmax(-1), float(chosen[1]))
    if not 2 <= int(hard.sum()) < len(hard):
        share = f"{int(hard.sum())} of {len(hard)} training examples have a confidence below {chosen[1]}"
        raise MethodError(f"{share}: ask for another confidence")
    return (x[~hard], y[~hard]), x[hard]


def _row(
    spec: Spec,
    told: dict[str, Any],
    done: rows_of.Done,
    data: Shifted,
    raw: Shifted,
    own: Path,
    references: dict[tuple[object, ...], Tensor],
) -> dict[str, Any]:
    assert spec.objective is not None
    problem, ensemble = data.problem(), done.ensemble
    outputs = ensemble.predict(problem.test[0], file=own / f"outputs-{done.number:03d}.npy")
    others = {
        name: (ensemble.predict(x, file=own / f"outputs-{done.number:03d}-{name}.npy"), y)
        for name, (x, y) in data.sets.items()
        if isinstance(x, Tensor)
    }
    x, y = problem.train
    on_train = ensemble.predict(x[:AUDITED]), y[:AUDITED]
    key = (int(done.point["seed"]), ensemble.members, told.get("backbone"), told.get("layers"))
    audit = None
    if ensemble.members > 1 and done.status == "done":
        pool = spec.objective.pool
        audit = shift_measures.verdict(outputs, problem.test[1], pool, on_train, references.get(key))
    plain = told["objective"] == "independent" or told.get("strength") == 0
    if plain and done.status == "done" and not told.get("diverse"):
        references.setdefault(key, outputs)
    method = str(told["objective"])
    seen = Seen(
        outputs,
        problem.test[1],
        others,
        spec.objective.loss,
        spec.objective.pool,
        method,
        raw.groups,
        _soup(spec, ensemble, data),
        "" if audit is None else audit.verdict,
        _seconds_per_epoch(done.history),
    )
    row: dict[str, Any] = {
        "data": data.name,
        **{key: value for key, value in done.point.items() if key in spec.grid},
        "run": done.number,
        "status": done.status,
        "epochs": len(done.history.epochs),
        "members": ensemble.members,
        "objective": method,
        "measures": shift_measures.measured(spec.evaluation.measures, seen),
    }
    row |= {"seconds_per_epoch": seen.seconds_per_epoch} if "seconds_per_epoch" in row["measures"] else {}
    if audit is not None:
        row["audit"] = {"verdict": audit.verdict, "reasons": audit.judgement.reasons}
    if "seed" not in spec.grid:
        row["seed"] = int(done.point["seed"])
    return row


def _seconds_per_epoch(history: History) -> float:
    """The median over epochs but the first, which also chooses a backend and captures a graph."""
    at = [entry["seconds"] for entry in history.epochs]
    return statistics.median(b - a for a, b in pairwise(at)) if len(at) > 1 else float("nan")


def _soup(spec: Spec, ensemble: Ensemble, data: Shifted) -> dict[str, Tensor]:
    """Outputs of the averaged weights, where they are asked for."""
    wanted = [shift_measures.taken_apart(name) for name in spec.evaluation.measures]
    sets = [of for what, of in wanted if what == SOUP]
    if not sets:
        return {}
    problem = data.problem()
    one = Ensemble.from_modules([ensemble.soup(problem.train[0][:AUDITED])])
    inputs = {"": problem.test[0], **{name: x for name, (x, _) in data.sets.items()}}
    return {name: one.predict(inputs[name]) for name in sets}


def _leave(data: Shifted, raw: Shifted, own: Path) -> None:
    """Targets of all sets, and pictures of test data, for studies that measure the same trainings again."""
    labels = {"": data.problem().test[1], **{name: y for name, (_, y) in data.sets.items() if y is not None}}
    held: dict[str, Any] = {name or "test": y.numpy() for name, y in labels.items()}
    np.savez(own / "sets.npz", **held)
    if isinstance(raw.test[0], Tensor):
        np.save(own / "pictures.npy", (raw.test[0] * 255).round().to(torch.uint8).numpy())


def measured_again(spec: Spec, own: Path) -> list[dict[str, Any]]:
    """A unit's rows with this study's measures, from outputs that another study has kept."""
    assert spec.objective is not None
    labels = {name: torch.from_numpy(y) for name, y in np.load(own / "sets.npz").items()}
    kept = json.loads((own / "rows.json").read_text())
    wanted = shift_measures.sets_of(spec.evaluation.measures)
    methods = spec.grid.get("method")
    found: list[dict[str, Any]] = []
    for row in kept:
        if methods is not None and row.get("method") not in methods:
            continue
        outputs = torch.from_numpy(np.load(own / f"outputs-{row['run']:03d}.npy"))
        others = {
            name: (torch.from_numpy(np.load(own / f"outputs-{row['run']:03d}-{name}.npy")), labels.get(name))
            for name in wanted
            if (own / f"outputs-{row['run']:03d}-{name}.npy").exists()  # a set that this data has
        }
        seen = Seen(
            outputs,
            labels["test"],
            others,
            spec.objective.loss,
            spec.objective.pool,
            row["objective"],
            verdict=row.get("audit", {}).get("verdict", ""),
            seconds_per_epoch=row.get("seconds_per_epoch", np.nan),
        )
        row["measures"] = shift_measures.measured(spec.evaluation.measures, seen)
        first = not any(other.get("shown") for other in found)
        pictured = spec.figure is not None and spec.figure.x.startswith("predictive_diversity")
        if pictured and first and row["objective"] == OURS:
            row["shown"] = shown(outputs, labels["test"], own / "pictures.npy")
        found.append(row)
    return found


def shown(outputs: Tensor, targets: Tensor, pictures: Path) -> list[dict[str, Any]]:
    """The pictures that members disagree on most and least, with their classes: true, pooled, and the members' own."""
    if not pictures.exists():
        return []
    held = np.load(pictures, mmap_mode="r")
    score = scores.predictive_diversity(outputs.softmax(-1))
    order = score.argsort()
    pooled = pooling.mean_score(outputs).argmax(-1)
    named = outputs.argmax(-1)
    return [
        {
            "disagreement": float(score[i]),
            "true": int(targets[i]),
            "ensemble": int(pooled[i]),
            "members": named[:, i].tolist(),
            "shape": list(held[i].shape),
            "picture": base64.b64encode(np.ascontiguousarray(held[i]).tobytes()).decode(),
        }
        for i in [*order[-SHOWN:].flip(0).tolist(), *order[:SHOWN].tolist()]
    ]
