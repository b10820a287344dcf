"""A case: examples, a model and a goal, checked on the way in, and every result tried again on the way out."""

import logging
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import NamedTuple, NoReturn, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Integer
from torch import Tensor

from dissensus import checks
from dissensus.attacks.losses import Climbed
from dissensus.attacks.replays import capture_on
from dissensus.attacks.victim import Model, PoolName, Victim, chosen, device_of, evaluating, told
from dissensus.execution import passes_replayed
from dissensus.execution.graphs import Capture, on

log = logging.getLogger("dissensus")

Box = tuple[float, float]


class Adversarial(NamedTuple):
    """What an attack returns, one row per example, in the order, on the device and in the precision of ``x``.

    Where ``success`` is false the input is the clean one. ``distance`` is that of the returned input from the clean
    one in the norm of the attack: zero for what was wrong from the start, and for failures, so read it where
    ``success`` is true.
    """

    inputs: Float[Tensor, "B *S"]
    success: Bool[Tensor, " B"]
    distance: Float[Tensor, " B"]


class Examples(NamedTuple):
    """Clean inputs, their labels, classes to be reached (the labels again where none are), and where they belong."""

    x: Float[Tensor, "B *S"]
    y: Integer[Tensor, " B"]
    target: Integer[Tensor, " B"]
    place: Integer[Tensor, " B"]


@runtime_checkable
class Aimed(Protocol):
    """Rows of an attack's state that know label and target."""

    @property
    def y(self) -> Tensor:
        """Labels."""
        ...

    @property
    def target(self) -> Tensor:
        """Classes to be reached."""
        ...


class Slope(NamedTuple):
    """At a point: the loss, its gradient, whether the point is adversarial, and the verdict that says so."""

    value: Float[Tensor, " B"]
    gradient: Float[Tensor, "B *S"]
    broken: Bool[Tensor, " B"]
    verdict: Float[Tensor, "B C"]


class Case:
    """Examples on the model's device, the goal, and the questions that attacks ask. No question syncs with the host."""

    def __init__(
        self,
        victim: Victim,
        examples: Examples,
        targeted: bool,
        box: Box,
        home: torch.device,
        capture: Capture | None = None,
    ) -> None:
        self.victim, self.examples, self.targeted, self.home = victim, examples, targeted, home
        self.low, self.high = box
        self.capture = capture
        """How steps are captured in graphs; None: they are not."""
        outputs = victim.outputs(examples.x)
        self.classes = outputs.shape[-1]
        self.clean = victim.verdict(outputs)
        """The verdict on clean inputs."""
        self.lost = torch.zeros((), dtype=torch.int64, device=examples.x.device)
        """How many gradients were not finite."""

    def verdict(self, x: Float[Tensor, "B *S"]) -> Float[Tensor, "B C"]:
        """What the model says of inputs, in a forward pass of its own."""
        return self.victim.verdict(self.victim.outputs(x))

    def reached(self, verdict: Float[Tensor, "B C"], rows: Aimed) -> Bool[Tensor, " B"]:
        """Whether a verdict is what the attack wants: not the label, or the target."""
        return chosen(verdict, rows.target) if self.targeted else told(verdict) & ~chosen(verdict, rows.y)

    def slope(self, at: Float[Tensor, "B *S"], rows: Aimed, loss: Climbed, aimed: bool | None = None) -> Slope:
        """Loss, gradient and success at a point, of one forward and one backward pass.

        Only the inputs get a gradient: parameters keep theirs. A NaN in a gradient counts as zero, and is reported.

        Args:
            at: Where.
            rows: Labels and targets.
            loss: What is climbed.
            aimed: Whether the loss looks at targets; by default, where the attack has a target.
        """
        aimed = self.targeted if aimed is None else aimed
        with torch.enable_grad():
            at = at.detach().requires_grad_()
            outputs = self.victim.outputs(at)
            value = loss(self.victim.scores(outputs), rows.y, rows.target if aimed else None).sum(0)
            (gradient,) = self.gradients(at, value)
        verdict = self.victim.verdict(outputs.detach())
        return Slope(value.detach(), gradient, self.reached(verdict, rows), verdict)

    def gradients(self, at: Tensor, *values: Float[Tensor, " B"]) -> list[Tensor]:
        """Gradients of several values at one point; NaN set to zero, infinities to the largest number."""
        if not all(value.requires_grad for value in values):
            self._refuse_flat()
        found: list[Tensor] = []
        for place, value in enumerate(values):
            more = place + 1 < len(values)
            (gradient,) = torch.autograd.grad(value.sum(), at, retain_graph=more, allow_unused=True)
            if gradient is None:
                self._refuse_flat()
            self.lost.add_((~gradient.isfinite()).flatten(1).any(1).sum())
            found.append(gradient.nan_to_num(nan=0.0))
        return found

    def _refuse_flat(self) -> NoReturn:
        fix = "It detaches them, or runs without gradients. `square` asks for outputs alone."
        checks.refuse("model", "be differentiable with respect to its inputs", "outputs without a gradient", fix)

    def verified(
        self,
        found: Float[Tensor, "B *S"],
        rows: Examples,
        lengths: Callable[[Tensor], Tensor],
        limit: float | Tensor,
    ) -> tuple[Bool[Tensor, " B"], Float[Tensor, " B"]]:
        """Whether candidates hold in a fresh pass (box, length, NaN, prediction), and their lengths."""
        length = lengths(found - rows.x)
        flat = found.flatten(1)
        valid = ((flat >= self.low) & (flat <= self.high) & flat.isfinite()).all(1) & (length <= limit)
        safe = torch.where(valid.view(-1, *[1] * (found.ndim - 1)), found, rows.x)
        return valid & self.reached(self.verdict(safe), rows), length

    def attempted(
        self,
        runs: Iterable[Callable[[Examples], Tensor]],
        lengths: Callable[[Tensor], Tensor],
        limit: float | Tensor = math.inf,
    ) -> Adversarial:
        """What runs of an attack break, one after the other: each takes on the examples that none before has broken.

        Args:
            runs: Each gives a candidate for every example that it is given.
            lengths: The attack's norm.
            limit: The longest perturbation that counts.
        """
        x, y, target, _ = self.examples
        success = self.clean.argmax(-1) == target if self.targeted else self.clean.argmax(-1) != y
        inputs, distance = x.clone(), x.new_zeros(len(x))
        for run in runs:
            left = (~success).nonzero().squeeze(1)
            if len(left) == 0:
                break
            rows = Examples(*(tensor[left] for tensor in self.examples))
            found = run(rows)
            good, length = self.verified(found, rows, lengths, limit)
            won = left[good]
            inputs[won], success[won], distance[won] = found[good], True, length[good]
        self._report()
        return Adversarial(*(tensor.to(self.home) for tensor in (inputs, success, distance)))

    def _report(self) -> None:
        lost = int(self.lost)
        if lost:
            log.warning("%d gradients of the model had NaN or infinities: the attack may be too weak.", lost)


@contextmanager
def opened(model: Model, x: Tensor, y: Tensor, *, target: Tensor | None, pool: PoolName, box: Box) -> Iterator[Case]:
    """A checked case on the model's device, with the model in evaluation mode until the end.

    Works inside ``torch.no_grad()`` and ``torch.inference_mode()`` alike.
    """
    low, high = checked_box(x, box)
    _check_inputs(x, low, high)
    device = device_of(model, x.device)
    capture = capture_on(device)
    replayed = nullcontext() if capture is None else passes_replayed()
    with on(device), torch.inference_mode(False), torch.no_grad(), evaluating(model), replayed:
        labels = _checked_labels(y, len(x), "y").to(device)
        aims = labels if target is None else _checked_labels(target, len(x), "target").to(device)
        own = x.detach().to(device)
        own = own.clone() if own.is_inference() else own
        examples = Examples(own, labels, aims, torch.arange(len(x), device=device))
        case = Case(Victim(model, pool), examples, target is not None, (low, high), x.device, capture)
        silent = int((~told(case.clean)).sum())
        if silent:
            checks.refuse("model", "give numbers for clean inputs", f"NaN for {silent} of {len(x)}")
        for name, classes in (("y", labels), ("target", aims)):
            first, last = int(classes.min()), int(classes.max())
            if first < 0 or last >= case.classes:
                checks.refuse(name, f"be classes from 0 to {case.classes - 1}", f"classes from {first} to {last}")
        yield case


def checked_box(x: Tensor, box: Box) -> Box:
    """The box of valid inputs, in the precision of ``x``."""
    if not isinstance(box, tuple | list) or len(box) != 2:
        checks.refuse("box", "be a pair (low, high)", repr(box))
    low, high = float(box[0]), float(box[1])
    if not low < high:
        checks.refuse("box", "be a pair low < high", repr(tuple(box)))
    dtype = x.dtype if x.is_floating_point() else torch.float32
    return torch.tensor(low, dtype=dtype).item(), torch.tensor(high, dtype=dtype).item()


def _check_inputs(x: Tensor, low: float, high: float) -> None:
    if x.dtype not in (torch.float32, torch.float64):
        whole = not x.is_floating_point()
        fix = "Bytes? Use x.float() / 255." if whole else "Use x.float(); the model may compute in half by itself."
        checks.refuse("x", "be float32 or float64", str(x.dtype), fix, TypeError)
    if x.ndim < 2 or x.numel() == 0:
        fix = "One example? Use x.unsqueeze(0)." if x.ndim == 1 else ""
        checks.refuse("x", "be a batch [B, ...] of one example or more", checks.shape_text(x.shape), fix)
    least, most = (float(edge) for edge in x.detach().aminmax())
    if not (low <= least and most <= high and math.isfinite(most - least)):
        fix = "Standardised inputs? Attack before they are standardised, or give their box=(low, high)."
        checks.refuse("x", f"lie in [{low:g}, {high:g}]", f"values from {least:g} to {most:g}", fix)


def _checked_labels(labels: Tensor, examples: int, name: str) -> Tensor:
    if labels.is_floating_point() or labels.dtype == torch.bool:
        fix = "Soft labels? Use .argmax(-1)." if labels.ndim == 2 else "Use .long()."
        checks.refuse(name, "be whole numbers", str(labels.dtype), fix, TypeError)
    if tuple(labels.shape) != (examples,):
        fix = f"One-hot? Use {name}.argmax(-1)." if labels.ndim == 2 else ""
        checks.refuse(name, f"have shape [B={examples}]", checks.shape_text(labels.shape), fix)
    return labels.detach().long().clone()  # one from inference mode could not serve a backward pass
