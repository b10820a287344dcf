"""Members as compiled functions of their weights: `torch.compile` fuses what lies between products and convolutions.

A network's own forward pass is compiled, forward and backward, with weights, buffers and inputs as arguments. Members
that run in turn, or on streams, therefore share one compilation. Under ``vmap`` and in batched products all members are
one call. Outputs, gradients and buffers are those of an uncompiled pass, to rounding: keyed dropout draws the same
masks, and batch norm keeps the same statistics.
"""

import functools
import logging
import types
import warnings
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dissensus.calls import NetworkInputs, first_tensor, mapped, rows, split_tensors, tensors
from dissensus.execution.batched import run_batched
from dissensus.execution.counting import CallCounter, counters, tallied
from dissensus.execution.loop import run_loop, run_streams, side_by_side
from dissensus.execution.skeleton import Skeleton, Tensors, Unsupported
from dissensus.execution.vmapped import run_vmapped
from dissensus.execution.weights import Hanging, Named, Weights

log = logging.getLogger("dissensus")

MOST_SHAPES = 4
"""Shapes of batches that one pass is compiled for, of which the last of an epoch is one; others run as before."""


class Run(Protocol):
    """A backend; see `dissensus.execution.backends.Run`."""

    def __call__(  # noqa: D102
        self, skeleton: Skeleton, weights: Weights, buffers: Tensors, x: NetworkInputs, per_member: bool, /
    ) -> Tensor: ...


def run_loop_compiled(
    skeleton: Skeleton, weights: Weights, buffers: Tensors, x: NetworkInputs, per_member: bool
) -> Tensor:
    """Run members in turn, each by the same compiled pass."""
    return _members_compiled(run_loop, skeleton, weights, buffers, x, per_member)


def run_streams_compiled(
    skeleton: Skeleton, weights: Weights, buffers: Tensors, x: NetworkInputs, per_member: bool
) -> Tensor:
    """Run members concurrently by the same compiled pass, each on its CUDA stream."""
    # Gradients of inputs are then summed on the current stream, not on a member's.
    x = mapped(lambda tensor: tensor.view_as(tensor) if tensor.requires_grad else tensor, x)
    return _members_compiled(run_streams, skeleton, weights, buffers, x, per_member)


def run_vmapped_compiled(
    skeleton: Skeleton, weights: Weights, buffers: Tensors, x: NetworkInputs, per_member: bool
) -> Tensor:
    """Run members under ``vmap``, as one compiled pass."""
    return _whole_compiled(run_vmapped, skeleton, weights, buffers, x, per_member)


def run_batched_compiled(
    skeleton: Skeleton, weights: Weights, buffers: Tensors, x: NetworkInputs, per_member: bool
) -> Tensor:
    """Run members as batched products, as one compiled pass."""
    return _whole_compiled(run_batched, skeleton, weights, buffers, x, per_member)


def _members_compiled(
    eager: Run, skeleton: Skeleton, weights: Weights, buffers: Tensors, x: NetworkInputs, per_member: bool
) -> Tensor:
    counted = skeleton.once(counters) if skeleton.network.training else []
    counted = [name for name in counted if name in buffers]
    of_one = rows(x, 0) if per_member else x

    def made() -> Callable[..., Any]:
        return _of_member(skeleton, weights.matrices()[1], split_tensors(of_one)[1], counted)

    compiled = _compiled("member", made, skeleton, weights, buffers, of_one)
    if compiled is None:
        return eager(skeleton, weights, buffers, x, per_member)
    unbound = [matrix.unbind(0) for matrix in weights.matrices()[0]]
    inputs = tensors(of_one)
    with skeleton.alone(), tallied(skeleton, buffers, len(weights)) as state:

        def outputs_of(index: int) -> Tensor:
            own = tensors(rows(x, index)) if per_member else inputs
            held = {name: tensor for name, tensor in state[index].items() if name not in counted}
            outputs, calls = compiled([pieces[index] for pieces in unbound], held, own)
            for name, number in zip(counted, calls, strict=True):
                state[index][name].add_(number)
            return outputs

        jobs = [functools.partial(outputs_of, index) for index in range(len(weights))]
        return torch.stack(side_by_side(jobs, first_tensor(x).device) if eager is run_streams else [j() for j in jobs])


def _of_member(
    skeleton: Skeleton, named: Named, rebuilt: Callable[[Sequence[Tensor]], NetworkInputs], counted: list[str]
) -> Callable[..., tuple[Tensor, list[int]]]:
    """The pass of one member: outputs, and how often each layer of batch norm was called."""

    def member(pieces: list[Tensor], state: dict[str, Tensor], inputs: list[Tensor]) -> tuple[Tensor, list[int]]:
        tallies: dict[str, Any] = {name: CallCounter() for name in counted}
        with skeleton.lending(named(pieces), {**state, **tallies}):
            outputs = skeleton.passed(rebuilt(inputs))
        return outputs, [tallies[name].calls for name in counted]

    return member


def _whole_compiled(
    eager: Run, skeleton: Skeleton, weights: Weights, buffers: Tensors, x: NetworkInputs, per_member: bool
) -> Tensor:

    def made() -> Callable[..., Any]:
        return _of_all(eager, skeleton, weights.matrices()[1], split_tensors(x)[1], per_member)

    compiled = _compiled((eager, per_member, len(weights)), made, skeleton, weights, buffers, x)
    if compiled is None:
        return eager(skeleton, weights, buffers, x, per_member)
    with skeleton.alone():
        return compiled(weights.matrices()[0], dict(buffers), tensors(x))


def _of_all(
    run: Run,
    skeleton: Skeleton,
    named: Named,
    rebuilt: Callable[[Sequence[Tensor]], NetworkInputs],
    per_member: bool,
) -> Callable[..., Tensor]:
    """The pass of all members."""

    def members(matrices: list[Tensor], state: dict[str, Tensor], inputs: list[Tensor]) -> Tensor:
        parameters = named(matrices)
        return run(skeleton, Hanging(parameters, len(matrices[0])), state, rebuilt(inputs), per_member)

    return members


class _Pass:
    """A compiled pass, which is compiled again for every shape of its inputs."""

    def __init__(self, function: Callable[..., Any]) -> None:
        # The compiler counts compilations by code, and stops at eight; other networks have passes of the same code.
        code = function.__code__.replace()
        own = types.FunctionType(code, function.__globals__, code.co_name, None, function.__closure__)
        self.call = torch.compile(own, fullgraph=True, dynamic=False)
        self.shapes: set[Hashable] = set()
        self.full = False

    def takes(self, shapes: Hashable) -> bool:
        """Whether inputs of these shapes run compiled; the log says once if there are too many."""
        known = shapes in self.shapes or len(self.shapes) < MOST_SHAPES
        if not known and not self.full:
            log.info("members are compiled for %d shapes of batches; others run as they are", MOST_SHAPES)
            self.full = True
        return known

    def __call__(self, shapes: Hashable, *arguments: Any) -> Any:
        if shapes in self.shapes:
            return self.call(*arguments)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the compiler warns about itself
            result = self.call(*arguments)
        self.shapes.add(shapes)
        return result


def _compiled(
    kind: Hashable,
    make: Callable[[], Any],
    skeleton: Skeleton,
    weights: Weights,
    buffers: Tensors,
    x: NetworkInputs,
) -> Callable[..., Any] | None:
    """The compiled pass for these arguments; None where the pass has to run as it is.

    Raises `Unsupported` where no pass of the network can be compiled.
    """
    if skeleton.shared:
        raise Unsupported("members share weights, and what they have in common is computed once, which compiling hides")
    if skeleton.appearing:
        raise Unsupported("a pass makes buffers")
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return None
    inputs = tensors(x)
    if any(tensor.is_inference() for tensor in inputs):
        return None
    training, keyed = skeleton.network.training, skeleton.functions_keyed
    key = (kind, training, keyed, weights.form(), tuple(buffers), _constants(x))
    if key not in skeleton.compiled:
        skeleton.compiled[key] = _Pass(make())
    compiled: _Pass = skeleton.compiled[key]
    shapes = tuple((tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad) for tensor in inputs)
    return functools.partial(compiled, shapes) if compiled.takes(shapes) else None


def _constants(x: NetworkInputs) -> Hashable:
    """Everything in the inputs that is no tensor, which a compiled pass holds."""
    if isinstance(x, Tensor):
        return None
    leaves, structure = pytree.tree_flatten(x)
    return str(structure), tuple(None if isinstance(leaf, Tensor) else (type(leaf), leaf) for leaf in leaves)
