"""Everything that training changes, in one place: it saves itself, restores itself and selects runs."""

import functools
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

import dissensus.train.optim as optim
import dissensus.train.running_means as running_means
from dissensus.axes import LossParts
from dissensus.execution import Body
from dissensus.train.averaging import GradientAverage, WeightAverage
from dissensus.train.convergence import Freezing
from dissensus.train.early_stopping import EarlyStopping
from dissensus.train.history import Failure
from dissensus.train.lowered_weights import Gradient, LoweredGradient
from dissensus.train.member_optimizers import MemberOptimizers
from dissensus.train.memory import MemoryPlan
from dissensus.train.notification import Stop
from dissensus.train.padded_runs import HeldColumns
from dissensus.train.python_state import PythonState
from dissensus.train.sampling import MemberSampling
from dissensus.train.shared_weights import SharedWeights
from dissensus.train.weighting import CLASS_WEIGHTS

_OF_ROWS = {"flat", "active", "moments", "optimizers", "average", "accumulated", "buffers", "epoch_buffers"}
"""Groups of stored tensors that have one row per member."""


@dataclass(frozen=True)
class RunSettings:
    """Settings of the runs in training that may differ between runs or members, as tensors on the device."""

    optimizer: optim.OptimizerColumns
    clip_norm: Float[Tensor, "G 1"] | None = None
    """The largest norm of each row's gradient."""
    hyper: Mapping[str, Float[Tensor, "R *M"]] = field(default_factory=dict)
    """The objective's hyperparameters that differ between runs, and weights of members where some are padding."""
    class_weights: Float[Tensor, "R K"] | None = None
    """The weights of classes; None where all classes count the same."""
    draw_keys: Int[Tensor, " R"] | None = None
    """Keys of the random numbers of an objective that draws; None for other objectives."""
    sampling: MemberSampling | None = None
    """Samples the members of every step; None where all members take all steps."""
    own_members: Float[Tensor, " R"] | None = None
    """The number of members of each run, where the others of its rows are padding; None where there is none."""

    @property
    def of_objective(self) -> Mapping[str, Tensor]:
        """What the objective of a run gets besides outputs and targets, with an axis R."""
        return self.hyper if self.class_weights is None else {**self.hyper, CLASS_WEIGHTS: self.class_weights}

    def select(self, runs: Bool[Tensor, " R"], rows: Bool[Tensor, " G"]) -> "RunSettings":
        """The settings of some runs, and of their rows."""
        return RunSettings(
            optimizer=self.optimizer.select(rows),
            clip_norm=None if self.clip_norm is None else self.clip_norm[rows],
            hyper={name: value[runs.to(value.device)] for name, value in self.hyper.items()},
            class_weights=None
            if self.class_weights is None
            else self.class_weights[runs.to(self.class_weights.device)],
            draw_keys=None if self.draw_keys is None else self.draw_keys[runs.to(self.draw_keys.device)],
            sampling=None if self.sampling is None else self.sampling.select(runs),
            own_members=None if self.own_members is None else self.own_members[runs.to(self.own_members.device)],
        )


@dataclass
class TrainState:
    """The state of R runs of M members, with rows ``G = R·M``.

    Buffers belong to the body, which the state holds. Runs that are done are put aside; the others go on as a smaller
    computation, so R falls during a sweep. `run_ids` are the numbers of the runs in training among all runs.
    """

    body: Body
    flat: Float[Tensor, "G P"]
    """The trainable parameters of all rows."""
    members: int
    settings: RunSettings
    moments: dict[str, Tensor]
    """The state of the optimizer."""
    active: Bool[Tensor, " G"]
    """Rows that train; the others rest."""
    own: slice | None = None
    """The members of this process, where several train one run; None: all."""
    optimizers: MemberOptimizers | None = None
    """Optimizers that the user brings, one per row; None: all rows are updated at once, with `moments`."""
    average: WeightAverage | None = None
    """The moving average of the weights."""
    accumulated: GradientAverage | None = None
    """Gradients of the batches since the last update; None where every batch has an update."""
    shared: SharedWeights | None = None
    """Trainable parameters that the members of a single run share."""
    stopping: EarlyStopping | None = None
    held: list[HeldColumns] = field(default_factory=list)
    """Columns that are the identity in some rows, because other runs have more layers."""
    freezing: Freezing | None = None
    """Freezes members of a single run that have converged."""
    python: dict[str, PythonState] = field(default_factory=dict)
    """Generators that are not keyed by (seed, epoch, step), and variables of the user's objects, for checkpoints."""
    epoch: int = 0
    """Complete epochs; epochs that users see count from 1."""
    in_epoch: int = 0
    """Steps done in this epoch."""
    steps: int = 0
    examples: int = 0
    """Examples of this epoch so far."""
    sums: dict[str, Tensor] = field(default_factory=dict)
    """Sums of every loss over the examples of this epoch, ``[R]`` or ``[R, M]``."""
    latest: dict[str, Tensor] | None = None
    """The same sums of the latest step alone; None where nobody reads them."""
    epoch_buffers: dict[str, Tensor] = field(default_factory=dict)
    """Copies of the buffers from the beginning of the epoch."""
    finished: dict[str, Tensor] = field(default_factory=dict)
    """Weights and buffers of runs that are done, with rows for all runs; empty while all runs train."""
    histories: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    failures: dict[int, Failure] = field(default_factory=dict)
    stops: dict[int, Stop] = field(default_factory=dict)
    """Runs that callbacks have stopped."""
    best_epochs: dict[int, Any] = field(default_factory=dict)
    plan: MemoryPlan | None = None
    """How many members run at once; made before the first step."""
    members_at_once: int | None = None
    """Members at once according to a checkpoint; the plan keeps to it."""
    backend: str = ""
    """The backend of the latest training step."""
    sampled: Int[Tensor, "R K"] | None = None
    """The members that the latest step has sampled."""
    step_weight: Tensor | None = field(default=None, init=False)
    """The summed weight of the latest step's examples, ``[R]`` or ``[R, M]``; None where all count the same."""
    members_summed: int | Float[Tensor, " R"] = field(init=False)
    """Members that the objective's total is a sum over: those of a run, or the masks of its networks."""
    seconds: float = 0.0
    """Training time before the latest start."""
    started: float = field(default_factory=time.perf_counter)
    run_ids: list[int] = field(init=False)
    ticks: Tensor = field(init=False)
    """Steps done, on the device; captured graphs increment it, so it keeps its address."""
    resting: bool = field(init=False)
    """Whether any row rests, known on the host."""
    all_failed: bool = field(default=False, init=False)
    """Whether a failure has stopped the last active row."""

    def __post_init__(self) -> None:
        self.flat.requires_grad_()
        self.run_ids = list(range(len(self.flat) // self.members))
        self.histories = {run: [] for run in self.run_ids}
        self.ticks = torch.zeros((), dtype=torch.int64, device=self.flat.device)
        self.resting = not bool(self.active.all())
        self.members_summed = self.members

    @property
    def runs(self) -> int:
        """Runs in training."""
        return len(self.run_ids)

    @property
    def elapsed(self) -> float:
        """Seconds of training so far, including the time before a resume."""
        return self.seconds + time.perf_counter() - self.started

    def rows_of(self, runs: Bool[Tensor, " R"]) -> Bool[Tensor, " G"]:
        """The rows of some runs."""
        return runs.repeat_interleave(self.members).to(self.flat.device)

    def active_runs(self) -> Bool[Tensor, " R"]:
        """Runs with at least one active row."""
        return self.active.view(self.runs, self.members).any(1)

    def sampled_rows(self) -> Tensor | None:
        """The rows that the latest step has sampled; None for all."""
        if self.settings.sampling is None or self.sampled is None:
            return None
        rows = self.settings.sampling.rows(self.sampled)
        if self.own is None:
            return rows
        return rows[(rows >= self.own.start) & (rows < self.own.stop)] - self.own.start

    @contextmanager
    def evaluated(self) -> Iterator[None]:
        """A block in which members have the weights to evaluate: averaged ones, or those of the optimizers' choice."""
        if self.optimizers is not None:
            self.optimizers.eval()
        shared = nullcontext() if self.shared is None else self.shared.swapped_in()
        with shared, nullcontext() if self.average is None else self.average.swapped_in(self.flat):
            yield

    def accumulate(self, grad: Float[Tensor, "G P"], examples: int) -> None:
        """Add the gradient of a batch to those since the last update, by its examples or their weight."""
        assert self.accumulated is not None
        self.accumulated.add(grad, self._weight_of_batch(examples))

    def _weight_of_batch(self, examples: int) -> Tensor | int:
        """The number of examples of the latest batch, or their summed weight, one per row."""
        weight: Tensor | int = examples
        if self.step_weight is not None:
            own = self.step_weight if self.step_weight.ndim == 2 else self.step_weight.unsqueeze(1)
            own = own[:, self.own] if self.own is not None and own.shape[1] > 1 else own
            # Masks of one network are not rows of their own.
            own = own if own.shape[1] in (1, self.members) else own.mean(1, keepdim=True)
            weight = own.expand(self.runs, self.members).flatten()
        return weight

    def update_shared(self, optimizer: str, factor: Tensor, examples: int, *, updates: bool) -> None:
        """Update the parameters that members of each run share, unless the run has stopped."""
        assert self.shared is not None
        weight: Tensor | int = examples
        if self.step_weight is not None:  # of all members, in a parallel training too
            weight = self.step_weight.view(self.runs, -1).mean(1)
        self.shared.update(optimizer, factor, self.active_runs(), weight, updates=updates)

    def begin_epoch(self) -> None:
        """Copy the buffers and reset the sums."""
        self.epoch_buffers = {name: tensor.clone() for name, tensor in self.body.state().items()}
        self.examples = 0
        for total in self.sums.values():
            total.zero_()

    def add_losses(self, parts: LossParts, examples: int) -> None:
        """Add a step's losses to the sums of the epoch; the total counts as a mean over members."""
        mean = LossParts(parts.total / self.members_summed, parts.parts)
        running_means.add(self.sums, mean, examples, self.settings.sampling, self.sampled, self.step_weight)
        if self.latest is not None:
            for total in self.latest.values():  # in place, because a graph may hold this step
                total.zero_()
            running_means.add(self.latest, mean, examples, self.settings.sampling, self.sampled, self.step_weight)

    def finite_runs(self, total: Float[Tensor, " R"], grad: Gradient) -> Bool[Tensor, " R"]:
        """Runs that may go on: total and gradient are finite, or all rows rest. Nothing is read back to the host."""
        parts = grad.parts if isinstance(grad, LoweredGradient) else [grad] * (grad.numel() > 0)
        norms = [torch.linalg.vector_norm(part.view(self.runs, -1), math.inf, 1) for part in parts]
        # Without any, members have nothing to train but what they share.
        largest = functools.reduce(torch.maximum, norms) if norms else torch.zeros_like(total)
        if self.shared is not None and self.shared.grad is not None:
            largest = torch.maximum(largest, torch.linalg.vector_norm(self.shared.grad, math.inf, 1))
        return (total.isfinite() & largest.isfinite()) | ~self.active_runs()

    def freeze(self, runs: Bool[Tensor, " R"]) -> None:
        """Stop runs that failed, and restore buffers that are not finite from the beginning of the epoch."""
        rows, buffers = self.rows_of(runs), self.body.state()
        spoilt = {
            name: self.epoch_buffers[name]
            for name, tensor in buffers.items()
            if name in self.epoch_buffers and tensor.is_floating_point() and not bool(tensor.isfinite().all())
        }
        self.body.merge({name: buffers[name] for name in spoilt}, spoilt, rows)
        self.active.logical_and_(~rows)
        self.resting, self.all_failed = True, not bool(self.active.any())

    def stop(self, place: int, callback: str) -> None:
        """Stop a run at the wish of a callback; its weights do not change from now on."""
        self.stops[self.run_ids[place]] = Stop(callback, self.steps)
        self.active[place * self.members : (place + 1) * self.members] = False

    def active_gradient(self, grad: Gradient) -> Gradient:
        """A gradient with zeros for rows that rest."""
        rows = self.sampled_rows()
        active = self.active if rows is None else self.active[rows]
        return grad.where(active) if isinstance(grad, LoweredGradient) else torch.where(active.unsqueeze(1), grad, 0.0)

    def retire(self, done: Bool[Tensor, " R"]) -> bool:
        """Put runs that are done aside, with their best weights; return whether the other runs were selected."""
        rows = self.rows_of(done)
        if self.optimizers is not None:
            self.optimizers.eval(rows.tolist())
        if self.average is not None:
            self.average.adopt(self.flat, rows)
        if self.shared is not None:
            best = torch.zeros_like(done)
            if self.stopping is not None and self.stopping.rule.keep == "best":
                best = self.stopping.best_epoch > 0
            device = self.flat.device
            self.shared.finish(done.to(device), best.to(device))
        if self.stopping is not None:
            self.stopping.restore(self.flat, rows)
            for place, best in enumerate(self.stopping.best_epochs(self.runs)):
                if done[place] and self.stopping.rule.keep == "best":
                    epochs = [epoch or None for epoch in best] if isinstance(best, list) else best or None
                    self.best_epochs[self.run_ids[place]] = epochs
        if bool(done.all()) and not self.finished:
            self.run_ids = []
            return False
        buffers = {f"buffers/{name}": tensor for name, tensor in self.body.state().items()}
        tensors = {"flat": self.flat.detach(), **buffers}
        if not self.finished:
            self.finished = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
        retired = [run for run, is_done in zip(self.run_ids, done.tolist(), strict=True) if is_done]
        places = [run * self.members + member for run in retired for member in range(self.members)]
        for name, tensor in tensors.items():
            self.finished[name][places] = tensor[rows]
        if self.shared is not None:
            if "shared" not in self.finished:
                self.finished["shared"] = torch.zeros_like(self.shared.flat.detach())
            self.finished["shared"][retired] = self.shared.flat.detach()[done.to(self.flat.device)]
        self.select(~done)
        return True

    def select(self, runs: Bool[Tensor, " R"]) -> None:
        """Go on with some of the runs."""
        rows = self.rows_of(runs)
        flat = self.flat.detach()[rows]
        self.body.attach(flat, selected_rows(self.body.state(), rows))
        self.flat = flat.requires_grad_()
        if self.shared is not None:
            self.shared.select(runs.to(flat.device))
            self.body.attach_shared(self.shared.flat)
        self.moments = selected_rows(self.moments, rows)
        if self.optimizers is not None:
            self.optimizers.select(rows)
            self.optimizers.follow(flat)
        for average in (self.average, self.accumulated):
            if average is not None:
                average.select(rows)
        self.epoch_buffers = selected_rows(self.epoch_buffers, rows)
        self.active = self.active[rows]
        self.held = [columns.select(rows) for columns in self.held]
        self.settings = self.settings.select(runs, rows)
        self.run_ids = [run for run, selected in zip(self.run_ids, runs.tolist(), strict=True) if selected]
        self.sums = {}
        self.latest = None if self.latest is None else {}
        if self.stopping is not None:
            self.stopping.select(rows)

    def finish(self) -> None:
        """Attach the weights of all runs to the body."""
        if self.finished:
            self.flat, shared = self.finished.pop("flat"), self.finished.pop("shared", None)
            self.body.attach(self.flat, {name.partition("/")[2]: t for name, t in self.finished.items()})
            if self.shared is not None and shared is not None:
                self.shared.flat = shared
                self.body.attach_shared(shared)
            self.finished = {}
        self.flat.requires_grad_(False)
        if self.shared is not None:
            self.shared.flat.requires_grad_(False)

    def tensors(self) -> dict[str, Tensor]:
        """Everything that a checkpoint must hold, as tensors."""
        groups: dict[str, Mapping[str, Tensor]] = {
            "moments": self.moments,
            "optimizers": {}
            if self.optimizers is None
            else self.optimizers.tensors(0 if self.own is None else self.own.start),
            "average": {} if self.average is None else self.average.tensors(),
            "accumulated": {} if self.accumulated is None else self.accumulated.tensors(),
            "shared": {} if self.shared is None else self.shared.tensors(),
            "buffers": self.body.state(),
            "epoch_buffers": self.epoch_buffers,
            "sums": self.sums,
            "stopping": {} if self.stopping is None else self.stopping.tensors(),
            "freezing": {} if self.freezing is None else self.freezing.tensors(),
            "finished": self.finished,
            "python": self.python_tensors(),
        }
        grouped = {f"{group}/{name}": tensor for group, tensors in groups.items() for name, tensor in tensors.items()}
        return {"flat": self.flat, "active": self.active, **grouped}

    def has_rows(self, name: str) -> bool:
        """Whether a tensor of `tensors` has one row per member; the others are the same in all processes."""
        group, _, key = name.partition("/")
        if group == "stopping" and self.stopping is not None and self.stopping.rule.per_member:
            return True
        stopping = key == "best_flat" or key.startswith("best_state.")
        return group in _OF_ROWS or (group == "stopping" and stopping)

    def rows(self, name: str) -> slice | None:
        """The rows of a stored tensor that belong to this process; None for all."""
        if self.own is None:
            return None
        group, _, key = name.partition("/")
        if group == "optimizers":
            row = key.partition("/")[0]
            return None if key == "facts" or self.own.start <= int(row) < self.own.stop else slice(0, 0)
        return self.own if self.has_rows(name) else None

    def python_tensors(self) -> dict[str, Tensor]:
        """Generators and variables outside of the library, as a checkpoint holds them."""
        states = {part: python.tensors() for part, python in self.python.items()}
        return {f"{part}/{name}": tensor for part, tensors in states.items() for name, tensor in tensors.items()}

    def restore_python(self, stored: Mapping[str, Tensor]) -> None:
        """Restore what `python_tensors` returned."""
        for part, python in self.python.items():
            python.restore({key.partition("/")[2]: t for key, t in stored.items() if key.startswith(f"{part}/")})

    def facts(self) -> dict[str, Any]:
        """Everything else that a checkpoint must hold, ready for JSON."""
        return {
            "epoch": self.epoch,
            "in_epoch": self.in_epoch,
            "steps": self.steps,
            "run_ids": self.run_ids,
            "examples": self.examples,
            "losses": list(self.sums),
            "seconds": self.elapsed,
            "best_epochs": list(self.best_epochs.items()),
            "histories": list(self.histories.items()),
            "stops": [(run, *stop) for run, stop in self.stops.items()],
            "failures": [(run, vars(failure)) for run, failure in self.failures.items()],
            "backend": self.backend,
            "members_at_once": self.members_at_once if self.plan is None else self.plan.at_once,
        }

    def restore(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Restore what `tensors` and `facts` returned; the runs of that moment must be selected already."""
        groups: dict[str, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            group, _, key = name.partition("/") if "/" in name else ("", "", name)
            groups.setdefault(group, {})[key] = tensor
        self.restore_python(groups.get("python", {}))
        device = self.flat.device
        on_device = {
            group: {name: tensor.to(device) for name, tensor in tensors.items()}
            for group, tensors in groups.items()
            if group != "python"
        }
        flat, self.active = on_device[""]["flat"], on_device[""]["active"]
        self.body.attach(flat, on_device.get("buffers", {}))
        self.flat = flat.requires_grad_()
        self.moments, self.epoch_buffers = on_device.get("moments", {}), on_device.get("epoch_buffers", {})
        sums, self.finished = on_device.get("sums", {}), on_device.get("finished", {})
        self.sums = {name: sums[name] for name in facts["losses"]}  # the order of the history's columns
        self.resting = not bool(self.active.all())
        if self.optimizers is not None and facts["run_ids"]:
            self.optimizers.follow(flat)
            self.optimizers.load(on_device["optimizers"], self.own)
        for name, average in (("average", self.average), ("accumulated", self.accumulated)):
            if average is not None:
                average.load(on_device[name])
        if self.shared is not None:
            self.shared.load(on_device["shared"])
        if self.stopping is not None:
            self.stopping.load(on_device["stopping"])
        if self.freezing is not None:
            self.freezing.load(on_device["freezing"])
        self.run_ids = [run for run in self.run_ids if run in facts["run_ids"]]
        self.epoch, self.in_epoch, self.steps = facts["epoch"], facts["in_epoch"], facts["steps"]
        self.examples, self.seconds, self.started = facts["examples"], facts["seconds"], time.perf_counter()
        self.best_epochs, self.histories = dict(facts["best_epochs"]), dict(facts["histories"])
        if self.own is not None:
            of_members = {run: epochs for run, epochs in self.best_epochs.items() if isinstance(epochs, list)}
            self.best_epochs |= {run: epochs[self.own] for run, epochs in of_members.items()}
        self.failures = {run: Failure(**failure) for run, failure in facts["failures"]}
        self.stops = {run: Stop(*stop) for run, *stop in facts.get("stops", ())}
        self.backend, self.members_at_once = facts["backend"], facts["members_at_once"]


def selected_rows(tensors: Mapping[str, Tensor], rows: Bool[Tensor, " G"]) -> dict[str, Tensor]:
    """Some rows of every tensor."""
    return {name: tensor[rows] for name, tensor in tensors.items()}
