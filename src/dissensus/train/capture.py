"""Whole training steps as CUDA graphs: batch by index, augmentation, forward, objective, backward, clipping, update.

Nothing is read back within an epoch, except for progress reports and checkpoints. A run that meets NaN or infinity is
frozen on the device at that step and reported at the end of the epoch. With a foreign loader it is reported at once,
because the batch would be gone by then.
"""

import functools
import logging
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from dissensus.data.unlabelled import WithUnlabelled
from dissensus.dropout import counter_names
from dissensus.execution.graphs import Capture, capture_on
from dissensus.execution.ranks import Ranks
from dissensus.execution.replay import GraphCache, Recording
from dissensus.train.engine import Engine

log = logging.getLogger("dissensus")

WARM_UP = 3
"""Eager steps with batches of a shape before such a step is captured."""
MOST_SHAPES = 4
"""Shapes of batches that get a graph. Each graph holds the memory of a step."""

Raw = tuple[Tensor, ...]


class GraphSteps:
    """Training steps that are replayed from graphs, one for each shape of batch, and run eagerly where capture fails.

    ``new_capture`` returns the way to capture, at the start and each time that graphs are forgotten.
    """

    def __init__(self, new_capture: Callable[[], Capture | None]) -> None:
        self.cache = GraphCache("steps", new_capture, warm_up=WARM_UP, most=MOST_SHAPES)

    @property
    def given_up(self) -> bool:
        """Whether steps run eagerly from the next epoch on, because none could be captured."""
        return not self.cache.enabled

    def forget(self) -> None:
        """Capture again, because shapes, branches or tensors have changed."""
        self.cache.forget()

    def steps(self, engine: Engine, factors: Tensor) -> Iterator[int]:
        """Do the remaining steps of an epoch; yield the number of examples of each."""
        feed = engine.feed
        if not self.cache.graphs:  # graphs keep the tensors that they read and write
            self.factor = torch.ones((), dtype=factors.dtype, device=factors.device)
            self.failed_at = torch.zeros(engine.runs, dtype=torch.int64, device=factors.device)
        engine.state.ticks.fill_(engine.state.steps)
        self.failed_at.fill_(-1)
        self.past: dict[int, Raw] = {}
        for raw in feed.raw(engine.state.epoch, engine.state.in_epoch):
            if feed.resumable:
                self.past[engine.state.steps] = raw
            else:
                self.past = {engine.state.steps: raw}
            feed.seed_step(engine.state.epoch, engine.state.in_epoch)
            self._step(engine, raw, factors[engine.state.in_epoch])
            if not feed.resumable:
                self.tell(engine)
            yield feed.size(*raw)
        self.tell(engine)

    def _step(self, engine: Engine, raw: Raw, factor: Tensor) -> None:
        shapes = (engine.feed.form, *(part.shape for part in raw), engine.updates)
        graph = self.cache.graph(shapes, functools.partial(self._recording, engine, raw), engine.feed.generators)
        if graph is not None:
            if engine.lowered is not None:
                engine.lowered.follow()
            graph(*raw, factor)
        else:
            engine.step(engine.feed.batch(*raw), factor)
            engine.state.ticks.add_(1)

    def _recording(self, engine: Engine, raw: Raw) -> Recording:
        plan = engine.state.plan
        if plan is not None and plan.groups is not None and plan.groups.draws:
            raise RuntimeError("members in groups draw from torch's own generator, which a graph cannot set back")
        batch, updates = tuple(part.clone() for part in raw), engine.updates

        def whole_step() -> None:
            engine.device_step(engine.feed.batch(*batch), self.factor, self.failed_at, updates=updates)

        return Recording(whole_step, (*batch, self.factor))

    def tell(self, engine: Engine) -> None:
        """Report the runs that failed since the last call. Their weights have not changed, so the step is repeated."""
        feed, failed = engine.feed, self.failed_at >= 0
        if not bool(failed.any()):
            return
        engine.state.freeze(failed)
        base, now = engine.state.steps - engine.state.in_epoch, int(engine.state.ticks)
        for run in failed.nonzero().flatten().tolist():
            step = int(self.failed_at[run])
            self._count_back(engine, run, step, now)
            feed.seed_step(engine.state.epoch, step - base)
            engine.state.ticks.fill_(step)
            before = {name: tensor.clone() for name, tensor in engine.body.state().items()}
            batch = feed.batch(*self.past[step])
            repeated = engine.raw_gradient(batch)
            engine.body.merge(engine.body.state(), before, torch.ones_like(engine.state.active))
            engine.blame(run, step, batch, *repeated)
        engine.state.ticks.fill_(now)
        self.failed_at.fill_(-1)

    def _count_back(self, engine: Engine, run: int, step: int, now: int) -> None:
        """Undo what replays after a failure have counted, so that dropout draws the masks of the step that failed.

        Running means of batch norm have changed too and remain so; no training pass reads them.
        """
        rows = torch.zeros_like(engine.state.active)
        rows[run * engine.state.members : (run + 1) * engine.state.members] = True
        state = engine.body.state()
        counters = {n: t for n, t in state.items() if n in counter_names(state) or n.endswith("num_batches_tracked")}
        beside = engine.adversary is not None and engine.adversary.settings.beside
        passes = 2 if beside or isinstance(engine.feed, WithUnlabelled) else 1
        counted = torch.full_like(engine.state.active, now - step, dtype=torch.int64)
        sampling = engine.state.settings.sampling
        if sampling is not None:
            ticks = torch.arange(step, now, device=counted.device)
            passed = [sampling.rows(sampling.sample(tick)) for tick in ticks]
            counted = torch.cat(passed).bincount(minlength=len(counted)) if passed else counted
        earlier = {
            name: (tensor - passes * counted.view(-1, *[1] * (tensor.ndim - 1))).clamp_min(0)
            for name, tensor in counters.items()
        }
        engine.body.merge(counters, earlier, rows)


def graph_steps(engine: Engine) -> GraphSteps | None:
    """Captured steps on a GPU; None for a CPU, for optimizers that the user brings, and for recomputed passes.

    With several processes, a backend that cannot be captured leaves collectives to the host, between graphs.
    """
    device = engine.state.flat.device
    if device.type != "cuda" or engine.state.optimizers is not None or engine.body.recompute:
        return None
    ranks = engine.ranks
    if ranks is not None and engine.state.settings.sampling is not None:
        log.info("steps are not captured in a graph: processes take other numbers of members at every step")
        return None
    if ranks is not None and not ranks.captures and engine.adversary is not None:
        log.info("steps are not captured in a graph: attacks exchange gradients in the middle of a backward pass")
        return None
    # A foreign loader, and connections to other processes, may have threads that call CUDA.
    watch = "global" if engine.feed.resumable and ranks is None else "thread_local"
    pieces = ranks is not None and not ranks.captures
    new_capture = functools.partial(capture_on, device, watch, pieces=pieces)
    return GraphSteps(new_capture if ranks is None else lambda: _agreed(new_capture(), ranks))


def _agreed(capture: Capture | None, ranks: Ranks) -> Capture | None:
    """A way to capture that fails in all processes where it fails in one, so that all take the same steps."""

    def captured(function: Callable[[], None], generators: Sequence[torch.Generator]) -> Callable[[], None]:
        assert capture is not None
        replay, problem = None, ""
        try:
            replay = capture(function, generators)
        except RuntimeError as reason:
            problem = str(reason) or type(reason).__name__
        problem = next(filter(None, ranks.everyone(problem)), "")
        if replay is None or problem:
            raise RuntimeError(problem)
        return replay

    return None if capture is None else captured
