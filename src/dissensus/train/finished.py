"""Runs that are done, put aside while the others go on."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Finished:
    """Weights of runs that are done, at their places among all runs."""

    flat: Tensor
    state: dict[str, Tensor]

    @classmethod
    def like(cls, flat: Tensor, state: Mapping[str, Tensor]) -> "Finished":
        """Room for as many rows as there are now."""
        return cls(torch.zeros_like(flat), {name: torch.zeros_like(tensor) for name, tensor in state.items()})

    def put(self, runs: list[int], members: int, flat: Tensor, state: Mapping[str, Tensor]) -> None:
        """Take the rows of some runs, named by their numbers among all runs."""
        rows = torch.tensor([run * members + m for run in runs for m in range(members)], device=self.flat.device)
        self.flat[rows] = flat
        for name, tensor in state.items():
            self.state[name][rows] = tensor


def some_rows(tensors: Mapping[str, Tensor], rows: Tensor) -> dict[str, Tensor]:
    """Some rows of every tensor."""
    return {name: tensor[rows] for name, tensor in tensors.items()}
