"""Early stopping and best weights, for each run as a whole or for each member."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from dissensus.execution import Body
from dissensus.train.settings import ValidationSettings


class EarlyStopping:
    """Keeps the best weights of each unit: of all members of a run together, or of each member.

    Rows are the members of all runs, ``G = R·M``. With ``mode="min"`` lower is better, with ``"max"`` higher. A unit
    whose metric has not improved by more than ``min_delta`` for ``patience`` epochs stops. Epochs count from 1; a best
    epoch of 0 means that there is none.
    """

    def __init__(self, body: Body, flat: Tensor, members: int, rule: ValidationSettings) -> None:
        self.body, self.rule = body, rule
        self.sign = -1.0 if rule.mode == "max" else 1.0
        self.rows_per_unit = 1 if rule.per_member else members
        units = len(flat) // self.rows_per_unit
        self.best = torch.full((units,), self.sign * torch.inf, dtype=torch.float64)
        self.best_epoch = torch.zeros(units, dtype=torch.int64)
        self.best_flat = flat.detach().clone()
        self.best_state = {name: tensor.clone() for name, tensor in body.state().items()}

    def update(
        self,
        epoch: int,
        values: Float[Tensor, " U"],
        flat: Tensor,
        active: Bool[Tensor, " G"],
        everyone: Tensor | None = None,
    ) -> Bool[Tensor, " G"]:
        """Take the metric of an epoch into account; return the rows that go on.

        A unit whose rows all rest keeps its best weights: an improvement cannot come from its training. ``everyone``:
        the active rows of all processes, where several train one run.
        """
        values = values.detach().cpu().double()
        training = active.cpu().view(-1, self.rows_per_unit).any(1)
        if everyone is not None and not self.rule.per_member and len(training) == 1:
            training = everyone.cpu().any().reshape(1)
        improved = (self.sign * values < self.sign * self.best - self.rule.min_delta) & training
        self.best = torch.where(improved, values, self.best)
        self.best_epoch = torch.where(improved, epoch, self.best_epoch)
        if bool(improved.any()):
            rows = self._rows(improved, flat)
            self.best_flat[rows] = flat.detach()[rows]
            state = self.body.state()
            for name, tensor in state.items():
                if name not in self.best_state:  # made by a pass
                    self.best_state[name] = tensor.clone()
            self.body.merge(self.best_state, state, rows)
        if self.rule.patience is None:
            return active
        return active & self._rows(epoch - self.best_epoch < self.rule.patience, flat)

    def _rows(self, units: Tensor, like: Tensor) -> Tensor:
        return units.repeat_interleave(self.rows_per_unit).to(like.device)

    def restore(self, flat: Tensor, rows: Bool[Tensor, " G"]) -> None:
        """Restore the best weights of some rows, unless the last weights are to be kept or no epoch was best."""
        if self.rule.keep == "last":
            return
        rows = self._rows(self.best_epoch > 0, flat) & rows
        with torch.no_grad():
            flat[rows] = self.best_flat[rows]
        state = self.body.state()
        self.body.merge({name: state[name] for name in self.best_state}, self.best_state, rows)

    def select(self, rows: Bool[Tensor, " G"]) -> None:
        """Go on with these rows only."""
        units = rows.cpu().view(-1, self.rows_per_unit).all(1)
        self.best, self.best_epoch = self.best[units], self.best_epoch[units]
        self.best_flat = self.best_flat[rows]
        self.best_state = {name: tensor[rows] for name, tensor in self.best_state.items()}

    def best_epochs(self, runs: int) -> list[int] | list[list[int]]:
        """The best epoch of each run, or of each of its members; 0 where there is none."""
        return self.best_epoch.view(runs, -1).tolist() if self.rule.per_member else self.best_epoch.tolist()

    def tensors(self) -> dict[str, Tensor]:
        """Everything that a checkpoint must hold."""
        state = {f"best_state.{name}": tensor for name, tensor in self.best_state.items()}
        return {"best": self.best, "best_epoch": self.best_epoch, "best_flat": self.best_flat, **state}

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Restore what `tensors` returned."""
        self.best, self.best_epoch = tensors["best"].cpu(), tensors["best_epoch"].cpu()
        self.best_flat = tensors["best_flat"]
        prefix = "best_state."
        self.best_state = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
