"""NumPy arrays and pandas objects as tensors: numbers in the networks' precision, labels as int64."""

import functools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dissensus import checks
from dissensus.calls import PAD


def is_array(value: object) -> bool:
    """Whether a value is an array of NumPy, a frame or series of pandas, or anything else that becomes an array.

    >>> is_array(np.zeros(2)), is_array([0, 1]), is_array(torch.zeros(2))
    (True, False, False)
    """
    return not isinstance(value, Tensor | np.generic | type) and hasattr(value, "__array__")


def _is_pandas(value: object) -> bool:
    return type(value).__module__.partition(".")[0] == "pandas" and hasattr(value, "to_numpy")


def numpy_values(name: str, values: Any) -> np.ndarray[Any, Any]:
    """The numbers of an array or of a pandas object; what is no number is refused with the fix."""
    if _is_pandas(values):
        _check_columns(name, values)
        kinds = [values.dtypes] if values.ndim == 1 else list(values.dtypes)
        nullable = any(not isinstance(kind, np.dtype) for kind in kinds) and bool(values.isna().to_numpy().any())
        values = values.to_numpy(dtype="float64", na_value=np.nan) if nullable else values.to_numpy()
    checks.unmasked(values, name)
    values = np.asarray(values)
    if values.dtype.kind in "OSUT":
        numbers = _unboxed(values) if values.dtype.kind == "O" else None
        lengths = _lengths(values) if numbers is None else []
        if lengths:
            got = f"examples of lengths such as {', '.join(map(str, lengths[:3]))}"
            checks.refuse(name, "have examples of one shape", got, PAD, TypeError)
        if numbers is None:
            fix = "Labels by name? Use sklearn's LabelEncoder."
            checks.refuse(name, "be numbers", f"text ({_sample(values)})", fix, TypeError)
        values = numbers
    if values.dtype.kind not in "fiub":
        checks.refuse(name, "be real numbers", f"dtype {values.dtype}", error=TypeError)
    return values


def _check_columns(name: str, values: Any) -> None:
    """Refuse columns of a frame that hold no numbers, by their names."""
    if values.ndim != 2:
        if str(values.dtype) == "category":
            fix = "Use .cat.codes, or sklearn's LabelEncoder."
            checks.refuse(name, "be numbers", "categories", fix, TypeError)
        return
    wrong = [
        str(column)
        for column, kind in zip(values.columns, values.dtypes, strict=True)
        if str(kind) in ("category", "string", "str")
        or "datetime" in str(kind)
        or (str(kind) == "object" and _unboxed(values[column].to_numpy()) is None)
    ]
    if wrong:
        fix = "Encode them first, as with pandas.get_dummies or sklearn's OrdinalEncoder."
        checks.refuse(name, "hold numbers in every column", f"other values in {', '.join(wrong)}", fix, TypeError)


def _unboxed(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any] | None:
    """Python numbers as numbers; None for other objects."""
    try:
        numbers = np.array(values.tolist())
    except (TypeError, ValueError):
        return None
    return numbers if numbers.dtype.kind in "fiub" and numbers.shape == values.shape else None


def _lengths(values: np.ndarray[Any, Any]) -> list[int]:
    """The lengths of the first entries that are sequences themselves."""
    several = (list, tuple, np.ndarray, Tensor)
    return sorted({len(value) for value in values.flat[:20] if isinstance(value, several) and np.ndim(value)})


def _sample(values: np.ndarray[Any, Any]) -> str:
    distinct = list(dict.fromkeys(str(value) for value in values.flat[:20]))
    return ", ".join(map(repr, distinct[:3])) + (", ..." if len(distinct) > 3 else "")


@runtime_checkable
class HasLayers(Protocol):
    """A network, or the members of an ensemble."""

    def parameters(self) -> Iterator[nn.Parameter]:
        """Every parameter."""
        ...

    def modules(self) -> Iterator[nn.Module]:
        """Every layer."""
        ...


def tensor_of(name: str, values: Any) -> Tensor:
    """The numbers of an array as a tensor, in the precision they have; whole numbers as int64.

    Memory is shared where torch can.

    >>> tensor_of("labels", np.array([0, 1], dtype=np.int16))
    tensor([0, 1])
    >>> tensor_of("labels", np.array(["cat", "dog"]))
    Traceback (most recent call last):
    TypeError: `labels` must be numbers; got text ('cat', 'dog'). Labels by name? Use sklearn's LabelEncoder.
    """
    numbers = numpy_values(name, values)
    return torch.from_numpy(_writable(numbers.astype(np.int64, copy=False) if numbers.dtype.kind in "iu" else numbers))


class Conversion(NamedTuple):
    """How arrays become tensors; tensors stay what they are."""

    dtype: torch.dtype = torch.float32
    """The dtype of real numbers: the widest of the networks'."""
    exact: bool = True
    """Whether inputs of real numbers must have this dtype: False for networks of several."""
    indices: bool = False
    """Whether whole numbers of a single input stay whole, because the network looks them up in an embedding."""

    @classmethod
    def of(cls, network: HasLayers) -> "Conversion":
        """For the inputs of a network."""
        dtypes = {parameter.dtype for parameter in network.parameters() if parameter.is_floating_point()}
        widest = functools.reduce(torch.promote_types, dtypes) if dtypes else torch.get_default_dtype()
        looks_up = any(isinstance(layer, nn.Embedding | nn.EmbeddingBag) for layer in network.modules())
        return cls(widest, len(dtypes) <= 1, looks_up)

    def inputs(self, inputs: Any, name: str = "x") -> Any:
        """Inputs whose arrays are tensors.

        A single array or frame is taken to the networks' dtype. Among several or named inputs, whole numbers and
        booleans stay what they are: they are indices and masks.

        >>> Conversion().inputs(np.ones((2, 3), dtype=int)).dtype
        torch.float32
        >>> Conversion().inputs({"ids": np.array([1])})["ids"].dtype
        torch.int64
        """
        if is_array(inputs):
            return self._tensor(name, inputs, keep=self.indices and not _is_pandas(inputs))
        if isinstance(inputs, Mapping) and not isinstance(inputs, dict):
            inputs = dict(inputs)
        if isinstance(inputs, Tensor) or not any(is_array(leaf) for leaf in pytree.tree_leaves(inputs)):
            return inputs
        return pytree.tree_map(lambda leaf: self._tensor(name, leaf, keep=True) if is_array(leaf) else leaf, inputs)

    def targets(self, targets: Any, name: str = "y") -> Any:
        """Targets as a tensor: real numbers in the networks' dtype, labels as int64.

        >>> Conversion().targets(np.array([0, 1], dtype=np.uint8)).dtype
        torch.int64
        """
        if not is_array(targets):
            return targets
        values = tensor_of(name, targets)
        return values.to(self.dtype if values.is_floating_point() else torch.int64)

    def weights(self, weights: Any, name: str = "weights") -> Any:
        """Weights of examples as a tensor of the networks' dtype."""
        if is_array(weights) or isinstance(weights, list | tuple):
            weights = tensor_of(name, np.asarray(weights))
        if not isinstance(weights, Tensor):
            checks.refuse(name, "be a tensor or an array", type(weights).__name__, error=TypeError)
        return weights.to(self.dtype)

    def pair(self, data: Any) -> Any:
        """``(inputs, targets)`` with arrays as tensors; anything else as it is."""
        if type(data) not in (tuple, list) or len(data) != 2 or not (is_array(data[1]) or isinstance(data[1], Tensor)):
            return data
        _check_rows(*data)
        return self.inputs(data[0]), self.targets(data[1])

    def _tensor(self, name: str, values: Any, *, keep: bool) -> Tensor:
        tensor = tensor_of(name, values)
        return tensor.to(self.dtype) if tensor.is_floating_point() or not keep else tensor


def has_whole_numbers(data: Any) -> bool:
    """Whether data holds an array of whole numbers, of which only the network knows what they mean.

    >>> has_whole_numbers((np.zeros((2, 1), dtype=int), np.zeros(2))), has_whole_numbers((np.zeros((2, 1)), None))
    (True, False)
    """
    leaves = pytree.tree_leaves(data) if isinstance(data, tuple | list | dict) else [data]
    return any(isinstance(leaf, np.ndarray) and leaf.dtype.kind in "iub" for leaf in leaves)


def _check_rows(inputs: Any, targets: Any) -> None:
    """Refuse a frame and a column of pandas whose rows have other names: they are matched by position."""
    if not _is_pandas(inputs) or not _is_pandas(targets) or len(inputs) != len(targets):
        return
    if not inputs.index.equals(targets.index):
        fix = "In the same order by position? Use reset_index(drop=True) on both. Else use targets.loc[inputs.index]."
        checks.refuse("data", "have the same index in inputs and targets", "different ones", fix)


def _writable(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """An array that a tensor may share: writable, in native byte order, without negative strides."""
    native = values.astype(values.dtype.newbyteorder("="), copy=False)
    if native.dtype.kind == "f" and native.dtype.itemsize > 8:
        native = native.astype(np.float64)
    shared = native.flags.writeable and all(stride >= 0 for stride in native.strides)
    return native if shared else native.copy()
