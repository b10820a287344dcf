"""Hidden features of members: the inputs of the last layer, their similarity, and maps of them in the plane."""

from itertools import combinations
from typing import Any

import torch
from jaxtyping import Float, Integer, Shaped
from torch import Tensor, nn

from dissensus import checks
from dissensus.ensemble import Ensemble

PERPLEXITY = 30.0
"""Perplexity of t-SNE where there are enough examples: at least three times as many."""
_DIGITS = 3


@torch.no_grad()
def hidden(ensemble: Ensemble, x: Shaped[Tensor, "N *S"], *, batch_size: int = 512) -> Float[Tensor, "M N F"]:
    """Inputs of each member's last linear layer, in evaluation mode, on the CPU. The ensemble is not changed.

    >>> ensemble = Ensemble(lambda: nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2)), members=4)
    >>> hidden(ensemble, torch.ones(5, 3)).shape
    torch.Size([4, 5, 8])
    """
    return torch.stack([_member_features(ensemble.member(i).eval(), x, batch_size) for i in range(ensemble.members)])


def _member_features(network: nn.Module, x: Tensor, batch_size: int) -> Tensor:
    device = next(network.parameters()).device
    batches: list[Tensor] = []

    def keep(_layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        batches.append(inputs[0].flatten(1).cpu())

    _last_linear(network).register_forward_pre_hook(keep)  # the member is a copy, discarded with its hook
    for batch in x.split(batch_size):
        network(batch.to(device))
    return torch.cat(batches)


def _last_linear(network: nn.Module) -> nn.Linear:
    layers = [layer for layer in network.modules() if isinstance(layer, nn.Linear)]
    if not layers:
        fix = "Hidden features are the inputs of the last one."
        checks.refuse("ensemble", "have members with a linear layer", type(network).__name__, fix)
    return layers[-1]


def similarity(features: Float[Tensor, "M N F"]) -> float:
    """Linear centred kernel alignment (Kornblith et al., 2019), the mean over pairs of members.

    CKA(X, Y) = ‖YᵀX‖² / (‖XᵀX‖ ‖YᵀY‖) in Frobenius norms, X and Y ``[N, F]`` with columns of mean zero. From 0 to 1,
    and 1 for features that differ by a rotation and a scale. In float64. NaN for one member, and for features that are
    the same for all examples.

    >>> one = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, -1.0]])
    >>> round(similarity(torch.stack([one, one.flip(1), 3 * one])), 6), similarity(one.unsqueeze(0))
    (1.0, nan)
    """
    centred = features.double() - features.double().mean(1, keepdim=True)
    norms = [_product(member, member).sqrt() for member in centred]
    pairs = combinations(range(len(centred)), 2)
    alignments = [_product(centred[a], centred[b]) / (norms[a] * norms[b]) for a, b in pairs]
    return float(torch.stack(alignments).mean()) if alignments else float("nan")


def _product(first: Float[Tensor, "N F"], second: Float[Tensor, "N F"]) -> Tensor:
    """‖YᵀX‖², the inner product of the kernels XXᵀ and YYᵀ."""
    return (second.T @ first).square().sum()


def plane_maps(
    features: Float[Tensor, "M N F"], labels: Integer[Tensor, " N"], seed: int = 0
) -> list[list[list[float]]]:
    """Every member's features in the plane, by t-SNE: ``[x, y, class]`` per example, x and y within ±1.

    Every member has a separate map, so only neighbourhoods can be compared. Features that are the same for all
    examples lie at the origin.
    """
    return [
        [
            [round(x, _DIGITS), round(y, _DIGITS), int(label)]
            for (x, y), label in zip(map_, labels.tolist(), strict=True)
        ]
        for map_ in (_embedded(member, seed).tolist() for member in features)
    ]


def _embedded(features: Float[Tensor, "N F"], seed: int) -> Float[Tensor, "N 2"]:
    try:
        from sklearn.manifold import TSNE
    except ImportError as reason:
        raise ImportError("maps need scikit-learn: pip install 'dissensus[sklearn]'") from reason
    if bool((features == features[:1]).all()):
        return torch.zeros(len(features), 2)
    perplexity = min(PERPLEXITY, (len(features) - 1) / 3)
    plane: Any = TSNE(init="pca", random_state=seed, perplexity=perplexity).fit_transform(features.double().numpy())
    points = torch.from_numpy(plane).double()
    points -= (points.amax(0) + points.amin(0)) / 2
    return points / points.abs().max().clamp_min(torch.finfo(points.dtype).tiny)
