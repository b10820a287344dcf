"""Programs of ``torch.export``."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import jaxtyping
import torch
from torch import Tensor, nn

from dissensus import calls, checks, losses
from dissensus.arrays import Conversion
from dissensus.axes import PerExampleLoss
from dissensus.calls import Call, NetworkInputs, network_inputs
from dissensus.execution.skeleton import first_line
from dissensus.export.outputs import Outputs, Pool, Task, checked, chosen, loss_of
from dissensus.export.tracing import Exportable, members_of, with_signature

if TYPE_CHECKING:
    from torch.export import ExportedProgram


def program(
    model: nn.Module,
    example: Any,
    *,
    task: Task | None = None,
    loss: str | PerExampleLoss | None = None,
    pool: Pool | None = None,
    class_axis: int = 2,
    member_outputs: bool = False,
    outputs: Outputs | None = None,
    dynamic_batch: bool = True,
) -> "ExportedProgram":
    """A model as a program of ``torch.export``, which returns predictions and uncertainty by name.

    The program holds copies of the weights, and runs without dissensus, for batches of any size. It computes what the
    model computes in evaluation mode; the model keeps its mode and its backend. How members run is fixed by a rule:
    networks of linear layers as batched products, all others one after the other. The program is run before it is
    returned, on the example and on a batch of another size, and refused where it differs from the model.

    Args:
        model: An `Ensemble`, `dissensus.masks.Masked`, `SharedTrunk`, or one network, such as a member or a soup.
        example: Inputs ``[B, ...]`` of any values: a tensor or an array, a tuple of several inputs, or a dictionary of
            named ones. Everything but the batch has the shape that the program will take. What is no tensor (None, a
            flag) becomes a part of the program.
        task: ``"classification"``, where members return logits ``[B, C]``, or ``"regression"``, where they return
            values. None stands for classification, or for what ``loss`` says.
        loss: What members were trained on, by its name or function in `dissensus.losses`: it says what their outputs
            mean. ``"bce"``: labels that do not exclude each other. ``"gaussian_nll"``: means and log-variances.
            ``"quantile"`` or ``partial(losses.quantile, levels=...)``: quantiles. See `dissensus.export` for the
            outputs of each.
        pool: ``"probability"``, ``"score"`` or ``"vote"``; by default that of the loss: the mean of probabilities for
            classes and labels, of outputs for values.
        class_axis: Axis of the classes in dense outputs ``[M, B, C, *S]``; -1 for language models.
        member_outputs: Whether the members' own outputs ``[M, B, ...]`` are returned too, as ``member_logits``, or
            ``member_outputs`` for regression.
        outputs: Function ``[M, B, ...] -> {name: tensor}`` that computes what the program returns instead.
        dynamic_batch: False fixes the number of examples to that of the example, for targets that need it.

    >>> from dissensus import Ensemble
    >>> ens = Ensemble(lambda: nn.Linear(3, 2), members=5)
    >>> exported = program(ens, torch.zeros(4, 3))
    >>> {name: list(values.shape) for name, values in exported.module()(torch.zeros(7, 3)).items()}
    {'probs': [7, 2], 'entropy': [7], 'mutual_information': [7], 'aleatoric': [7]}

    ``torch.export.save(exported, "model.pt2")`` writes it, and ``torch.export.load`` reads it, without unpickling code.
    """
    function = chosen(task, pool, outputs, loss=loss, class_axis=class_axis, member_outputs=member_outputs)
    inputs = _example(model, example, dynamic_batch)
    try:
        members = members_of(model, inputs)
        with torch.no_grad():
            raw = calls.outputs_of(members, inputs)
    except (RuntimeError, IndexError, TypeError) as reason:
        told = calls.misfit(reason, inputs, model) if isinstance(model, nn.Module) else None
        if told is None:
            raise
        raise told from reason
    _check_batch(raw, inputs)
    exportable = Exportable(members, function).eval()
    with torch.no_grad():
        reference = checked(function(raw))
    entry = losses.known(loss_of(task, loss)) if outputs is None else None
    _check_outputs(reference, calls.examples(inputs), None if entry is None else entry.takes)
    exported = _traced(with_signature(exportable, model, inputs), inputs, dynamic_batch)
    _compare(exported, exportable, inputs, dynamic_batch)
    return exported


def _example(model: Any, example: Any, dynamic_batch: bool) -> NetworkInputs:
    """The inputs to trace with, where the model is."""
    if not isinstance(model, nn.Module):
        fix = "Arrays of outputs need no network: pool them with dissensus.pooling."
        checks.refuse("model", "be an Ensemble or an nn.Module", type(model).__name__, fix, TypeError)
    checks.flag("dynamic_batch", dynamic_batch)
    inputs = example_inputs(model, example)
    rows = calls.examples(inputs, "example")
    if rows == 0:
        checks.refuse("example", "hold at least one example", "none")
    parameter = next(model.parameters(), None)
    device = torch.device("cpu") if parameter is None else parameter.device
    inputs = calls.mapped(lambda tensor: tensor.detach().to(device, copy=True), inputs)
    if dynamic_batch and rows == 1:  # a tracer takes a size of one for a constant
        inputs = calls.rows(inputs, torch.zeros(2, dtype=torch.long, device=device))
    return inputs


def example_inputs(model: nn.Module, example: Any) -> NetworkInputs:
    """An example, of any form, as the inputs of a network."""
    return network_inputs(Conversion.of(model).inputs(example, "example"))


def _check_batch(raw: Any, inputs: NetworkInputs) -> None:
    """Refuse one example without a batch: its first axis would be taken for examples."""
    rows = calls.examples(inputs)
    if isinstance(raw, Tensor) and (raw.ndim < 2 or raw.shape[1] != rows):
        got = (
            f"{checks.shape_text(next(iter(calls.tensors(inputs))).shape)}, for which members return {list(raw.shape)}"
        )
        checks.refuse(
            "example", "be a batch [B, ...], with an output for every row", got, "One row? Use example[None]."
        )


def _check_outputs(results: dict[str, Tensor], rows: int, kind: str | None) -> None:
    """Refuse outputs without a number per example, and classification of fewer than two classes.

    ``kind`` is that of the members' outputs; None where a user's function has made the results.
    """
    for name, values in results.items():
        batch_axis = 1 if kind is not None and name.startswith("member_") else 0
        if kind is not None and (values.ndim <= batch_axis or values.shape[batch_axis] != rows):
            got = f"{name} {list(values.shape)} for {rows} examples"
            checks.refuse("model", "return an output for every example", got)
    if kind == "logits" and results["entropy"].numel() * 2 > results["probs"].numel():
        fix = 'Regression? Pass task="regression". One logit of yes or no? Pass loss="bce".'
        checks.refuse("model", "return at least two classes for classification", "one output", fix)


def _traced(exportable: Exportable, inputs: NetworkInputs, dynamic_batch: bool) -> "ExportedProgram":
    from torch.export import Dim, ShapesCollection, export

    args, kwargs = inputs if isinstance(inputs, Call) else ((inputs,), {})
    shapes: Any = None
    if dynamic_batch:
        shapes, batch = ShapesCollection(), Dim("batch", min=1)
        for tensor in calls.tensors(inputs):
            shapes[tensor] = {0: batch}
    try:
        with torch.no_grad(), checks_off():
            return export(exportable, args, kwargs, dynamic_shapes=shapes, strict=False)
    except Exception as reason:  # a tracer runs foreign code, which may raise anything
        words = f"{type(reason).__name__}: {first_line(reason)}"
        fix = (
            "A network whose operations depend on values has no program. One that fixes the size of the batch has one "
            "with dynamic_batch=False."
        )
        checks.refuse("model", "be traceable by torch.export", words, fix)


@contextmanager
def checks_off() -> Iterator[None]:
    """A block in which torch does not warn about how it traces, and annotations of shapes are not checked.

    Sizes are symbols there, no numbers, and the program is compared with the model afterwards.
    """
    checked = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", checked)


@torch.no_grad()
def _compare(exported: "ExportedProgram", exportable: Exportable, inputs: NetworkInputs, dynamic_batch: bool) -> None:
    """Refuse a program whose outputs differ from the model's, on the example or on batches of another size."""
    rows, device = calls.examples(inputs), calls.first_tensor(inputs).device
    numbers = [torch.arange(rows, device=device)]
    if dynamic_batch:
        numbers += [torch.zeros(1, dtype=torch.long, device=device), torch.arange(rows + 1, device=device) % rows]
    network = exported.module()
    for places in numbers:
        batch = calls.rows(inputs, places)
        expected, results = calls.outputs_of(exportable, batch), calls.outputs_of(network, batch)
        for name, values in expected.items():
            if not _close(results[name], values):
                got = f"other values of {name!r} for {len(places)} examples"
                fix = "Does a forward pass depend on values, on the size of the batch, or on random numbers?"
                checks.refuse("model", "compute the same in its program", got, fix)


def _close(values: Tensor, expected: Tensor) -> bool:
    if values.shape != expected.shape or values.dtype != expected.dtype:
        return False
    if not expected.is_floating_point():
        return torch.equal(values, expected)
    tolerance = {torch.float64: 1e-8, torch.float32: 1e-4}.get(expected.dtype, 5e-2)
    finite = expected[expected.isfinite()]
    scale = float(finite.abs().amax()) if finite.numel() else 0.0
    return torch.allclose(values, expected, rtol=tolerance, atol=tolerance * max(scale, 1e-6), equal_nan=True)
