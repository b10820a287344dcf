"""Whole training steps as CUDA graphs: batch by index, forward, objective, backward, clipping, update, sums.

Nothing is read back within an epoch, but for progress reports and checkpoints. A run that meets NaN or infinity is
frozen on the device at that very step, and told at the end of the epoch.
"""

import logging
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from dissensus.data.batches import TensorBatches
from dissensus.execution.skeleton import first_line
from dissensus.train.engine import Engine, culprit
from dissensus.train.history import Failure

log = logging.getLogger("dissensus")

WARM_UP = 3
"""Real steps that run eagerly before a step of their shape is captured."""

Capture = Callable[[Callable[[], None]], Callable[[], None]]
"""Turns a function into one that replays it, without running it."""


def captured_on_cuda(function: Callable[[], None]) -> Callable[[], None]:
    """A CUDA graph of a function, replayed by calling what is returned."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay


class GraphSteps:
    """Replays captured steps, one graph per batch size; falls back to eager steps where capture fails."""

    def __init__(self, capture: Capture = captured_on_cuda) -> None:
        self.capture = capture
        self.refused = ""
        self.forget()

    def forget(self) -> None:
        """Shapes or branches have changed: capture anew."""
        self.replays: dict[int, tuple[Tensor, Callable[[], None]]] = {}
        self.seen: dict[int, int] = {}

    def steps(self, engine: Engine, factors: Tensor) -> Iterator[int]:
        """Do the steps of the rest of an epoch; give the number of examples of each."""
        feed = engine.feed
        assert isinstance(feed, TensorBatches)
        if not self.replays:  # what graphs read and write must stay where it is
            self.factor = torch.ones((), dtype=factors.dtype, device=factors.device)
            self.counter = torch.zeros((), dtype=torch.int64, device=factors.device)
            self.failed_at = torch.zeros(engine.runs, dtype=torch.int64, device=factors.device)
        first, chosen = engine.in_epoch, feed.chosen(engine.epoch)
        self.chosen = chosen
        self.counter.fill_(engine.steps)
        self.failed_at.fill_(-1)
        for examples, factor in zip(chosen[first:], factors[first:], strict=True):
            self._step(engine, feed, examples, factor)
            yield examples.shape[1]
        self.tell(engine)

    def _step(self, engine: Engine, feed: TensorBatches, examples: Tensor, factor: Tensor) -> None:
        size = examples.shape[1]
        self.seen[size] = self.seen.get(size, 0) + 1
        if not self.refused and size not in self.replays and self.seen[size] > WARM_UP:
            self._prepare(engine, feed, examples)
        if size in self.replays:
            index, replay = self.replays[size]
            index.copy_(examples)
            self.factor.copy_(factor)
            replay()
        else:
            engine.step(*feed.gathered(examples), factor)
            self.counter.add_(1)

    def _prepare(self, engine: Engine, feed: TensorBatches, examples: Tensor) -> None:
        """Capture the step of a batch size, or say in one line why not."""
        index = examples.clone()

        def whole_step() -> None:
            x, y = feed.gathered(index)
            _, parts, grad = engine.gradient(x, y)
            with torch.no_grad():
                rows = engine.active.view(engine.runs, engine.members)
                fine = (parts.total.isfinite() & grad.view(engine.runs, -1).sum(1).isfinite()) | ~rows.any(1)
                self.failed_at.copy_(torch.where(fine | (self.failed_at >= 0), self.failed_at, self.counter))
                rows.logical_and_(fine.unsqueeze(1))
                engine.update(torch.where(engine.active.unsqueeze(1), grad, 0.0), self.factor)
                engine.add(parts, index.shape[1])
                self.counter.add_(1)

        try:
            self.replays[examples.shape[1]] = (index, self.capture(whole_step))
        except RuntimeError as reason:
            self.refused = first_line(reason)
            log.warning("steps are not captured in a graph: %s", self.refused)

    def tell(self, engine: Engine) -> None:
        """Note the runs that failed since the last time; their weights stand still, so that step can be seen again."""
        feed, failed = engine.feed, self.failed_at >= 0
        if not bool(failed.any()):
            return
        assert isinstance(feed, TensorBatches)
        engine.freeze(failed)
        before = {name: tensor.clone() for name, tensor in engine.body.state().items()}
        base = engine.steps - engine.in_epoch
        for run in failed.nonzero().flatten().tolist():
            step = int(self.failed_at[run])
            x, y = feed.gathered(self.chosen[step - base])
            outputs = engine.outputs(x, engine.body.views(engine.flat), per_run=feed.per_run)
            parts = engine.losses(outputs, y if engine.runs > 1 else y.unsqueeze(0), engine.hyper)
            (grad,) = torch.autograd.grad(parts.total[run], engine.flat)
            own = grad.view(engine.runs, engine.members, -1)[run]
            engine.failures[engine.run_ids[run]] = Failure(step, *culprit(outputs[run], parts, own, run))
        engine.body.merge(engine.body.state(), before, torch.ones_like(engine.active))
        self.failed_at.fill_(-1)


def graph_steps(engine: Engine) -> GraphSteps | None:
    """Captured steps where they are possible: on CUDA, with tensors as data and no augmentation."""
    feed = engine.feed
    if engine.flat.device.type != "cuda" or not isinstance(feed, TensorBatches) or feed.augment is not None:
        return None
    return GraphSteps()
