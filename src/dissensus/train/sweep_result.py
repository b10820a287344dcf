"""The result of a sweep: one row per run, one ensemble per run, all outputs at once."""

import functools
import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dissensus import calls, checks, storage
from dissensus.arrays import Conversion
from dissensus.calls import NetworkInputs, OutputChoice, network_inputs
from dissensus.ensemble import SHARED_ROWS, Ensemble, stored_tensors
from dissensus.execution import BACKENDS, Body, StackedMembers
from dissensus.execution.inference import prediction_out_of_memory
from dissensus.execution.out_of_memory import advising
from dissensus.execution.sharing import stored_choice
from dissensus.pages.parts import counted
from dissensus.pages.training import sweep_lines
from dissensus.randomness import seeded
from dissensus.train.evaluation import evaluation_batch
from dissensus.train.grid import FOLD, SEEDS
from dissensus.train.history import History
from dissensus.train.selection import Best, averaged_names, best_group, checked_mode, lines_over, values_of

KIND = "dissensus.sweep"
FORMATS = storage.Formats(newest=1)
"""Of saved sweeps; 1 is that of 0.1."""


@dataclass(frozen=True)
class Outcome:
    """How a run ended: ``"done"``, ``"stopped early"`` or ``"failed"`` (then ``reason`` says where)."""

    status: str
    reason: str
    history: History


@dataclass(frozen=True)
class Group:
    """Runs that were trained as one computation, and their members, stacked run by run."""

    runs: list[int]
    body: Body
    members: int
    build: dict[str, Any]
    seeds: list[int]
    on_all: bool = True
    """Whether members were trained on all examples: False where some were held out, or drawn for each member."""


@dataclass(frozen=True)
class Sweep:
    """The trained runs of a grid, in the grid's order."""

    points: list[dict[str, Any]]
    outcomes: list[Outcome]
    groups: list[Group]
    mode: Literal["min", "max"] = "min"
    """Whether a lower or a higher ``validation`` is better."""

    def __len__(self) -> int:
        return len(self.points)

    def run(self, index: int) -> Ensemble:
        """One run as an ordinary ensemble (a copy), in evaluation mode."""
        group, place = self._find(index)
        rows = range(place * group.members, (place + 1) * group.members)
        body = group.body.subset(list(rows)).eval()
        body.choices = group.body.choices  # measured once for all runs
        seed, ids = group.seeds[place], list(range(group.members))
        ensemble = Ensemble.around(body, seed, ids, group.body.requested_backend)
        ensemble.in_bag = "all" if group.on_all else None
        return ensemble

    def _find(self, index: int) -> tuple[Group, int]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"there is no run {index}: the sweep has runs 0 to {len(self) - 1}.")
        index %= len(self)
        return next((group, group.runs.index(index)) for group in self.groups if index in group.runs)

    def history(self, index: int) -> History:
        """The record of one run."""
        self._find(index)
        return self.outcomes[index].history

    def table(self, *, frame: bool | None = None) -> Any:
        """One row per run: its point, how it ended, and the numbers of the epoch whose weights were kept.

        That is the best epoch of a run with validation data, else the last one. (With ``watch="member"``, where each
        member has a best epoch of its own, it is the last one too.)

        A pandas frame where pandas is installed, else a list of dicts; ``frame`` decides between them.
        """
        rows = [self._row(index) for index in range(len(self))]
        if frame is False:
            return rows
        try:
            import pandas
        except ImportError:
            if frame:
                raise ImportError("a frame needs pandas: pip install 'dissensus[data]'") from None
            return rows
        return pandas.DataFrame(rows)

    def _row(self, index: int) -> dict[str, Any]:
        outcome = self.outcomes[index]
        history = outcome.history
        best = history.best_epoch if isinstance(history.best_epoch, int) else len(history.epochs)
        kept = history.epochs[best - 1] if history.epochs else {}
        numbers = {name: value for name, value in kept.items() if isinstance(value, float) and name != "seconds"}
        numbers.pop("lr", None)
        return {
            **self.points[index],
            "status": outcome.status,
            "reason": outcome.reason,
            "epochs": len(outcome.history.epochs),
            "best_epoch": outcome.history.best_epoch,
            **{f"final_{name}" if name in self.points[index] else name: value for name, value in numbers.items()},
        }

    def best(
        self,
        metric: str = "validation",
        *,
        mode: Literal["min", "max"] | None = None,
        over: str | Iterable[str] = (),
    ) -> Best:
        """The best run: its number, its point, the metric and its ensemble. Of equals it is the first.

        Runs that failed, and runs whose metric is NaN, are left out. The best of many runs is partly luck: its metric
        flatters it, the more so the more seeds there are. ``over="seed"`` compares points by their means over seeds
        instead. A point with a run that failed is then left out as a whole.

        Args:
            metric: A column of `table` with numbers, such as ``"validation"`` or ``"validation_accuracy"``.
            mode: Whether a lower (``"min"``) or a higher (``"max"``) metric is better. For ``validation`` it is that of
                the sweep, for ``loss`` it is ``"min"``. Required for other metrics.
            over: Names of the grid to average over, such as ``"seed"`` or ``["seed", "fold"]``.

        >>> import dissensus as ds
        >>> x, y = torch.randn(64, 3), torch.randn(64, 1)
        >>> build = functools.partial(ds.nets.mlp, 3, 1, (8,))
        >>> objective = functools.partial(ds.objectives.independent, loss="squared_error")
        >>> swept = ds.sweep(build, (x, y), objective, grid={"lr": [1e-9, 1e-2], "seed": [0, 1]}, epochs=3)
        >>> best = swept.best("loss", over="seed")
        >>> best.point, best.runs, len(best.ensemble)
        ({'lr': 0.01}, [2, 3], 5)
        """
        values, rule, names = self._compared(metric, mode, over)
        point, runs, mean, error = best_group(self.points, values, rule, names)
        run, *_ = best_group([self.points[run] for run in runs], [values[run] for run in runs], rule, [])[1]
        return Best(runs[run], point, mean, error, runs, self.run(runs[run]))

    def plot(
        self,
        x: str | None = None,
        metric: str = "validation",
        *,
        over: str | Iterable[str] | None = None,
        log: bool | None = None,
    ) -> Any:
        """A metric against a setting of the grid as a matplotlib figure, with one line per combination of the others.

        Lines join the means over seeds. Bars are one standard error to either side, and points are single runs. Failed
        runs are left out, and the figure says how many.

        Args:
            x: A name of the grid. The default is the first one that varies and is not averaged over.
            metric: A column of `table` with numbers.
            over: Names of the grid to average over. The default is those of ``seed``, ``split_seed`` and ``fold`` that
                the grid has.
            log: Whether the axis of the metric is logarithmic. By default, it is if all numbers are above zero and the
                largest is at least ten times the smallest.
        """
        given = dict.fromkeys(name for point in self.points for name in point)
        names = averaged_names(
            [n for n in (*SEEDS, FOLD) if n in given and n != x] if over is None else over, self.points
        )
        varying = [name for name in given if name not in names and not self._is_constant(name)]
        if x is None:
            x = next(iter([*varying, *(name for name in given if name not in names), *given]))
        checks.one_of("x", x, given)
        if x in names:
            checks.refuse("x", "be none of the names in `over`", repr(x))
        values = values_of(self.table(frame=False), self.points, metric)
        constant = [name for name in given if name not in varying and name != x]
        ticks, lines = lines_over(self.points, values, x, [*names, *constant])
        if not lines:
            raise ValueError(f"there is nothing to draw: no run has a finite {metric!r}. `table()` says why.")
        failed = sum(outcome.status == "failed" for outcome in self.outcomes)
        note = f"{failed} failed {'run is' if failed == 1 else 'runs are'} left out" if failed else ""
        return sweep_lines(ticks, lines, x_label=x, y_label=metric, note=note, log=log)

    def _is_constant(self, name: str) -> bool:
        return all(point.get(name) == self.points[0].get(name) for point in self.points)

    def _compared(
        self, metric: str, mode: Literal["min", "max"] | None, over: str | Iterable[str]
    ) -> tuple[list[float], Literal["min", "max"], list[str]]:
        names = averaged_names(over, self.points)
        values = values_of(self.table(frame=False), self.points, metric)
        return values, checked_mode(mode, metric, self.mode), names

    def __str__(self) -> str:
        counts = Counter(outcome.status for outcome in self.outcomes)
        ends = ", ".join(f"{count} {status}" for status, count in counts.items())
        return f"{counted(len(self), 'run')}: {ends}"

    @torch.no_grad()
    def outputs(self, x: Any, batch_size: int = 1024) -> Tensor:
        """Member outputs ``[R, M, N, ...]`` on the host, in evaluation mode, batch by batch.

        ``x`` are inputs in memory: a tensor, an array or a frame, a dictionary of named inputs, or a tuple of inputs.
        """
        checks.count("batch_size", batch_size)
        if len({group.members for group in self.groups}) > 1:
            raise ValueError("runs have different numbers of members; use sweep.run(i).predict(x) for each run.")
        members = max((len(group.runs) * group.members for group in self.groups), default=0)
        device = checks.computes("sweep", next(self.groups[0].body.parameters()).device)
        with advising(functools.partial(prediction_out_of_memory, device, members, batch_size, file=True)):
            inputs = network_inputs(Conversion.of(self.groups[0].body).inputs(x))
            if not calls.examples(inputs, "x"):
                checks.refuse("x", "hold at least one example", checks.shape_text(calls.first_tensor(inputs).shape))
            return self._outputs(inputs, batch_size)

    def _outputs(self, x: NetworkInputs, batch_size: int) -> Tensor:
        result: Tensor | None = None
        length = calls.examples(x)
        for group in self.groups:
            group.body.eval()
            device = next(group.body.parameters()).device
            start = 0
            for batch in calls.split(x, evaluation_batch(len(group.runs) * group.members, batch_size)):
                outputs = group.body.run(None, calls.mapped(lambda tensor: tensor.to(device), batch)).cpu()  # noqa: B023
                outputs = outputs.unflatten(0, (len(group.runs), -1))
                if result is None:
                    result = outputs.new_empty(len(self), outputs.shape[1], length, *outputs.shape[3:])
                if outputs.shape[1] != result.shape[1]:
                    raise ValueError("runs have different numbers of masks; use sweep.run(i).predict(x) for each run.")
                result[group.runs, :, start : start + calls.examples(batch)] = outputs
                start += calls.examples(batch)
        assert result is not None
        return result

    def save(self, path: str | Path) -> None:
        """Save into a folder: safetensors weights and a JSON manifest; functions in the grid go by their names."""
        tensors = {
            f"{i}/{name}": t for i, group in enumerate(self.groups) for name, t in stored_tensors(group.body).items()
        }
        details = {
            "points": self.points,
            "mode": self.mode,
            "outcomes": [asdict(outcome) for outcome in self.outcomes],
            "groups": [
                {
                    "runs": g.runs,
                    "members": g.members,
                    "build": g.build,
                    "seeds": g.seeds,
                    "backend": g.body.backend,
                    "on_all": g.on_all,
                    "output": g.body.output if isinstance(g.body.output, str | int) else None,
                    **({"shared": shared} if (shared := list(g.body.shared_tensors())) else {}),
                }
                for g in self.groups
            ],
        }
        named = json.loads(json.dumps(details, default=_name))
        storage.write_folder(path, KIND, tensors, named, FORMATS)

    @classmethod
    def load(
        cls,
        path: str | Path,
        build: Callable[..., nn.Module] | Sequence[Callable[[], nn.Module]],
        *,
        output: OutputChoice | None = None,
    ) -> "Sweep":
        """Load what `save` wrote, in this release or since 0.1.

        ``build`` is the one the sweep was given. Where the grid held functions or classes for it, which a file cannot
        bring back, give a list instead: one function without arguments per group of `groups`. ``output`` is stored if
        it is a name or a position; a function has to be passed again.
        """
        calls.check_output_choice(output)
        tensors, manifest = storage.read_folder(path, KIND, FORMATS)
        entries = manifest["groups"]
        if callable(build):
            builds = [functools.partial(build, **entry["build"]) for entry in entries]
        elif len(build) != len(entries):
            checks.refuse("build", f"be one function, or one per group ({len(entries)})", f"{len(build)} functions")
        else:
            builds = list(build)
        groups: list[Group] = []
        for i, entry in enumerate(entries):
            try:
                with seeded(0):
                    network = builds[i]()
                    first = StackedMembers.of([network], stored_choice(network, entry.get("shared")))
            except TypeError as reason:
                held = ", ".join(entry["build"]) or "nothing"
                raise storage.StorageError(
                    f"`build` failed with what was stored for it ({held}): {reason}. Functions are stored by "
                    "name only: give a list of functions without arguments, one per group."
                ) from reason
            body = first.subset([0] * (len(entry["runs"]) * entry["members"]))
            stored = {name.partition("/")[2]: t for name, t in tensors.items() if name.partition("/")[0] == str(i)}
            if SHARED_ROWS in stored:
                body.attach_shared(stored[SHARED_ROWS])
            storage.check_match(path, stored, {name: t.shape for name, t in stored_tensors(body).items()})
            for name, tensor in stored_tensors(body).items():
                tensor.data = stored[name]
            body.eval().request_backend(entry["backend"] if entry["backend"] in BACKENDS else "auto")
            body.output = entry.get("output") if output is None else output
            on_all = bool(entry.get("on_all", True))
            groups.append(Group(entry["runs"], body, entry["members"], entry["build"], entry["seeds"], on_all))
        outcomes = [Outcome(o["status"], o["reason"], History(**o["history"])) for o in manifest["outcomes"]]
        return cls(manifest["points"], outcomes, groups, manifest.get("mode", "min"))


def _name(value: Any) -> str:
    """A function of the grid by its name, with what a partial sets.

    >>> _name(functools.partial(max, default=0))
    'max(default=0)'
    """
    if isinstance(value, functools.partial):
        settings = [*map(repr, value.args), *(f"{key}={setting!r}" for key, setting in value.keywords.items())]
        return f"{_name(value.func)}({', '.join(settings)})"
    return getattr(value, "__qualname__", repr(value))
