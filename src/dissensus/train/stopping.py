"""Early stopping and best weights, for the ensemble as one or for each member on its own."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from dissensus.execution import MixedMembers, StackedMembers


class Watch:
    """Remembers the best weights of each unit: of all members together, or of each member.

    Lower is better. A unit whose metric has not fallen by more than ``min_delta`` for ``patience`` epochs is done.
    """

    def __init__(
        self,
        body: StackedMembers | MixedMembers,
        flat: Tensor,
        *,
        per_member: bool,
        patience: int | None,
        min_delta: float,
    ) -> None:
        units = len(body) if per_member else 1
        self.body, self.per_member, self.patience, self.min_delta = body, per_member, patience, min_delta
        self.best = torch.full((units,), torch.inf)
        self.best_epoch = torch.full((units,), -1)
        self.best_flat = flat.detach().clone()
        self.best_state = {name: tensor.clone() for name, tensor in body.state().items()}

    def see(
        self, epoch: int, values: Float[Tensor, " U"], flat: Tensor, active: Bool[Tensor, " M"]
    ) -> Bool[Tensor, " M"]:
        """Take an epoch's metric into account; return which members go on.

        Members that rest keep the best weights they have: an improvement of theirs cannot come from training.
        """
        improved = values.detach().cpu().to(torch.float32) < self.best - self.min_delta
        if self.per_member:
            improved &= active.cpu()
        self.best = torch.where(improved, values.detach().cpu().to(torch.float32), self.best)
        self.best_epoch = torch.where(improved, epoch, self.best_epoch)
        members = improved.expand(len(self.body)).to(flat.device)
        if bool(improved.any()):
            self.best_flat[members] = flat.detach()[members]
            self.body.merge(self.best_state, self.body.state(), members)
        if self.patience is None:
            return active
        going = (epoch - self.best_epoch < self.patience).expand(len(self.body))
        return active & going.to(active.device)

    def restore(self, flat: Tensor) -> None:
        """Put the best weights back, where there were any."""
        found = (self.best_epoch >= 0).expand(len(self.body)).to(flat.device)
        with torch.no_grad():
            flat[found] = self.best_flat[found]
        self.body.merge(self.body.state(), self.best_state, found)

    @property
    def summary(self) -> int | list[int]:
        """The best epoch, or one per member."""
        return self.best_epoch.tolist() if self.per_member else int(self.best_epoch[0])
