"""ONNX files."""

import logging
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from dissensus import checks, storage
from dissensus.axes import PerExampleLoss
from dissensus.execution.skeleton import first_line
from dissensus.export.outputs import Outputs, Pool, Task
from dissensus.export.programs import checks_off, example_inputs, program
from dissensus.export.tracing import input_names
from dissensus.output_files import is_replaceable, write_output

if TYPE_CHECKING:
    from torch.export import ExportedProgram

ONE_FILE = 2**31 - 2**24
"""Bytes of weights above which they go into a second file beside the first: a protobuf holds no more."""


def onnx(
    model: nn.Module,
    path: str | Path,
    example: Any,
    *,
    task: Task | None = None,
    loss: str | PerExampleLoss | None = None,
    pool: Pool | None = None,
    class_axis: int = 2,
    member_outputs: bool = False,
    outputs: Outputs | None = None,
    dynamic_batch: bool = True,
    opset: int | None = None,
) -> Path:
    """Write a model as an ONNX file with named inputs and outputs, and return its path.

    Arguments are those of `program`, which traces the model. The first axis of inputs is named ``batch``. One tensor is
    called ``input``; several have the names of the network's arguments, and parts of nested ones follow with an
    underscore. An earlier file is replaced when the new one is whole. Weights of 2 GB or more lie in a second file,
    ``NAME.data``. It needs ``pip install 'dissensus[export]'``.

    Args:
        model: As for `program`.
        path: The file to write; its name ends in ``.onnx``.
        example: As for `program`.
        task: As for `program`.
        loss: As for `program`.
        pool: As for `program`.
        class_axis: As for `program`.
        member_outputs: As for `program`.
        outputs: As for `program`.
        dynamic_batch: As for `program`.
        opset: Version of ONNX's operators; torch's default where it is left out.

    >>> import tempfile
    >>> from dissensus import Ensemble
    >>> ens = Ensemble(lambda: nn.Linear(3, 2), members=5)
    >>> file = onnx(ens, Path(tempfile.mkdtemp()) / "model.onnx", torch.zeros(4, 3), pool="score")
    >>> import onnxruntime
    >>> session = onnxruntime.InferenceSession(file)
    >>> [entry.name for entry in session.get_outputs()]
    ['probs', 'entropy', 'mutual_information', 'aleatoric']
    >>> probs, *_ = session.run(None, {"input": torch.zeros(7, 3).numpy()})
    >>> probs.shape
    (7, 2)
    """
    file = _place(path)
    if opset is not None:
        checks.count("opset", opset)
    _check_installed()
    exported = program(
        model,
        example,
        task=task,
        loss=loss,
        pool=pool,
        class_axis=class_axis,
        member_outputs=member_outputs,
        outputs=outputs,
        dynamic_batch=dynamic_batch,
    )
    converted = _converted(exported, input_names(model, example_inputs(model, example)), opset)
    size = sum(tensor.nbytes for tensor in exported.state_dict.values())
    with storage.write_errors_told(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        if size < ONE_FILE:
            write_output(file, converted.model_proto.SerializeToString())
        else:
            _write_both(file, converted)
    return file


def _write_both(file: Path, converted: Any) -> None:
    """Write a model and its weights as two files; both are whole before they get their places."""
    place = Path(os.path.realpath(file))
    with tempfile.TemporaryDirectory(prefix=".", suffix=".unfinished", dir=place.parent) as folder:
        part = Path(folder) / place.name
        converted.save(part, external_data=True)
        for name in (f"{place.name}.data", place.name):
            os.replace(Path(folder) / name, place.parent / name)


def _place(path: str | Path) -> Path:
    file = checks.path("path", path)
    if file.suffix != ".onnx":
        checks.refuse("path", "end in .onnx", repr(file.name))
    if not is_replaceable(file):
        checks.refuse("path", "be a regular file, or a place for a new one", f"{file}, which is something else")
    return file


def _check_installed() -> None:
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as reason:
        raise ImportError("ONNX files are written by onnx and onnxscript: pip install 'dissensus[export]'") from reason


def _converted(exported: "ExportedProgram", names: list[str], opset: int | None) -> Any:
    """The program in ONNX's operators."""
    tree: Any = exported.call_spec.out_spec
    outputs = list(pytree.tree_unflatten(range(tree.num_leaves), tree))
    names = [f"{name}_input" if name in outputs else name for name in names]  # in a file names are unique
    try:
        with checks_off(), torch.no_grad(), _quiet():
            converted: Any = torch.onnx.export(
                exported, input_names=names, output_names=outputs, opset_version=opset, dynamo=True, verbose=False
            )
    except Exception as reason:  # the converter raises errors of many types
        fix = "Programs of torch.export need no conversion: use dissensus.export.program."
        checks.refuse("model", "consist of operators that ONNX has", first_line(reason), fix)
    version = converted.model.opset_imports.get("")
    if opset is not None and version != opset:  # the converter leaves a program as it is where it fails
        fix = "Leave `opset` out for the converter's own."
        checks.refuse("opset", "be a version that this program can be converted to", f"{opset}, not {version}", fix)
    _name_batch(converted.model)
    return converted


@contextmanager
def _quiet() -> Iterator[None]:
    """A block in which the converter does not report versions of operators that it tries."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _name_batch(model: Any) -> None:
    """Call the first axis ``batch``; the tracer has numbered it."""
    import onnx_ir

    first = model.graph.inputs[0].shape[0]
    if isinstance(first, onnx_ir.SymbolicDim):
        number, known = str(first.value), set()
        values = [*model.graph.inputs, *(output for node in model.graph for output in node.outputs)]
        for value in values:
            if value.shape is None or id(value.shape) in known:
                continue
            known.add(id(value.shape))
            sizes = [_renamed(size, number) for size in value.shape]
            value.shape = onnx_ir.Shape(sizes)


def _renamed(size: Any, number: str) -> Any:
    if isinstance(size, int):
        return size
    return re.sub(rf"\b{number}\b", "batch", str(size.value)) if size.value is not None else size
