"""Which backend runs members: measured on the first batch or chosen by a rule, remembered, reported."""

import functools
import logging
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dissensus.calls import NetworkInputs, first_tensor, mapped, rows, tensors
from dissensus.execution.backends import BACKENDS, LOOP, Run
from dissensus.execution.graphs import captured
from dissensus.execution.skeleton import Skeleton, Tensors, first_line
from dissensus.execution.tf32 import tf32
from dissensus.execution.weights import Weights
from dissensus.randomness import generators_kept
from dissensus.storage import Formats, read_record, write_record

log = logging.getLogger("dissensus")

FORMATS = Formats(newest=1, oldest=0)
"""Of files of choices."""

MOST_MEASURED = 64
"""The largest number of members that is measured; the backend that is fastest for them is used for more."""


class Choice(NamedTuple):
    """The chosen backend, and the measurements behind the choice."""

    backend: str
    milliseconds: dict[str, float]
    refused: dict[str, str]

    def __str__(self) -> str:
        times = ", ".join(f"{name} {ms:.2f} ms" for name, ms in self.milliseconds.items()) or "not measured"
        why = "".join(f"; {name} refused: {reason}" for name, reason in self.refused.items())
        return f"backend {self.backend} ({times}{why})"


Mode = tuple[object, ...]
"""How members are used: the backend asked for, train or eval, with gradients or without, where, and in what precision.

A backend that runs in float32 may fail under autocast: ``vmap`` has no rule for some operations on mixed dtypes.
"""


class Choices(dict[Mode, Choice]):
    """Choices so far, by mode of use.

    Two measurements of one computation may choose differently, and backends differ in last bits. So a training that
    may be interrupted keeps its choices in a file (`keep_in`), and uses them again when it goes on.
    """

    file: Path | None = None

    network = ""

    def keep_in(self, file: Path, network: str) -> None:
        """Read the choices that a file holds for a network (`StackedMembers.identity`), and write new ones there.

        A file that is damaged or belongs to another network is overwritten: choices affect speed and rounding only.
        """
        try:
            stored = read_record(file, FORMATS)
            made = {
                tuple(mode): Choice(str(name), dict(times), dict(why)) for mode, (name, times, why) in stored["choices"]
            }
            if stored["network"] == network and all(choice.backend in BACKENDS for choice in made.values()):
                self.update(made)
        except FileNotFoundError:
            pass
        except (OSError, ValueError, TypeError, KeyError) as reason:
            log.warning("backends are chosen anew, which may change the last bits of results: %s", reason)
        self.file, self.network = file, network
        self._write()

    def add(self, mode: Mode, choice: Choice) -> None:
        """Note a choice."""
        self[mode] = choice
        self._write()

    def _write(self) -> None:
        if self.file is not None and self:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            choices = [(mode, choice) for mode, choice in self.items()]
            write_record(self.file, {"format": FORMATS.newest, "network": self.network, "choices": choices})


class TrialPass(NamedTuple):
    """A pass as it will be used, on copies of the buffers, so that measuring does not change them."""

    skeleton: Skeleton
    weights: Weights
    buffers: Tensors
    x: NetworkInputs
    per_member: bool

    def outputs(self, run: Run) -> tuple[Tensor, Tensors]:
        """Outputs, and the buffers after the pass."""
        copies = {name: tensor.clone() for name, tensor in self.buffers.items()}
        return run(self.skeleton, self.weights, copies, self.x, self.per_member), copies

    def whole(self, run: Run) -> None:
        """Forward pass, and backward pass to weights and inputs if gradients are enabled."""
        # A captured pass must not lead out of its graph.
        x = mapped(lambda tensor: tensor.detach().requires_grad_(tensor.requires_grad), self.x)
        output, _ = self._replace(x=x).outputs(run)
        leaves = [*self.weights.leaves(), *(tensor for tensor in tensors(x) if tensor.requires_grad)]
        if output.requires_grad and leaves:
            torch.autograd.grad(output.sum(), leaves, allow_unused=True)


def chosen(
    skeleton: Skeleton,
    weights: Weights,
    buffers: Tensors,
    x: NetworkInputs,
    per_member: bool,
    *,
    replayed: bool,
    by_rule: bool = False,
    rounds: int = 5,
) -> Choice:
    """The fastest of the backends whose outputs are the loop's, or the loop if none is 5 % faster.

    A pass is measured as it will be used: forward and backward if gradients are enabled, otherwise forward alone, and
    replayed from a CUDA graph if it will be. Rounds are interleaved, so that a disturbance of the machine affects every
    candidate.

    ``by_rule`` measures nothing: ``batched`` for networks without convolutions, ``streams`` in CUDA graphs, else the
    loop. The same computation then always runs in the same way. On a device that is neither a CPU nor a CUDA GPU, the
    loop runs, and nothing is measured.
    """
    # Nothing here waits for another device, so its times mean nothing.
    if first_tensor(x).device.type not in ("cpu", "cuda"):
        return Choice(LOOP.name, {}, {})
    members = min(len(weights), MOST_MEASURED)
    if members < len(weights):
        weights, x = weights.first(members), rows(x, slice(members)) if per_member else x
        buffers = {name: tensor[:members] for name, tensor in buffers.items()}
    trial = TrialPass(skeleton, weights, buffers, x, per_member)
    milliseconds: dict[str, float] = {}
    with generators_kept(first_tensor(x).device), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that vmap may be slow here: that is what is being measured
        candidates, refused = _candidates(trial)
        if not by_rule and len(candidates) > 1:
            milliseconds = _measured(trial, candidates, refused, replayed, rounds)
    if by_rule:
        best = _ruled(skeleton, candidates, replayed)
    else:
        best = min(milliseconds, key=milliseconds.__getitem__, default=LOOP.name)
    if LOOP.name in milliseconds and milliseconds[best] > 0.95 * milliseconds[LOOP.name]:
        best = LOOP.name
    choice = Choice(best, milliseconds, refused)
    log.info("%s", choice)
    return choice


def _ruled(skeleton: Skeleton, candidates: list[str], replayed: bool) -> str:
    convolves = any(isinstance(layer, nn.modules.conv._ConvNd) for layer in skeleton.network.modules())
    if "batched" in candidates and not convolves:
        return "batched"
    return "streams" if replayed and "streams" in candidates else LOOP.name


def _candidates(trial: TrialPass) -> tuple[list[str], dict[str, str]]:
    """Backends that give the loop's outputs, and the reasons of the others.

    They are compared without TF32, whose roundings differ from backend to backend and add up over layers.
    """
    with torch.no_grad(), tf32(on=False):
        (reference, buffers), (repeated, _) = trial.outputs(LOOP.run), trial.outputs(LOOP.run)
        repeatable = torch.equal(reference, repeated)
        candidates, refused = [LOOP.name], {}
        most = max(tolerance(t.dtype) for t in (reference, *trial.weights.tensors(), *buffers.values()))
        for name, backend in BACKENDS.items():
            if backend is LOOP or (backend.on_cuda_only and not first_tensor(trial.x).is_cuda):
                continue
            try:
                output, written = trial.outputs(backend.run)
            except Exception as error:  # the loop has run, so the network itself is sound
                refused[name] = first_line(error)
                continue
            if repeatable and not close(output, reference, most):
                refused[name] = "its outputs differ from the loop's"
            elif repeatable and not all(close(written[name_of], buffers[name_of], most) for name_of in buffers):
                refused[name] = "what it writes to buffers differs from the loop's"
            else:
                candidates.append(name)
    return candidates, refused


def _measured(
    trial: TrialPass, candidates: list[str], refused: dict[str, str], replayed: bool, rounds: int
) -> dict[str, float]:
    if replayed:
        return _replays(trial, candidates, refused, rounds)
    times: dict[str, list[float]] = {name: [] for name in candidates}
    started = time.perf_counter()
    for turn in range(rounds + 1):
        for name in [name for name in candidates if name not in refused]:
            try:
                elapsed = _timed(functools.partial(trial.whole, BACKENDS[name].run), first_tensor(trial.x))
            except RuntimeError as error:
                if name == LOOP.name or turn:  # the network itself, or not enough memory
                    raise
                refused[name] = first_line(error)  # its backward pass: the forward pass has run before
                continue
            if turn:  # the first turn warms up
                times[name].append(elapsed)
        if turn >= 2 and time.perf_counter() - started > 2.0:
            break
    return {name: 1e3 * median(seconds) for name, seconds in times.items() if seconds}


def _replays(trial: TrialPass, candidates: list[str], refused: dict[str, str], rounds: int) -> dict[str, float]:
    """One candidate after the other: a graph holds the memory of its pass, and nothing disturbs its replays."""
    times: dict[str, float] = {}
    for name in candidates:
        run_pass = functools.partial(trial.whole, BACKENDS[name].run)
        try:
            run_pass()  # libraries set themselves up
            replay = captured(run_pass)
        except RuntimeError as error:
            refused[name] = first_line(error)
            continue
        times[name] = 1e3 * median([_timed(replay, first_tensor(trial.x)) for _ in range(rounds + 1)][1:])
        del replay
    return times


def tolerance(dtype: torch.dtype) -> float:
    """How far numbers may differ that were computed with weights of this precision."""
    return {torch.float64: 1e-9, torch.float32: 1e-3}.get(dtype, 5e-2) if dtype.is_floating_point else 0.0


def close(output: Tensor, reference: Tensor, tolerance: float) -> bool:
    """Whether outputs are those of a reference, relative to its largest number."""
    if not reference.numel() or not reference.is_floating_point():
        return torch.equal(output, reference)
    scale = reference.detach().abs().amax().clamp_min(1e-6).item()
    return output.shape == reference.shape and torch.allclose(
        output.to(reference.dtype), reference, rtol=tolerance, atol=tolerance * scale, equal_nan=True
    )


def _timed(function: Callable[[], None], x: Tensor) -> float:
    if x.is_cuda:
        torch.cuda.synchronize(x.device)
    start = time.perf_counter()
    function()
    if x.is_cuda:
        torch.cuda.synchronize(x.device)
    return time.perf_counter() - start
