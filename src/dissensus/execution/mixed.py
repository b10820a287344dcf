"""Members of different architectures: a loop over modules behind the same interface."""

import copy
import functools
import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from dissensus import calls
from dissensus.calls import NetworkInputs, OutputChoice
from dissensus.dropout import keyed, set_keys
from dissensus.execution.body import ALL_ROWS, Body
from dissensus.execution.choice import Choices
from dissensus.execution.compiled import uncompiled
from dissensus.execution.exporting import is_exporting, refuse_training
from dissensus.execution.global_draws import MESSAGE, unkeyed_layer
from dissensus.execution.loop import side_by_side
from dissensus.execution.recomputation import recomputation_refused, recomputed_member
from dissensus.execution.recurrent import as_ordinary, keep_in_place
from dissensus.execution.signature import Visit, architecture_fingerprint, signature, with_output
from dissensus.execution.skeleton import Skeleton, Tensors, members_inside
from dissensus.execution.weights import Section, check_one_dtype, check_real

log = logging.getLogger("dissensus")


class MixedMembers(nn.Module):
    """M networks of different architectures, run one by one; on a GPU each on its own stream. A `Body`."""

    def __init__(self, networks: Sequence[nn.Module], output: OutputChoice | None = None) -> None:
        super().__init__()
        self.networks = nn.ModuleList(keep_in_place(keyed(uncompiled(network))) for network in networks)
        self.settings = [signature(network) for network in self.networks]
        self.skeletons = [Skeleton(network, output) for network in self.networks]
        self.backend = self.ran = "loop"
        self.channels_last = self.by_rule = self.recompute = False
        self.compiling: bool | str = False
        self.choices = Choices()
        self.passes: int | None = None
        self.train(networks[0].training)

    @property
    def requested_backend(self) -> str:
        """``"loop"``: members of different architectures have no other backend."""
        return self.backend

    @property
    def output(self) -> OutputChoice | None:
        """Which part of what a network returns is its output."""
        return self.skeletons[0].output

    @output.setter
    def output(self, output: OutputChoice | None) -> None:
        for skeleton in self.skeletons:
            skeleton.output = output

    def __len__(self) -> int:
        return len(self.networks)

    @property
    def alike(self) -> bool:
        """False: architectures differ."""
        return False

    def is_batchable(self) -> bool:
        """False: members of different architectures run one by one."""
        return False

    def fingerprint_parts(self) -> list[object]:
        """Everything that determines the outputs; how members run does not."""
        return [self.training, *with_output(self.output), *self.networks]

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor of every member, by ``index.name``."""
        return {f"{i}.{name}": t for i, skeleton in enumerate(self.skeletons) for name, t in skeleton.tensors().items()}

    def shared_tensors(self) -> dict[str, Tensor]:
        """None: members of different architectures share nothing."""
        return {}

    def shared_trainable(self) -> dict[str, nn.Parameter]:
        """None."""
        return {}

    def shared_packed(self) -> Tensor:
        """No parameters."""
        return torch.empty(1, 0)

    def attach_shared(self, rows: Tensor) -> None:
        """Never called: members of different architectures share nothing."""
        raise NotImplementedError

    def shared_views(self, row: Tensor) -> dict[str, Tensor]:  # noqa: ARG002
        """None."""
        return {}

    def trainable(self) -> list[dict[str, nn.Parameter]]:
        """Each member's parameters that want a gradient."""
        return [{n: p for n, p in network.named_parameters() if p.requires_grad} for network in self.networks]

    def packed(self) -> Tensor:
        """All trainable parameters as one matrix ``[M, P]``, shorter rows padded with zeros."""
        params_of_all = {f"{i}.{n}": p for i, params in enumerate(self.trainable()) for n, p in params.items()}
        check_real(params_of_all)
        check_one_dtype(params_of_all)
        rows = [torch.cat([p.detach().flatten() for p in params.values()]) for params in self.trainable()]
        flat = pad_sequence(rows, batch_first=True)
        for params, views in zip(self.trainable(), self.views(flat), strict=True):
            for name, p in params.items():
                p.data = views[name]
        return flat

    def views(self, flat: Tensor, rows: slice = slice(None)) -> list[dict[str, Tensor]]:
        """Each member's parameters as views of its row."""
        result: list[dict[str, Tensor]] = []
        for row, params in zip(flat.unbind(0), self.trainable()[rows], strict=True):
            sizes = [p.numel() for p in params.values()]
            pieces = row[: sum(sizes)].split(sizes)
            result.append({n: piece.view(p.shape) for (n, p), piece in zip(params.items(), pieces, strict=True)})
        return result

    def weights(self, flat: Tensor) -> list[dict[str, Tensor]]:
        """Each member's parameters as views of its row; they have one dtype."""
        return self.views(flat)

    @property
    def sections(self) -> tuple[Section, ...]:
        """Empty: parameters have one dtype."""
        return ()

    def run(
        self,
        flat: Tensor | None,
        x: NetworkInputs,
        *,
        per_member: bool = False,
        rows: slice | Tensor = ALL_ROWS,
        replayed: bool = False,  # noqa: ARG002
        backend: str | None = None,  # noqa: ARG002
        shared: Tensor | None = None,  # noqa: ARG002
    ) -> Tensor:
        """Outputs ``[M, B, ...]``; see `Body.run`. There is one backend, whatever is requested."""
        if not isinstance(rows, slice):
            raise TypeError("members of different architectures cannot be drawn at random: leave `active_members` out")
        indices = range(len(self))[rows]
        views = self.views(flat, rows) if flat is not None else [{} for _ in indices]

        def member_outputs(place: int, index: int) -> Tensor:
            if recomputed:
                inputs, state = calls.rows(x, place) if per_member else x, dict(self.networks[index].named_buffers())
                return recomputed_member(self.skeletons[index], views[place], state, inputs)
            late: dict[str, Tensor] = {}
            with self.skeletons[index].lending(views[place], late=late):
                outputs = self.skeletons[index].passed(calls.rows(x, place) if per_member else x)
            self.skeletons[index].adopt(late)  # buffers that its first pass has made
            return outputs

        if is_exporting():
            refuse_training(self.training)
        elif self.training and self.skeletons[0].functions_keyed is None:
            self._look_for_draws(x, per_member)
        recomputed = self.recompute and torch.is_grad_enabled() and flat is not None
        # Buffers that this pass makes would be made once more by a repeated pass.
        recomputed = recomputed and not any(skeleton.appearing for skeleton in self.skeletons)
        jobs = [functools.partial(member_outputs, place, index) for place, index in enumerate(indices)]
        device = calls.first_tensor(x).device
        self.ran = "loop, recomputed" if recomputed else "streams" if device.type == "cuda" else "loop"
        # Weights are lent for this pass only: recomputation in the backward pass would use other weights.
        guarded = flat is not None and not recomputed and torch.is_grad_enabled()
        with recomputation_refused() if guarded else nullcontext():
            outputs = [job() for job in jobs] if recomputed else side_by_side(jobs, device)
        if any(output.shape != outputs[0].shape for output in outputs):
            shapes = {tuple(output.shape) for output in outputs}
            raise ValueError(f"members must agree on the shape of their outputs; got {sorted(shapes)}.")
        return torch.cat(outputs) if all(map(members_inside, self.networks)) else torch.stack(outputs)

    def _look_for_draws(self, x: NetworkInputs, per_member: bool) -> None:
        """Key functions that drop units, and tell once if a network draws numbers that have no key."""
        first = calls.rows(x, 0) if per_member else x
        layers = [
            unkeyed_layer(skeleton, {}, dict(network.named_buffers()), first)
            for skeleton, network in zip(self.skeletons, self.networks, strict=True)
        ]
        unkeyed = [f"{layer} of member {index}" for index, layer in enumerate(layers) if layer is not None]
        if unkeyed:
            log.warning(MESSAGE, unkeyed[0])

    def member(self, index: int) -> nn.Module:
        """A copy of one member."""
        return as_ordinary(copy.deepcopy(self.networks[index]))

    def mean(self) -> nn.Module:
        """Always refused: weights of different architectures have no mean."""
        raise ValueError("members of different architectures cannot be averaged; `soup` needs one architecture.")

    def subset(self, indices: Sequence[int]) -> "MixedMembers":
        """The members at these indices, copied."""
        body = MixedMembers([self.member(i) for i in indices], self.output).train(self.training)
        for skeleton, index in zip(body.skeletons, indices, strict=True):
            skeleton.adopted = dict(self.skeletons[index].adopted)
        return body

    def identity(self, opaque: list[str] | None = None, visit: Visit | None = None) -> str:
        """A checksum of the architectures, by which checkpoints recognise them; see `Body.identity`."""
        late = self.late_names()[0]
        tensors = {name: tensor for name, tensor in self.tensors().items() if name not in late}
        shapes = [tuple(tensor.shape) for tensor in tensors.values()]
        settings = shapes if self.output is None else (shapes, *with_output(self.output))
        return architecture_fingerprint(self.networks, self.settings, tensors, settings, opaque, visit)

    def set_keys(self, owners: Sequence[tuple[int, int]]) -> None:
        """Key dropout by the (run seed, member) of each network."""
        for network, owner in zip(self.networks, owners, strict=True):
            set_keys(network, [owner])

    def copy_member(self, index: int, other: Body) -> None:
        """Overwrite one member with the member at the same index of another body."""
        self.adopt({n: torch.zeros_like(t) for n, t in other.tensors().items() if n.startswith(f"{index}.")})
        tensors = self.tensors()
        with torch.no_grad():
            for name, tensor in other.tensors().items():
                if name.startswith(f"{index}."):
                    tensors[name].copy_(tensor)

    def attach(self, flat: Tensor, state: Tensors) -> None:
        """Replace all weights: parameters become views of a padded matrix ``[M, P]``, and ``state`` the buffers."""
        self.adopt(state)
        for views, params in zip(self.views(flat.detach()), self.trainable(), strict=True):
            for name, parameter in params.items():
                parameter.data = views[name]
        for name, tensor in self.state().items():
            tensor.data = state[name]

    def state(self) -> dict[str, Tensor]:
        """Each member's buffers, by ``index.name``."""
        return {f"{i}.{n}": b for i, network in enumerate(self.networks) for n, b in network.named_buffers()}

    def late_names(self) -> tuple[list[str], list[str]]:
        """Buffers that a pass has made, and those that are None; see `Body.late_names`."""
        made = [f"{i}.{name}" for i, skeleton in enumerate(self.skeletons) for name in skeleton.adopted]
        return made, [f"{i}.{name}" for i, skeleton in enumerate(self.skeletons) for name in skeleton.empty]

    def adopt(self, tensors: Tensors) -> None:
        """Take buffers that members do not have yet, because their first pass makes them; others are left."""
        for index, skeleton in enumerate(self.skeletons):
            own = {name.partition(".")[2]: t for name, t in tensors.items() if name.startswith(f"{index}.")}
            known = skeleton.tensors()
            skeleton.adopt({name: t for name, t in own.items() if name not in known and skeleton.takes(name)})

    def snapshot(self) -> Callable[[], None]:
        """Copy all buffers; what is returned restores them, and takes those away that have appeared since."""
        copies = {name: tensor.clone() for name, tensor in self.state().items()}

        def restore() -> None:
            for index, skeleton in enumerate(self.skeletons):
                skeleton.discard([name for name in list(skeleton.adopted) if f"{index}.{name}" not in copies])
            with torch.no_grad():
                for name, tensor in self.state().items():
                    tensor.copy_(copies[name])

        return restore

    def average(self, into: Tensors, source: Tensors, weight: Tensor) -> None:
        """Move tensors towards those of ``source`` by a weight ``[M]``; names are those of `state`."""
        with torch.no_grad():
            for name, tensor in into.items():
                target, part = source[name].to(tensor.dtype), weight[int(name.split(".", 1)[0])].to(tensor.dtype)
                # Infinities of a mask, and NaN of a member that stands still, would become NaN.
                moves = (part > 0) & (target != tensor)
                tensor.copy_(torch.where(moves, tensor.lerp(target, part), tensor))

    def merge(self, into: Tensors, source: Tensors, members: Tensor) -> None:
        """Copy the members of a mask (bool ``[M]``) from ``source`` to ``into``, both as `state` returns them."""
        with torch.no_grad():
            for name, tensor in into.items():
                selected = members[int(name.split(".", 1)[0])]
                tensor.copy_(torch.where(selected, source[name], tensor))  # reads no mask back: a graph may hold it
