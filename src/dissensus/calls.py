"""Inputs of a network: one tensor, or the arguments of a call, nested in any way."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from dissensus import checks


class Call(NamedTuple):
    """The arguments of a network's forward pass: ``network(*args, **kwargs)``.

    Arguments may be nested tuples, lists and dictionaries. The first axis of every tensor is the batch. Everything that
    is no tensor (None, numbers, words) is handed to the network as it is.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


NetworkInputs = Tensor | Call
"""What a forward pass takes. A network of one tensor takes it as it is, which is the common and the fastest case."""


PAD = "Sequences of several lengths? Pad them: torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True)."
"""The fix for inputs whose examples have several shapes."""


def call(*args: Any, **kwargs: Any) -> NetworkInputs:
    """The inputs of ``network(*args, **kwargs)``; a single tensor stays a tensor.

    >>> call(torch.zeros(2)).shape
    torch.Size([2])
    >>> call(torch.zeros(2), mask=None)
    Call(args=(tensor([0., 0.]),), kwargs={'mask': None})
    """
    if len(args) == 1 and not kwargs and isinstance(args[0], Tensor):
        return args[0]
    leaves = pytree.tree_leaves((args, kwargs), is_leaf=lambda value: isinstance(value, PackedSequence))
    if any(isinstance(leaf, PackedSequence) for leaf in leaves):
        fix = "Pack it inside of the network, whose inputs are then the padded sequences and their lengths."
        checks.refuse("inputs", "not be a packed sequence, which has no batch axis", "a PackedSequence", fix, TypeError)
    return Call(args, kwargs)


def network_inputs(inputs: object) -> NetworkInputs:
    """The inputs of a batch as a network takes them: a dictionary by name, a tuple or list one after the other.

    A network that takes a dictionary itself gets it as a tuple of one: ``({"image": ..., "text": ...},)``.

    >>> network_inputs({"ids": torch.ones(2, 3)}).kwargs.keys()
    dict_keys(['ids'])
    >>> len(network_inputs((torch.ones(2, 3), torch.ones(2))).args)
    2
    """
    if isinstance(inputs, Tensor | Call):
        return inputs
    if isinstance(inputs, Mapping):
        return _checked(call(**{str(name): value for name, value in inputs.items()}))
    if isinstance(inputs, tuple | list):
        return _checked(call(*inputs))
    requirement = "be a tensor, a dictionary of named inputs, or a tuple of inputs"
    fix = f"Lists of numbers? Use torch.tensor(...). {PAD}" if isinstance(inputs, int | float) else ""
    checks.refuse("inputs", requirement, type(inputs).__name__, fix, TypeError)


def _checked(inputs: NetworkInputs) -> NetworkInputs:
    """Refuse parts that would go whole into every batch, because nothing is known about what they hold."""
    for leaf in pytree.tree_leaves(inputs):
        if not isinstance(leaf, Tensor | bool | int | float | str | torch.dtype | torch.device | None):
            fix = "Other containers? Use dict(...), or register them with torch.utils._pytree. Arrays? Use tensors."
            requirement = "hold tensors, in tuples, lists and dictionaries"
            checks.refuse("inputs", requirement, type(leaf).__name__, fix, TypeError)
    return inputs


def as_given(inputs: NetworkInputs) -> Any:
    """Inputs as a user hands them over: the inverse of `network_inputs`.

    >>> as_given(call(ids=torch.ones(1)))
    {'ids': tensor([1.])}
    """
    if isinstance(inputs, Tensor) or (inputs.args and inputs.kwargs):
        return inputs
    return inputs.kwargs if inputs.kwargs else inputs.args


def form(inputs: NetworkInputs) -> tuple[str, ...]:
    """How inputs are handed over, in words; nothing for one tensor.

    >>> form(call(torch.zeros(2), mask=None))
    ('1 inputs and mask',)
    """
    if isinstance(inputs, Tensor):
        return ()
    return (" and ".join([f"{len(inputs.args)} inputs", *sorted(inputs.kwargs)]),)


def outputs_of(network: Callable[..., Any], inputs: NetworkInputs) -> Any:
    """What a network returns for its inputs."""
    if isinstance(inputs, Call):
        return network(*inputs.args, **inputs.kwargs)
    return network(inputs)


def tensors(inputs: NetworkInputs) -> list[Tensor]:
    """Every tensor of the inputs; at least one."""
    if isinstance(inputs, Tensor):
        return [inputs]
    found = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor)]
    if not found:
        kinds = sorted({type(leaf).__name__ for leaf in pytree.tree_leaves(inputs)})
        fix = f"Arrays? Use torch.from_numpy(...). Lists of numbers? Use torch.tensor(...). {PAD}"
        checks.refuse("inputs", "hold at least one tensor", ", ".join(kinds) or "nothing", fix, TypeError)
    return found


def first_tensor(inputs: NetworkInputs) -> Tensor:
    """The first tensor of the inputs, whose device and length count."""
    return inputs if isinstance(inputs, Tensor) else tensors(inputs)[0]


def mapped(function: Callable[[Tensor], Tensor], inputs: NetworkInputs) -> NetworkInputs:
    """The inputs with a function applied to every tensor.

    >>> mapped(lambda t: t[:1], call(torch.zeros(3), flag=True))
    Call(args=(tensor([0.]),), kwargs={'flag': True})
    """
    if isinstance(inputs, Tensor):
        return function(inputs)
    return pytree.tree_map(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, inputs)


def split_tensors(inputs: NetworkInputs) -> tuple[list[Tensor], Callable[[Sequence[Tensor]], NetworkInputs]]:
    """The tensors of the inputs, and a function that puts others in their places.

    >>> found, rebuilt = split_tensors(call(torch.zeros(1), flag=True))
    >>> rebuilt([torch.ones(1)])
    Call(args=(tensor([1.]),), kwargs={'flag': True})
    """
    if isinstance(inputs, Tensor):
        return [inputs], lambda replaced: replaced[0]
    leaves, structure = pytree.tree_flatten(inputs)
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    blank = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]  # the function keeps no tensors

    def rebuilt(replaced: Sequence[Tensor]) -> NetworkInputs:
        filled = list(blank)
        for place, tensor in zip(places, replaced, strict=True):
            filled[place] = tensor
        return pytree.tree_unflatten(filled, structure)

    return [leaves[place] for place in places], rebuilt


def examples(inputs: NetworkInputs, name: str = "inputs") -> int:
    """The number of examples, which all tensors must agree on.

    >>> examples(call(torch.zeros(4, 2), mask=torch.ones(4)))
    4
    """
    if isinstance(inputs, Tensor) and inputs.ndim:
        return len(inputs)
    shapes = [tuple(tensor.shape) for tensor in tensors(inputs)]
    if any(not shape for shape in shapes):
        checks.refuse(name, "have the batch as the first axis of every tensor", "a tensor without axes")
    if len({shape[0] for shape in shapes}) > 1:
        got = ", ".join(str(list(shape)) for shape in shapes[:8]) + (", ..." if len(shapes) > 8 else "")
        requirement = "have the same number of examples in every tensor, along its first axis"
        checks.refuse(name, requirement, got, f"One tensor per example? Use torch.stack(...). {PAD}")
    return shapes[0][0]


def rows(inputs: NetworkInputs, index: Any) -> NetworkInputs:
    """The examples at an index, of every tensor."""
    return inputs[index] if isinstance(inputs, Tensor) else mapped(lambda tensor: tensor[index], inputs)


def split(inputs: NetworkInputs, size: int) -> list[NetworkInputs]:
    """The inputs in pieces of at most ``size`` examples.

    >>> [examples(piece) for piece in split(call(torch.zeros(5), mask=torch.ones(5)), 2)]
    [2, 2, 1]
    """
    if isinstance(inputs, Tensor):
        return list(inputs.split(size))
    return [rows(inputs, slice(start, start + size)) for start in range(0, examples(inputs), size)]


def stacked(batches: Sequence[NetworkInputs]) -> NetworkInputs:
    """Inputs of one structure, stacked along a new first axis."""
    return _merged(torch.stack, batches)


def concatenated(batches: Sequence[NetworkInputs]) -> NetworkInputs:
    """Inputs of one structure, concatenated along the batch."""
    return _merged(torch.cat, batches)


def _merged(merge: Callable[[list[Tensor]], Tensor], batches: Sequence[NetworkInputs]) -> NetworkInputs:
    parts = [split_tensors(batch) for batch in batches]
    return parts[0][1]([merge(list(column)) for column in zip(*(found for found, _ in parts), strict=True)])


_MISFITS = (
    *("shapes cannot be multiplied", "to have", "same dtype", "scalar type", "normalized_shape", "must match"),
    *(
        "should contain",
        "index out of range",
        "input.size(-1) must be equal",
        "positional argument",
        "unexpected keyword",
    ),
    "required positional argument",
)
"""What torch and Python say of inputs that a network does not take."""


def misfit(error: Exception, inputs: NetworkInputs, network: Any) -> ValueError | None:
    """An error about inputs that the networks do not take, in one sentence; None for an error of another kind.

    >>> print(misfit(RuntimeError("must match the size (4)"), torch.ones(2, 5), nn.ReLU()))
    members cannot take inputs [2, 5] float32: must match the size (4).
    """
    text = (str(error).strip().splitlines() or [""])[0]
    if isinstance(error, TypeError) and "forward()" not in text:
        return None
    if not any(words in text for words in _MISFITS):
        return None
    shapes = ", ".join(_shape_and_dtype(tensor) for tensor in tensors(inputs))
    layers = [layer for layer in network.modules() if list(layer.parameters(recurse=False))]
    first = f"; the first layer with weights is {layers[0]}" if layers else ""
    fix = " Batches hold more than inputs? Pass unpack=lambda batch: (inputs, targets)." if "keyword" in text else ""
    return ValueError(f"members cannot take inputs {shapes}: {text.removesuffix('.')}{first}.{fix}")


def _shape_and_dtype(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


OutputChoice = str | int | Callable[[Any], Any]
"""Which part of what a network returns is its output: a name, a position, or a function of it."""


def chosen_output(output: Any, choice: OutputChoice | None) -> Tensor:
    """The tensor that counts as a member's output.

    >>> chosen_output({"logits": torch.zeros(2), "loss": None}, "logits")
    tensor([0., 0.])
    """
    if choice is None:
        if isinstance(output, Tensor):
            return output
        raise TypeError(
            f"a member's forward pass must return one tensor; got {_described(output)}. "
            f"Say which part counts: Ensemble(build, ..., output={_suggestion(output)}), or the same in Ensemble.load."
        )
    result = part(output, choice)
    if not isinstance(result, Tensor):
        raise TypeError(f"`output` must choose one tensor; {choice!r} of {_described(output)} is {_described(result)}.")
    return result


def check_output_choice(choice: object) -> None:
    """Refuse an ``output`` that is no name, position or function."""
    if choice is None or isinstance(choice, str) or (isinstance(choice, int) and not isinstance(choice, bool)):
        return
    if not callable(choice) or isinstance(choice, nn.Module):
        fix = 'As in output="logits", output=0 or output=lambda out: out.logits.'
        checks.refuse("output", "be a name, a position or a function", type(choice).__name__, fix, TypeError)


def part(output: Any, choice: OutputChoice) -> Any:
    """The part of what a network returns that counts as its output.

    >>> part((1, 2), 0)
    1
    """
    if callable(choice):
        return choice(output)
    if isinstance(choice, str):
        if isinstance(output, Mapping) and choice in output:
            return output[choice]
        if hasattr(output, choice):
            return getattr(output, choice)
    elif not isinstance(output, Tensor) and hasattr(output, "__getitem__"):
        try:
            return output[choice]  # transformers' outputs have names and positions
        except (KeyError, IndexError, TypeError):
            pass
    raise TypeError(
        f"`output` must name a part of what a member returns; there is no {choice!r} in {_described(output)}."
    )


def _described(output: Any) -> str:
    kind = type(output).__name__
    if isinstance(output, Mapping):
        return f"{kind} with {', '.join(repr(str(name)) for name in output)}"
    fields = getattr(output, "_fields", ())
    if isinstance(output, tuple) and fields:
        return f"{kind} with {', '.join(map(repr, fields))}"
    if isinstance(output, tuple | list):
        return f"{kind} of {len(output)}"
    return kind


def _suggestion(output: Any) -> str:
    names = list(output) if isinstance(output, Mapping) else list(getattr(output, "_fields", ()))
    tensors_named = [str(name) for name in names if isinstance(part(output, str(name)), Tensor)]
    if tensors_named:
        return f'"{"logits" if "logits" in tensors_named else tensors_named[0]}"'
    return "0" if isinstance(output, tuple | list) else "lambda out: ..."
