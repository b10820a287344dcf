"""Whole training steps as CUDA graphs: batch by index, augmentation, forward, objective, backward, clipping, update.

Nothing is read back within an epoch, but for progress reports and checkpoints. A run that meets NaN or infinity is
frozen on the device at that very step, and told at the end of the epoch (with a foreign loader, whose batch would be
gone by then, at once).
"""

import functools
import logging
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from dissensus.data.unlabelled import WithUnlabelled
from dissensus.execution.graphs import Capture, captured, on
from dissensus.execution.skeleton import first_line
from dissensus.train.engine import Engine
from dissensus.train.member_groups import Generators, moved

log = logging.getLogger("dissensus")

WARM_UP = 3
"""Real steps that run eagerly before a step of their shape is captured."""
MOST_SHAPES = 4
"""Shapes of batches that get a graph of their own; each holds the memory of a step."""

Raw = tuple[Tensor, ...]
Shapes = tuple[torch.Size, ...]


class GraphSteps:
    """Replays captured steps, one graph per shape of batch; falls back to eager steps where capture fails."""

    def __init__(self, capture: Capture = captured, fresh: Callable[[], Capture] | None = None) -> None:
        """``fresh`` gives a way to capture for each time that graphs are forgotten, with a pool of its own."""
        self.capture, self.fresh = capture, fresh
        self.refused: dict[Shapes, str] = {}
        self.given_up = False
        """Whether steps run eagerly from the next epoch on, because none could be captured."""
        self.forget()

    def forget(self) -> None:
        """Shapes or branches have changed: capture anew."""
        if self.fresh is not None:  # torch takes a pool back with its last graph, and may refuse it afterwards
            self.capture = self.fresh()
        self.replays: dict[Shapes, tuple[Raw, Callable[[], None]]] = {}
        self.seen: dict[Shapes, int] = {}

    def steps(self, engine: Engine, factors: Tensor) -> Iterator[int]:
        """Do the steps of the rest of an epoch; give the number of examples of each."""
        feed = engine.feed
        if not self.replays:  # what graphs read and write must stay where it is
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
        shapes = tuple(part.shape for part in raw)
        self.seen[shapes] = self.seen.get(shapes, 0) + 1
        ready = self.seen[shapes] > WARM_UP and len(self.replays) < MOST_SHAPES
        if ready and shapes not in self.refused and shapes not in self.replays:
            self._prepare(engine, raw, shapes)
        if shapes in self.replays:
            held, replay = self.replays[shapes]
            for place, part in zip(held, raw, strict=True):
                place.copy_(part)
            self.factor.copy_(factor)
            replay()
        else:
            engine.step(*engine.feed.batch(*raw), factor)
            engine.state.ticks.add_(1)

    def _prepare(self, engine: Engine, raw: Raw, shapes: Shapes) -> None:
        """Capture the step of a shape, or say in one line why not."""
        held = tuple(part.clone() for part in raw)

        def whole_step() -> None:
            x, y = engine.feed.batch(*held)
            engine.device_step(x, y, self.factor, self.failed_at)

        generators = Generators(engine.state.flat.device)
        before = generators.host()
        try:
            plan = engine.state.plan
            if plan is not None and plan.groups is not None and plan.groups.draws:
                raise RuntimeError("members in groups draw from torch's own generator, which a graph cannot set back")
            replay = self.capture(whole_step, engine.feed.generators)
            if moved(before, generators.host()):
                raise RuntimeError("a step draws random numbers on the host, which a graph would repeat")
            self.replays[shapes] = (held, replay)
        except RuntimeError as reason:
            generators.put(before)
            self.refused[shapes] = first_line(reason)
            log.warning("steps are not captured in a graph: %s", self.refused[shapes])
            if not self.replays:
                self.given_up = True  # what is fastest is measured again, without graphs

    def tell(self, engine: Engine) -> None:
        """Note the runs that failed since the last time; their weights stand still, so that step can be seen again."""
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
            again = engine.raw_gradient(*feed.batch(*self.past[step]))
            engine.body.merge(engine.body.state(), before, torch.ones_like(engine.state.active))
            engine.blame(run, step, *again)
        engine.state.ticks.fill_(now)
        self.failed_at.fill_(-1)

    def _count_back(self, engine: Engine, run: int, step: int, now: int) -> None:
        """Take back what replays after a failure have counted, so that dropout drops what it dropped then.

        Running means of batch norm have moved too and stay so; no pass of training reads them.
        """
        rows = torch.zeros_like(engine.state.active)
        rows[run * engine.members : (run + 1) * engine.members] = True
        counters = {n: t for n, t in engine.body.state().items() if n.endswith((".step", "num_batches_tracked"))}
        beside = engine.adversary is not None and engine.adversary.settings.beside
        passes = 2 if beside or isinstance(engine.feed, WithUnlabelled) else 1
        counted = torch.full_like(engine.state.active, now - step, dtype=torch.int64)
        sampling = engine.state.settings.sampling
        if sampling is not None:
            at = torch.arange(step, now, device=counted.device)
            passed = [sampling.rows(sampling.sample(tick)) for tick in at]
            counted = torch.cat(passed).bincount(minlength=len(counted)) if passed else counted
        earlier = {
            name: (tensor - passes * counted.view(-1, *[1] * (tensor.ndim - 1))).clamp_min(0)
            for name, tensor in counters.items()
        }
        engine.body.merge(counters, earlier, rows)


def graph_steps(engine: Engine) -> GraphSteps | None:
    """Captured steps, on a GPU; the graphs of all shapes share one pool of memory, since no two run at once."""
    if engine.state.flat.device.type != "cuda":
        return None
    watch = "global" if engine.feed.resumable else "thread_local"  # a foreign loader may have threads of its own

    def fresh() -> Capture:
        with on(engine.state.flat.device):
            return functools.partial(captured, pool=torch.cuda.graph_pool_handle(), watch=watch)

    return GraphSteps(fresh=fresh)
