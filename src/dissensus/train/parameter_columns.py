"""Which columns of the matrix of all weights, ``[M, P]``, belong to which parameters."""

import fnmatch
from collections.abc import Iterator, Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from dissensus import checks
from dissensus.execution import Body
from dissensus.train.optim import MatrixColumns

BIAS, NORM = "bias", "norm"
"""Words for parameters by their kind; every other entry of ``no_decay`` is a pattern of names."""
_NORMS = (
    nn.modules.batchnorm._NormBase,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
)


def checked_no_decay(no_decay: object) -> tuple[str, ...] | bool:
    """The setting ``no_decay`` as it is, or refused."""
    if isinstance(no_decay, bool):
        return no_decay
    requirement = "be True, or a list of 'bias', 'norm' and patterns of parameter names such as 'head.*'"
    if no_decay is None or isinstance(no_decay, str | bytes) or not isinstance(no_decay, Sequence):
        fix = f"One pattern? Use [{no_decay!r}]." if isinstance(no_decay, str) else ""
        checks.refuse("no_decay", requirement, repr(no_decay), fix, TypeError)
    for entry in no_decay:
        if not isinstance(entry, str):
            checks.refuse("no_decay", requirement, repr(entry), error=TypeError)
    return tuple(no_decay)


def shared_decay_mask(body: Body, row: Tensor, no_decay: tuple[str, ...] | bool) -> Float[Tensor, "1 P"] | None:
    """As `decay_mask`, for the rows of parameters that members share; one row for all runs."""
    if not no_decay:
        return None
    entries = (BIAS, NORM) if no_decay is True else no_decay
    mask = torch.ones_like(row[:1])
    norms, params = _norm_parameters(body), body.shared_trainable()
    with torch.no_grad():
        for name, view in body.shared_views(mask).items():
            if any(_matches(entry, name, id(params[name]) in norms) for entry in entries):
                view.fill_(0)
    return mask


def decay_mask(body: Body, flat: Tensor, no_decay: tuple[str, ...] | bool) -> Float[Tensor, "#M P"] | None:
    """1 for weights that decay and 0 for those that do not; None where all decay.

    One row for all members, or one for each where architectures differ.
    """
    if not no_decay:
        return None
    entries = (BIAS, NORM) if no_decay is True else no_decay
    mask = torch.ones_like(flat[:1] if body.alike else flat)
    matched: set[str] = set()
    with torch.no_grad():
        for views, names, norms in _rows(body, mask):
            for name, view in views.items():
                matching = [entry for entry in entries if _matches(entry, name, names[name] in norms)]
                matched.update(matching)
                if matching:
                    view.fill_(0)
    norms, shared = _norm_parameters(body), body.shared_trainable()
    matched |= {e for e in entries for name, p in shared.items() if _matches(e, name, id(p) in norms)}
    for entry in entries:
        if entry not in (*matched, BIAS, NORM):  # a network without norms has none that could decay
            names = ", ".join(dict.fromkeys(name for views, _, _ in _rows(body, mask) for name in views))
            checks.refuse("no_decay", "match parameters to be trained", repr(entry), f"There are: {names}.")
    return mask


def _rows(body: Body, rows: Tensor) -> Iterator[tuple[dict[str, Tensor], dict[str, int], set[int]]]:
    """Of each row: its parameters as views, the identity of each by name, and identities of those of norm layers."""
    norms = _norm_parameters(body)
    tensors = body.tensors()
    for index, views in enumerate(body.views(rows)):
        yield views, {name: id(tensors[name if body.alike else f"{index}.{name}"]) for name in views}, norms


def _norm_parameters(body: Body) -> set[int]:
    """Identities of the parameters of norm layers."""
    return {id(p) for layer in body.modules() if _is_norm(layer) for p in layer.parameters(recurse=False)}


def _is_norm(layer: nn.Module) -> bool:
    """Whether a layer normalises: one of torch's, or one whose class is named so, as in ``LlamaRMSNorm``."""
    return isinstance(layer, _NORMS) or type(layer).__name__.rstrip("123d").endswith("Norm")


def _matches(entry: str, name: str, in_norm: bool) -> bool:
    last = name.rpartition(".")[2]
    if entry == NORM:
        return in_norm
    if entry == BIAS:  # in recurrent layers it is bias_hh_l0, in attention in_proj_bias
        return last.startswith("bias") or last.endswith("bias")
    return fnmatch.fnmatchcase(name, entry)


def matrix_columns(body: Body, flat: Tensor) -> MatrixColumns:
    """The columns of 2-D parameters, apart from those of embeddings, for Muon."""
    if not body.alike:
        fix = "Pass a callable, which makes an optimizer for each member."
        checks.refuse(
            "optimizer", "be an optimizer other than 'muon' for members of different architectures", "'muon'", fix
        )
    if body.sections:
        fix = "Use 'adamw', or pass a callable, which makes an optimizer for each member."
        got = "'muon'"
        checks.refuse("optimizer", "be an optimizer other than 'muon' for parameters of several dtypes", got, fix)
    places = torch.arange(flat.shape[1]).unsqueeze(0)
    columns = _by_shape(body, body.views(places)[0], body.tensors(), flat.device)
    if not columns.shapes and not shared_matrix_columns(body, flat).shapes:
        fix = "Weights of convolutions and embeddings are not among them: use 'adamw'."
        checks.refuse(
            "optimizer", "be an optimizer other than 'muon' for networks without 2-D parameters", "'muon'", fix
        )
    return columns


def shared_matrix_columns(body: Body, like: Tensor) -> MatrixColumns:
    """As `matrix_columns`, for the row of parameters that members share."""
    shared = body.shared_trainable()
    places = torch.arange(sum(parameter.numel() for parameter in shared.values())).unsqueeze(0)
    return _by_shape(body, body.shared_views(places) if shared else {}, shared, like.device)


def _by_shape(
    body: Body, places: Mapping[str, Tensor], tensors: Mapping[str, Tensor], device: torch.device
) -> MatrixColumns:
    """The places of matrices, sorted by shape, and of all other parameters; none are possible."""
    tables = nn.Embedding | nn.EmbeddingBag
    embeddings = {id(p) for m in body.modules() if isinstance(m, tables) for p in m.parameters(recurse=False)}
    none = torch.arange(0)
    by_shape: dict[tuple[int, int], list[Tensor]] = {}
    rest: list[Tensor] = [none]
    for name, view in places.items():
        if view.ndim == 2 and id(tensors[name]) not in embeddings:
            height, width = view.shape
            by_shape.setdefault((height, width), []).append(view.flatten())
        else:
            rest.append(view.flatten())
    return MatrixColumns(
        torch.cat([none, *(columns for views in by_shape.values() for columns in views)]).to(device),
        torch.cat(rest).to(device),
        tuple((len(views), *shape) for shape, views in by_shape.items()),
    )
