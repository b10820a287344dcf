"""An attack's problem: a model, examples and a goal. Inputs are checked on entry, and results are tested on exit."""

import logging
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import NamedTuple, NoReturn, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Integer
from torch import Tensor, nn

from dissensus import calls, checks
from dissensus.attacks.losses import AttackLoss
from dissensus.attacks.norms import linf_lengths
from dissensus.attacks.rows import where_rows
from dissensus.attacks.target_model import (
    Model,
    PoolName,
    TargetModel,
    device_of,
    evaluation_mode,
    is_valid,
    predicts,
)
from dissensus.execution import passes_replayed
from dissensus.execution.graphs import Capture, capture_on, on

log = logging.getLogger("dissensus")

Box = tuple[float, float]


class Adversarial(NamedTuple):
    """Result of an attack: one row per example, in the order, on the device and in the precision of ``x``.

    Where ``success`` is false, the input is the clean one. ``distance`` is the distance between the returned and the
    clean input in the norm of the attack. It is zero for examples that were misclassified before the attack, and for
    failures; read it where ``success`` is true.
    """

    inputs: Float[Tensor, "B *S"]
    success: Bool[Tensor, " B"]
    distance: Float[Tensor, " B"]


Attack = Callable[..., Adversarial]
"""``(model, x, y, *, ...) -> Adversarial``."""


class Examples(NamedTuple):
    """Clean inputs, labels, target classes (the labels if the attack is untargeted) and positions in the batch."""

    x: Float[Tensor, "B *S"]
    y: Integer[Tensor, " B"]
    target: Integer[Tensor, " B"]
    position: Integer[Tensor, " B"]


@runtime_checkable
class HasLabels(Protocol):
    """Rows of an attack's state: anything with labels and target classes."""

    @property
    def y(self) -> Tensor:
        """Labels."""
        ...

    @property
    def target(self) -> Tensor:
        """Target classes."""
        ...


class LossAtPoint(NamedTuple):
    """Loss at a point, its gradient, whether the point is adversarial, and the pooled scores there."""

    value: Float[Tensor, " B"]
    gradient: Float[Tensor, "B *S"]
    is_adversarial: Bool[Tensor, " B"]
    scores: Float[Tensor, "B C"]


class AttackProblem:
    """Examples on the model's device, the goal, and everything attacks compute with the model.

    No method synchronises with the host, except `solve` and `verify`.
    """

    def __init__(
        self,
        model: TargetModel,
        examples: Examples,
        targeted: bool,
        box: Box,
        input_device: torch.device,
        capture: Capture | None = None,
        differentiable: bool = False,
    ) -> None:
        self.model, self.examples, self.targeted, self.input_device = model, examples, targeted, input_device
        self.low, self.high = box
        self.capture = capture
        """How steps are captured in graphs; None: they run eagerly."""
        clean = examples.x.detach()
        with torch.enable_grad() if differentiable else nullcontext():
            outputs = model.outputs(clean.requires_grad_(differentiable))
        self.clean_pass = (clean, outputs) if differentiable else None
        """Clean inputs and the outputs there, until a gradient has been taken; None: without gradients."""
        outputs = outputs.detach()
        self.classes = outputs.shape[-1]
        self.clean_scores = model.pooled_scores(outputs)
        self.nonfinite_gradients = torch.zeros((), dtype=torch.int64, device=examples.x.device)
        """Number of gradients with NaN or infinities."""

    def pooled_scores(self, x: Float[Tensor, "B *S"]) -> Float[Tensor, "B C"]:
        """Pooled scores of inputs, from a separate forward pass."""
        return self.model.pooled_scores(self.model.outputs(x))

    def is_adversarial(self, scores: Float[Tensor, "B C"], rows: HasLabels) -> Bool[Tensor, " B"]:
        """Whether pooled scores reach the goal: any class but the label, or the target class."""
        return predicts(scores, rows.target) if self.targeted else is_valid(scores) & ~predicts(scores, rows.y)

    def loss_at(
        self, point: Float[Tensor, "B *S"], rows: HasLabels, loss: AttackLoss, targeted_loss: bool | None = None
    ) -> LossAtPoint:
        """Loss, gradient and success at a point, from one forward and one backward pass.

        Only the inputs get a gradient; parameters keep theirs. NaN in a gradient is replaced by zero and reported.

        Args:
            point: Inputs.
            rows: Labels and targets.
            loss: The loss to be raised.
            targeted_loss: Whether the loss gets the targets; by default, if the attack is targeted.
        """
        targeted_loss = self.targeted if targeted_loss is None else targeted_loss
        with torch.enable_grad():
            point = point.detach().requires_grad_()
            return self._loss_of(point, self.model.outputs(point), rows, loss, targeted_loss)

    def loss_at_clean(self, rows: HasLabels, position: Integer[Tensor, " b"], loss: AttackLoss) -> LossAtPoint:
        """`loss_at` the clean inputs of some rows, without a forward pass of its own the first time.

        The pass with which the problem began is used, for which ``differentiable`` must be set. Its backward pass goes
        through all examples, which does not pay if most of them are not among the rows.
        """
        clean_pass, self.clean_pass = self.clean_pass, None
        if clean_pass is None or 2 * len(position) <= len(self.examples.x):
            return self.loss_at(self.examples.x[position], rows, loss)
        everything = position is self.examples.position
        return self._loss_of(*clean_pass, rows, loss, self.targeted, None if everything else position)

    def _loss_of(
        self,
        point: Tensor,
        outputs: Float[Tensor, "M B C"],
        rows: HasLabels,
        loss: AttackLoss,
        targeted_loss: bool,
        position: Integer[Tensor, " b"] | None = None,
    ) -> LossAtPoint:
        """Loss, gradient and success, from outputs at a point; only at some positions, if they are given."""
        with torch.enable_grad():
            selected = outputs if position is None else outputs[:, position]
            scores = self.model.attacked_scores(selected)
            value = loss(scores, rows.y, rows.target if targeted_loss else None).sum(0)
            (gradient,) = self.gradients(point, value, position=position)
        pooled = self.model.pooled_scores(selected.detach())
        return LossAtPoint(value.detach(), gradient, self.is_adversarial(pooled, rows), pooled)

    def gradients(
        self, point: Tensor, *values: Float[Tensor, " B"], position: Integer[Tensor, " b"] | None = None
    ) -> list[Tensor]:
        """Gradients of several values at one point. NaN becomes zero, and infinities the largest finite number.

        With ``position``, only the rows there are returned.
        """
        if not all(value.requires_grad for value in values):
            self._refuse_without_gradient()
        gradients: list[Tensor] = []
        for index, value in enumerate(values):
            retain = index + 1 < len(values)
            (gradient,) = torch.autograd.grad(value.sum(), point, retain_graph=retain, allow_unused=True)
            if gradient is None:
                self._refuse_without_gradient()
            gradient = gradient if position is None else gradient[position]
            largest = linf_lengths(gradient)  # NaN if there is any
            self.nonfinite_gradients.add_((~largest.isfinite()).sum())
            gradients.append(gradient.nan_to_num(nan=0.0))
        return gradients

    def _refuse_without_gradient(self) -> NoReturn:
        fix = "It detaches them, or runs without gradients. `square` needs outputs only."
        checks.refuse("model", "be differentiable with respect to its inputs", "outputs without a gradient", fix)

    def verify(
        self,
        candidates: Float[Tensor, "B *S"],
        rows: Examples,
        lengths: Callable[[Tensor], Tensor],
        limit: float | Tensor,
    ) -> tuple[Bool[Tensor, " B"], Float[Tensor, " B"]]:
        """Whether candidates are adversarial in a new forward pass, in the box and within the limit; and lengths."""
        length = lengths(candidates - rows.x)
        least, largest = candidates.flatten(1).amin(1), candidates.flatten(1).amax(1)  # NaN if there is any
        valid = (least >= self.low) & (largest <= self.high) & least.isfinite() & largest.isfinite() & (length <= limit)
        inputs = candidates if valid.all() else where_rows(valid, candidates, rows.x)
        return valid & self.is_adversarial(self.pooled_scores(inputs), rows), length

    def solve(
        self,
        runs: Iterable[Callable[[Examples], Tensor]],
        lengths: Callable[[Tensor], Tensor],
        limit: float | Tensor = math.inf,
    ) -> Adversarial:
        """Run an attack several times: each run gets the examples on which no earlier run succeeded.

        Args:
            runs: Functions from examples to one candidate per example.
            lengths: The attack's norm.
            limit: The largest length of a perturbation that counts as a success.
        """
        x, y, target, _ = self.examples
        predicted = self.clean_scores.argmax(-1)
        success = predicted == target if self.targeted else predicted != y
        inputs, distance = x.clone(), x.new_zeros(len(x))
        for run in runs:
            remaining = (~success).nonzero().squeeze(1)
            if len(remaining) == 0:
                break
            everything = len(remaining) == len(x)
            rows = self.examples if everything else Examples(*(tensor[remaining] for tensor in self.examples))
            candidates = run(rows)
            verified, length = self.verify(candidates, rows, lengths, limit)
            solved = remaining[verified]
            inputs[solved], success[solved], distance[solved] = candidates[verified], True, length[verified]
        self._report_nonfinite_gradients()
        return Adversarial(*(tensor.to(self.input_device) for tensor in (inputs, success, distance)))

    def _report_nonfinite_gradients(self) -> None:
        count = int(self.nonfinite_gradients)
        if count:
            log.warning("%d gradients of the model had NaN or infinities: the attack may be too weak.", count)


@contextmanager
def attack_problem(
    model: Model,
    x: Tensor,
    y: Tensor,
    *,
    target: Tensor | None,
    pool: PoolName,
    box: Box,
    differentiable: bool = False,
) -> Iterator[AttackProblem]:
    """The checked problem, on the model's device. The model is in evaluation mode until the context ends.

    Works inside ``torch.no_grad()`` and ``torch.inference_mode()`` too. ``differentiable`` keeps the first pass for
    `AttackProblem.loss_at_clean`.
    """
    low, high = checked_box(x, box)
    _check_inputs(x, low, high)
    device = checks.computes("model", device_of(model, x.device))
    capture = capture_on(device)
    replayed = nullcontext() if capture is None else passes_replayed()
    with on(device), torch.inference_mode(False), torch.no_grad(), evaluation_mode(model), replayed:
        labels = _checked_labels(y, len(x), "y").to(device)
        targets = labels if target is None else _checked_labels(target, len(x), "target").to(device)
        inputs = x.detach().to(device)
        inputs = inputs.clone() if inputs.is_inference() else inputs
        examples = Examples(inputs, labels, targets, torch.arange(len(x), device=device))
        with _misfits_told(model, inputs):
            problem = AttackProblem(
                TargetModel(model, pool), examples, target is not None, (low, high), x.device, capture, differentiable
            )
        invalid = int((~is_valid(problem.clean_scores)).sum())
        if invalid:
            checks.refuse("model", "give numbers for clean inputs", f"NaN for {invalid} of {len(x)}")
        for name, classes in (("y", labels), ("target", targets)):
            first, last = int(classes.min()), int(classes.max())
            if first < 0 or last >= problem.classes:
                checks.refuse(name, f"be classes from 0 to {problem.classes - 1}", f"classes from {first} to {last}")
        yield problem


@contextmanager
def _misfits_told(model: Model, inputs: Tensor) -> Iterator[None]:
    """Inputs that do not fit the network are told in one sentence."""
    try:
        yield
    except (RuntimeError, IndexError, TypeError) as reason:
        told = calls.misfit(reason, inputs, model) if isinstance(model, nn.Module) else None
        if told is None:
            raise
        raise told from reason


def checked_box(x: Tensor, box: Box) -> Box:
    """Range of valid inputs, rounded to the precision of ``x``."""
    if not isinstance(box, tuple | list) or len(box) != 2:
        checks.refuse("box", "be a pair (low, high)", repr(box))
    low, high = checks.number("box", box[0]), checks.number("box", box[1])
    if not low < high:
        checks.refuse("box", "be a pair low < high", repr(tuple(box)))
    dtype = x.dtype if x.is_floating_point() else torch.float32
    return torch.tensor(low, dtype=dtype).item(), torch.tensor(high, dtype=dtype).item()


def _check_inputs(x: Tensor, low: float, high: float) -> None:
    if x.dtype not in (torch.float32, torch.float64):
        integer = not x.is_floating_point()
        fix = "Bytes? Use x.float() / 255." if integer else "Use x.float(); the model may compute in half precision."
        checks.refuse("x", "be float32 or float64", str(x.dtype), fix, TypeError)
    if x.ndim < 2 or x.numel() == 0:
        fix = "One example? Use x.unsqueeze(0)." if x.ndim == 1 else ""
        checks.refuse("x", "be a batch [B, ...] of one example or more", checks.shape_text(x.shape), fix)
    least, largest = (float(edge) for edge in x.detach().aminmax())
    if not (low <= least and largest <= high and math.isfinite(largest - least)):
        fix = "Standardised inputs? Attack before they are standardised, or give their box=(low, high)."
        checks.refuse("x", f"lie in [{low:g}, {high:g}]", f"values from {least:g} to {largest:g}", fix)


def _checked_labels(labels: Tensor, examples: int, name: str) -> Tensor:
    if not isinstance(labels, Tensor):
        checks.refuse(name, "be a tensor of classes [B]", repr(labels), error=TypeError)
    if labels.is_floating_point() or labels.dtype == torch.bool:
        fix = "Soft labels? Use .argmax(-1)." if labels.ndim == 2 else "Use .long()."
        checks.refuse(name, "be whole numbers", str(labels.dtype), fix, TypeError)
    if tuple(labels.shape) != (examples,):
        fix = f"One-hot? Use {name}.argmax(-1)." if labels.ndim == 2 else ""
        checks.refuse(name, f"have shape [B={examples}]", checks.shape_text(labels.shape), fix)
    return labels.detach().long().clone()  # a tensor from inference mode cannot take part in a backward pass
