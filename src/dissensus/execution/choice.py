"""Which backend runs members: measured on the first batch or chosen by a rule, remembered, reported."""

import functools
import logging
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dissensus.calls import NetworkInputs, first_tensor, mapped, rows, tensors
from dissensus.execution.backends import BACKENDS, COMPILED, LOOP, Run, backend_named
from dissensus.execution.graphs import captured
from dissensus.execution.skeleton import Skeleton, Tensors, first_line
from dissensus.execution.tf32 import tf32
from dissensus.execution.ways import Ways
from dissensus.execution.weights import Weights
from dissensus.randomness import generators_kept
from dissensus.storage import Formats, read_record, write_record

log = logging.getLogger("dissensus")

FORMATS = Formats(newest=1, oldest=0)
"""Of files of choices."""

MOST_MEASURED = 64
"""The largest number of members that is measured; the backend that is fastest for them is used for more."""

FEWEST_ROUNDS, ENOUGH_ROUNDS, MOST_ROUNDS = 2, 3, 30
"""Passes of a backend that are timed, after one that warms up: at least, before anything is settled, and at most."""
LEAST_SECONDS, SECONDS, MOST_SECONDS = 1.0, 2.0, 10.0
"""Time that measuring may take: at least (a small job), if nobody knows how many passes follow, and at most."""
SHARE = 0.02
"""Share of the time of all passes that measuring may take, and by which a choice may be slower than the best."""
COMPILING_SECONDS, COMPILING_SECONDS_PER_LAYER = 20.0, 0.5
"""Time that compiling a pass takes, about, if its network has few layers; and per layer if it has many."""
COMPILING_GAINS = 0.1
"""Share of a pass that compiling may save, which decides whether it is tried."""
KERNELS_GAIN = 0.3
"""The same for backends that compile kernels of their own."""
FEWEST_COMPILED = 100
"""Passes that must follow for compiling to be considered at all."""
HOPELESS = 3.0
"""A backend that takes this many times as long as another is not timed any further."""
LONG = 0.5
"""Seconds of a pass beside which what libraries do at a first call does not count: then the first pass is timed, too.

Large networks are few passes per second, and a short job must not wait for rounds of passes that each take long.
"""


class Choice(NamedTuple):
    """The chosen backend, and the measurements behind the choice."""

    backend: str
    milliseconds: dict[str, float]
    refused: dict[str, str]
    seconds: float = 0.0
    """Time that measuring took; not kept in files."""

    def __str__(self) -> str:
        times = ", ".join(f"{name} {ms:.2f} ms" for name, ms in self.milliseconds.items()) or "not measured"
        how = "measured" if self.milliseconds else "compiled and tried"
        times += f"; {how} in {self.seconds:.1f} s" if self.seconds else ""
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

    def __init__(self) -> None:
        super().__init__()
        self.ways = Ways()
        """Ways of operations that have several, which the chosen backends share."""
        self._written_ways: dict[str, str] = {}
        self.joined: dict[Mode, str | None] = {}
        """With several runs whose members share weights: the backend whose passes are joined, by mode; None: none."""

    def keep_in(self, file: Path, network: str) -> None:
        """Read the choices that a file holds for a network (`StackedMembers.identity`), and write new ones there.

        A file that is damaged or belongs to another network is overwritten: choices affect speed and rounding only.
        """
        try:
            stored = read_record(file, FORMATS)
            made = {
                tuple(mode): Choice(str(name), dict(times), dict(why)) for mode, (name, times, why) in stored["choices"]
            }
            joined = {tuple(mode): name for mode, name in stored.get("joined", ())}
            ways = {str(operation): str(way) for operation, way in dict(stored.get("ways", {})).items()}
            names = [*(choice.backend for choice in made.values()), *(name for name in joined.values() if name)]
            if stored["network"] == network and all(map(backend_named, names)):
                self.update(made)
                self.joined.update(joined)
                self.ways.update(ways)
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

    def join(self, mode: Mode, backend: str | None) -> None:
        """Note whether passes of several runs are joined."""
        self.joined[mode] = backend
        self._write()

    def keep_ways(self) -> None:
        """Write ways that passes of further shapes have chosen since."""
        if dict(self.ways) != self._written_ways:
            self._write()

    def _write(self) -> None:
        self._written_ways = dict(self.ways)
        if self.file is not None and self:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            choices = [(mode, choice[:3]) for mode, choice in self.items()]
            content = {"format": FORMATS.newest, "network": self.network, "choices": choices}
            further = {"joined": list(self.joined.items()), "ways": dict(self.ways)}
            write_record(self.file, content | {name: value for name, value in further.items() if value})


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
        """Forward pass, and backward pass to weights, shared ones too, and inputs if gradients are enabled."""
        self.results(run)

    def results(self, run: Run) -> tuple[Tensor, Tensors, list[Tensor]]:
        """Outputs, the buffers after the pass, and the gradients of a whole pass, if they are enabled."""
        # A captured pass must not lead out of its graph.
        x = mapped(_new_leaf, self.x)
        shared = {n: _new_leaf(t) for n, t in self.skeleton.shared_tensors().items() if t.requires_grad}
        with self.skeleton.lending(shared):
            output, written = self._replace(x=x).outputs(run)
        further = [tensor for tensor in [*shared.values(), *tensors(x)] if tensor.requires_grad]
        leaves = [*self.weights.leaves(), *further]
        if not output.requires_grad or not leaves:
            return output, written, []
        # A gradient of full size, as losses give it. That of a sum is one number, and ranks backends otherwise.
        grads = torch.autograd.grad((output * output.detach()).sum(), leaves, allow_unused=True)
        return output, written, [grad for grad in grads if grad is not None]


def _new_leaf(tensor: Tensor) -> Tensor:
    """The same numbers as a tensor that leads nowhere."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


def chosen(
    skeleton: Skeleton,
    weights: Weights,
    buffers: Tensors,
    x: NetworkInputs,
    per_member: bool,
    *,
    replayed: bool,
    by_rule: bool = False,
    passes: int | None = None,
) -> Choice:
    """The fastest of the backends whose outputs are the loop's, or the loop if none is 5 % faster.

    A pass is measured as it will be used: forward and backward if gradients are enabled, otherwise forward alone, and
    replayed from a CUDA graph if it will be. See `interleaved` for the number of passes that are timed; ``passes`` is
    the number that will follow, if it is known.

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
    started = time.perf_counter()
    with generators_kept(first_tensor(x).device), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that vmap may be slow here: that is what is being measured
        candidates, refused, repeatable = _candidates(trial)
        if repeatable and first_tensor(x).is_cuda and not by_rule:
            candidates = _with_right_gradients(trial, candidates, refused)
        if not by_rule and len(candidates) > 1:
            milliseconds = _measured(trial, candidates, refused, replayed, passes)
        if milliseconds and passes is not None:
            _measure_compiling(trial, milliseconds, refused, replayed, passes)
    if by_rule:
        best = _ruled(skeleton, candidates, replayed)
    else:
        best = min(milliseconds, key=milliseconds.__getitem__, default=LOOP.name)
    if LOOP.name in milliseconds and milliseconds[best] > 0.95 * milliseconds[LOOP.name]:
        best = LOOP.name
    choice = Choice(best, milliseconds, refused, time.perf_counter() - started if milliseconds else 0.0)
    log.info("%s", choice)
    return choice


def _ruled(skeleton: Skeleton, candidates: list[str], replayed: bool) -> str:
    convolves = any(isinstance(layer, nn.modules.conv._ConvNd) for layer in skeleton.network.modules())
    if "batched" in candidates and not convolves:
        return "batched"
    return "streams" if replayed and "streams" in candidates else LOOP.name


def _candidates(trial: TrialPass) -> tuple[list[str], dict[str, str], bool]:
    """Backends that give the loop's outputs, the reasons of the others, and whether equal passes are equal.

    They are compared without TF32, whose roundings differ from backend to backend and add up over layers.
    """
    on_cuda = first_tensor(trial.x).is_cuda
    with torch.no_grad(), tf32(on=False):
        (reference, buffers), (repeated, _) = trial.outputs(LOOP.run), trial.outputs(LOOP.run)
        repeatable = torch.equal(reference, repeated)
        candidates, refused = [LOOP.name], {}
        most = max(tolerance(t.dtype) for t in (reference, *trial.weights.tensors(), *buffers.values()))
        for name, backend in BACKENDS.items():
            elsewhere = backend.on_cpu_only if on_cuda else backend.on_cuda_only
            if backend is LOOP or elsewhere or backend.seconds_to_compile is not None:
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
    return candidates, refused, repeatable


def _with_right_gradients(trial: TrialPass, candidates: list[str], refused: dict[str, str]) -> list[str]:
    """Candidates whose gradients are the loop's.

    Kernels of a GPU may have outputs without an error and a derivative with one, as attention under ``vmap`` had.
    """
    if not torch.is_grad_enabled() or len(candidates) == 1:
        return candidates
    try:
        reference = trial.results(LOOP.run)[2]
    except torch.OutOfMemoryError:  # measuring says so, and goes on as it can
        return candidates
    most = max(map(tolerance, {torch.bfloat16, *(grad.dtype for grad in reference)}))  # TF32, and sums in another order
    right = [LOOP.name]
    for name in candidates[1:]:
        try:
            grads = trial.results(_run_of(name))[2]
        except Exception as error:  # its backward pass: the forward pass has run before
            refused[name] = first_line(error)
            continue
        if alike(grads, reference, most):
            right.append(name)
        else:
            refused[name] = "its gradients differ from the loop's"
    return right


def _measure_compiling(
    trial: TrialPass, milliseconds: dict[str, float], refused: dict[str, str], replayed: bool, passes: int
) -> None:
    """Measure backends that compile kernels beside the fastest of the others, where many passes follow.

    Their gradients are compared too. Whatever fails is refused, with its reason.
    """
    on_cuda = first_tensor(trial.x).is_cuda
    for name, backend in BACKENDS.items():
        elsewhere = backend.on_cpu_only if on_cuda else backend.on_cuda_only
        best = min(milliseconds, key=milliseconds.__getitem__)
        if elsewhere or backend.seconds_to_compile is None or passes < FEWEST_COMPILED:
            continue
        seconds = backend.seconds_to_compile(trial.skeleton.network)
        if KERNELS_GAIN * passes * milliseconds[best] / 1e3 < 2 * seconds:
            continue
        problem = _problem(trial, best, name)
        if problem:
            refused[name] = problem
        else:
            milliseconds.update(_measured(trial, [best, name], refused, replayed, passes))


def _run_of(name: str) -> Run:
    backend = backend_named(name)
    assert backend is not None
    return backend.run


def _measured(
    trial: TrialPass, candidates: list[str], refused: dict[str, str], replayed: bool, passes: int | None
) -> dict[str, float]:
    if replayed:
        return _replays(trial, candidates, refused)

    def timed(name: str, turn: int) -> float | None:
        try:
            return _timed(functools.partial(trial.whole, _run_of(name)), first_tensor(trial.x))
        except Exception as error:  # a compiler may raise anything
            if name == LOOP.name or turn:  # the network itself, or not enough memory
                raise
            refused[name] = first_line(error)  # its backward pass: the forward pass has run before
            return None

    times = interleaved(timed, candidates, passes)
    return {name: 1e3 * typical(seconds) for name, seconds in times.items()}


def interleaved(
    timed: Callable[[str, int], float | None], candidates: Iterable[str], passes: int | None
) -> dict[str, list[float]]:
    """Seconds of candidates that take turns, until it is settled which is the fastest.

    The first turn warms up; it counts only for passes that are `LONG`. A disturbance of the machine affects every
    candidate, and the order rotates, since one may leave caches and memory in another state than the other. Measuring
    ends when it is `settled` who is the fastest, after `MOST_ROUNDS`, or when it has taken its time: `SHARE` of the
    passes that follow, if their number is known, between `LEAST_SECONDS` and `MOST_SECONDS`. Each candidate has
    `FEWEST_ROUNDS`, or one if passes are `LONG`, unless it is `HOPELESS`.

    Args:
        timed: ``(candidate, turn) -> seconds``; None if the candidate fails, which is allowed in the first turn.
        candidates: Their names.
        passes: The number of passes that follow; None if it is unknown.
    """
    times: dict[str, list[float]] = {name: [] for name in candidates}
    racing, spent = list(times), 0.0
    for turn in range(MOST_ROUNDS + 1):
        first = turn % len(racing)
        for name in [*racing[first:], *racing[:first]]:
            elapsed = timed(name, turn)
            if elapsed is None:
                del times[name]
                racing.remove(name)
                continue
            spent += elapsed
            if turn == 1 and elapsed < LONG:
                times[name].clear()  # the first pass was long because libraries set themselves up
            if turn or elapsed >= LONG:
                times[name].append(elapsed)
        if any(not times[name] for name in racing):
            continue
        leader = median(min((times[name] for name in racing), key=typical))
        racing = [name for name in racing if min(times[name]) < HOPELESS * leader]
        rounds = min(len(times[name]) for name in racing)
        late = rounds >= (1 if leader >= LONG else FEWEST_ROUNDS) and spent > seconds_allowed(times, passes)
        if late or (rounds >= ENOUGH_ROUNDS and settled(times)) or len(racing) == 1:
            break
    return {name: seconds for name, seconds in times.items() if seconds}


def typical(seconds: Sequence[float]) -> float:
    """The lower quartile of times: what disturbs a machine only ever adds to them.

    >>> typical([3.0, 1.0, 9.0, 1.1, 1.2])
    1.1
    """
    return sorted(seconds)[len(seconds) // 4]


def settled(times: Mapping[str, Sequence[float]]) -> bool:
    """Whether the fastest would still be so, up to `SHARE`, if the others were as fast as they ever were.

    >>> settled({"loop": [2.0, 2.1, 2.0], "vmap": [1.0, 1.1, 1.2]}), settled({"loop": [2.0, 2.1], "vmap": [1.9, 2.2]})
    (True, False)
    """
    best = min(times, key=lambda name: typical(times[name]))
    others = [min(seconds) for name, seconds in times.items() if name != best]
    return not others or median(times[best]) <= (1 + SHARE) * min(others)


def seconds_allowed(times: Mapping[str, Sequence[float]], passes: int | None) -> float:
    """Time that measuring may take.

    >>> times = {"loop": [0.01], "vmap": [0.02]}
    >>> [seconds_allowed(times, passes) for passes in (None, 10, 20_000, 10**6)]
    [2.0, 1.0, 4.0, 10.0]
    """
    if passes is None:
        return SECONDS
    fastest = min(map(typical, times.values()))
    return min(max(SHARE * passes * fastest, LEAST_SECONDS), MOST_SECONDS)


def _replays(trial: TrialPass, candidates: list[str], refused: dict[str, str]) -> dict[str, float]:
    """One candidate after the other: a graph holds the memory of its pass, and nothing disturbs its replays."""
    times: dict[str, float] = {}
    for name in candidates:
        run_pass = functools.partial(trial.whole, _run_of(name))
        try:
            run_pass()  # libraries set themselves up
            replay = captured(run_pass)
        except Exception as error:  # a compiler may raise anything
            refused[name] = first_line(error)
            continue
        times[name] = 1e3 * median([_timed(replay, first_tensor(trial.x)) for _ in range(6)][1:])
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


def with_compiled(choice: Choice, trial: TrialPass, *, always: bool, passes: int | None, replayed: bool) -> Choice:
    """A choice that may be the compiled form of the backend that was chosen.

    Compiling takes from seconds to minutes. It is tried where what it may save in the passes that follow is worth twice
    that, since the last batch of an epoch may have another shape; the compiled form is chosen if it is 5 % faster.
    ``always`` compiles without measuring. What fails, and what has other outputs, buffers or gradients, is refused.

    Args:
        choice: The choice among backends that are not compiled.
        trial: A pass as it will be used.
        always: Whether to use the compiled form wherever there is one.
        passes: The number of passes that follow; None if it is unknown.
        replayed: Whether passes will be replayed from a CUDA graph.
    """
    if choice.backend not in COMPILED:
        return choice._replace(refused={**choice.refused, "compiled": f"backend {choice.backend} has no compiled form"})
    name, form = choice.backend, COMPILED[choice.backend].name
    started = time.perf_counter()
    with generators_kept(first_tensor(trial.x).device), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler warns about itself
        if not always:
            if passes is None or passes < FEWEST_COMPILED:
                return choice
            best = choice.milliseconds.get(name)
            seconds = _second_pass(trial, name) if best is None else best / 1e3
            if COMPILING_GAINS * passes * seconds < 2 * seconds_to_compile(trial.skeleton.network):
                return choice
        log.info("members are being compiled, which may take a minute")
        problem = _problem(trial, name, form)
        refused = {**choice.refused, form: problem} if problem else dict(choice.refused)
        milliseconds = dict(choice.milliseconds)
        if not problem and not always:
            milliseconds |= _measured(trial, [name, form], refused, replayed, passes)
    faster = form in milliseconds and milliseconds[form] <= 0.95 * milliseconds[name]
    compiled = form not in refused and (always or faster)
    result = Choice(form if compiled else name, milliseconds, refused, choice.seconds + time.perf_counter() - started)
    log.info("%s", result)
    return result


def seconds_to_compile(network: nn.Module) -> float:
    """About how long compiling takes.

    >>> seconds_to_compile(nn.Linear(1, 1)), seconds_to_compile(nn.Sequential(*[nn.ReLU() for _ in range(100)]))
    (20.0, 50.0)
    """
    layers = sum(not list(module.children()) for module in network.modules())
    return max(COMPILING_SECONDS, COMPILING_SECONDS_PER_LAYER * layers)


def _second_pass(trial: TrialPass, name: str) -> float:
    run_pass = functools.partial(trial.whole, _run_of(name))
    return [_timed(run_pass, first_tensor(trial.x)) for _ in range(2)][1]


def _problem(trial: TrialPass, name: str, form: str) -> str:
    """Why a backend that compiles cannot be used; empty if it gives what another backend gives."""
    device = first_tensor(trial.x).device
    try:
        with generators_kept(device):
            repeated = trial.results(_run_of(name))[0]
        with generators_kept(device):
            expected, buffers, gradients = trial.results(_run_of(name))
        output, written, grads = trial.results(_run_of(form))
    except Exception as error:  # a compiler may raise anything, and results of two passes may not fit into memory
        return compiler_reason(error)
    most = max(tolerance(t.dtype) for t in (expected, *trial.weights.tensors(), *buffers.values()))
    if expected.is_cuda or torch.is_autocast_enabled(device.type):
        most = max(most, tolerance(torch.bfloat16))  # TF32 and sums in another order
    if not close(repeated, expected, most):
        return ""  # it draws numbers that no key determines
    if not close(output, expected, most):
        return f"its outputs differ from those of backend {name}"
    if not all(close(written[name_of], buffers[name_of], most) for name_of in buffers):
        return f"what it writes to buffers differs from backend {name}"
    return "" if alike(grads, gradients, most) else f"its gradients differ from those of backend {name}"


def compiler_reason(error: Exception) -> str:
    """Why a pass cannot be compiled: the first line of an error, and its explanation if it has one.

    >>> compiler_reason(RuntimeError("Unsupported call\\n  Explanation: It is not known.\\n  Hint: Do not."))
    'Unsupported call: It is not known.'
    """
    lines = (line.strip() for line in str(error).splitlines())
    why = next((line.removeprefix("Explanation: ") for line in lines if line.startswith("Explanation: ")), "")
    return f"{first_line(error)}: {why}"[:300] if why else first_line(error)


def alike(gradients: Sequence[Tensor], reference: Sequence[Tensor], most: float) -> bool:
    """Whether gradients agree, each as a whole: single numbers of them may be all rounding.

    So may whole tensors be whose gradient is zero, such as a convolution's bias before batch norm. What differs by
    little beside all gradients together agrees, too. Tensors whose reference is not finite are not compared.
    """
    if len(gradients) != len(reference):
        return False
    sizes = [torch.linalg.vector_norm(tensor.double()) for tensor in reference]
    together = torch.stack(sizes).nan_to_num(0.0, 0.0).norm() if sizes else torch.zeros(())
    return all(
        not bool(size.isfinite())
        or bool(torch.linalg.vector_norm((ours - theirs).double()) <= most * torch.maximum(6 * size, together))
        for ours, theirs, size in zip(gradients, reference, sizes, strict=True)
    )
