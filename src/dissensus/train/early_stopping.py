"""Early stopping and best weights: for each run as one, or for each member on its own."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from dissensus.execution import Body


class Watch:
    """Remembers the best weights of each unit: of all members of a run together, or of each member.

    Rows are the members of all runs, ``G = R·M``. With ``mode="min"`` lower is better, with ``"max"`` higher. A unit
    whose metric has not improved by more than ``min_delta`` for ``patience`` epochs is done. Epochs count from 1; a
    best epoch of 0 says that there was none.
    """

    def __init__(
        self,
        body: Body,
        flat: Tensor,
        *,
        members: int,
        per_member: bool,
        patience: int | None,
        min_delta: float,
        keep: str = "best",
        mode: str = "min",
    ) -> None:
        self.body, self.per_member, self.patience, self.min_delta = body, per_member, patience, min_delta
        self.keep, self.sign = keep, -1.0 if mode == "max" else 1.0
        self.rows_per_unit = 1 if per_member else members
        units = len(flat) // self.rows_per_unit
        self.best = torch.full((units,), self.sign * torch.inf, dtype=torch.float64)
        self.best_epoch = torch.zeros(units, dtype=torch.int64)
        self.best_flat = flat.detach().clone()
        self.best_state = {name: tensor.clone() for name, tensor in body.state().items()}

    def see(
        self, epoch: int, values: Float[Tensor, " U"], flat: Tensor, active: Bool[Tensor, " G"]
    ) -> Bool[Tensor, " G"]:
        """Take an epoch's metric into account; return which rows go on.

        A unit that rests keeps the best weights it has: an improvement of its cannot come from training.
        """
        values = values.detach().cpu().double()
        training = active.cpu().view(-1, self.rows_per_unit).any(1)
        improved = (self.sign * values < self.sign * self.best - self.min_delta) & training
        self.best = torch.where(improved, values, self.best)
        self.best_epoch = torch.where(improved, epoch, self.best_epoch)
        if bool(improved.any()):
            rows = self._rows(improved, flat)
            self.best_flat[rows] = flat.detach()[rows]
            self.body.merge(self.best_state, self.body.state(), rows)
        if self.patience is None:
            return active
        return active & self._rows(epoch - self.best_epoch < self.patience, flat)

    def _rows(self, units: Tensor, like: Tensor) -> Tensor:
        return units.repeat_interleave(self.rows_per_unit).to(like.device)

    def restore(self, flat: Tensor, rows: Bool[Tensor, " G"]) -> None:
        """Put the best weights of some rows back, where there were any and they are wanted."""
        if self.keep == "last":
            return
        found = self._rows(self.best_epoch > 0, flat) & rows
        with torch.no_grad():
            flat[found] = self.best_flat[found]
        self.body.merge(self.body.state(), self.best_state, found)

    def select(self, rows: Bool[Tensor, " G"]) -> None:
        """Go on with these rows only."""
        units = rows.cpu().view(-1, self.rows_per_unit).all(1)
        self.best, self.best_epoch = self.best[units], self.best_epoch[units]
        self.best_flat = self.best_flat[rows]
        self.best_state = {name: tensor[rows] for name, tensor in self.best_state.items()}

    def best_epochs(self, runs: int) -> list[int] | list[list[int]]:
        """For each run the best epoch, or one per member; 0 where there was none."""
        return self.best_epoch.view(runs, -1).tolist() if self.per_member else self.best_epoch.tolist()

    def tensors(self) -> dict[str, Tensor]:
        """Everything a checkpoint must hold."""
        state = {f"best_state.{name}": tensor for name, tensor in self.best_state.items()}
        return {"best": self.best, "best_epoch": self.best_epoch, "best_flat": self.best_flat, **state}

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Take over what `tensors` gave."""
        self.best, self.best_epoch, self.best_flat = (
            tensors["best"].cpu(),
            tensors["best_epoch"].cpu(),
            tensors["best_flat"],
        )
        self.best_state = {name: tensors[f"best_state.{name}"] for name in self.best_state}
