"""Stacked members behind one callable: ``x [B, ...] -> [M, B, ...]``."""

import copy
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor, nn

from dissensus import checks, storage
from dissensus.architecture import Architecture
from dissensus.batch import Unpack
from dissensus.calls import OutputChoice, call, check_output_choice
from dissensus.dropout import key_tensors
from dissensus.execution import (
    BACKENDS,
    Backend,
    Body,
    Choice,
    Choices,
    DifferentMembers,
    MixedMembers,
    StackedMembers,
    are_passes_replayed,
    inference,
)
from dissensus.execution.backends import checked
from dissensus.execution.inference import Inputs
from dissensus.execution.ranks import Ranks, adopt, checked_parallel, members_of_rank, several_ranks
from dissensus.execution.sharing import FROZEN, Shared, equal_frozen, stored_choice
from dissensus.execution.stored_architectures import Beside, checked_architecture, stored_architecture, trusted_builds
from dissensus.randomness import Use, derived_seed, drawn_seed, seeded
from dissensus.training_rows import TrainingRows

Build = Callable[[], nn.Module]
KIND = "dissensus.ensemble"
FORMATS = storage.Formats(newest=2, whole=1)
"""Of saved ensembles; 1 is that of 0.1, and 2 has several weights files."""


class GreedySoup(NamedTuple):
    """One network of averaged weights, the members whose average it is, in the order they were taken, and its score."""

    network: nn.Module
    members: list[int]
    score: float


class _Beside(Beside):
    """Holds what belongs to an ensemble, but neither to its submodules nor to its weights and its fingerprint."""

    def __init__(self) -> None:
        super().__init__()
        self.twin: Ensemble | None = None
        self.in_bag: Tensor | Literal["all"] | None = "all"
        self.whole: weakref.ref[Ensemble] | None = None
        """The members whose heads these are: they have the same weights; see `dissensus.SharedTrunk.of`."""
        self.parallel: str | None = None
        """How processes share the members; None: all of them are here."""
        self.ranks: Ranks | None = None
        """The place of this process among them, without connections."""

    def __getstate__(self) -> dict[str, Any]:
        """Without the whole members: those of a copy have other weights."""
        return {**vars(self), "whole": None}


class Ensemble(nn.Module):
    """M members, initialised one by one and stored stacked; ``ens(x)`` gives ``[M, B, ...]``.

    Args:
        build: Returns a new, freshly initialised member: any ``nn.Module`` whose inputs are tensors, or tuples and
            dictionaries of them, with the batch as first axis. With a `dissensus.Architecture`, `save` stores how to
            build a member, and `load` needs no ``build``.
        members: M.
        seed: Determines every member's initial weights, and dropout outside of `fit`. Member i's do not depend on M.
            None draws the seed from torch's global generator, so that ``torch.manual_seed`` determines it, and two
            ensembles in a row differ. ``ens.seed`` is the seed that was drawn.
        backend: ``"loop"`` runs members in turn, ``"vmap"`` all at once, ``"batched"`` chains of linear layers as
            batched products, ``"streams"`` side by side on a GPU, each on a CUDA stream (elsewhere in turn),
            ``"layerwise"`` in turn on a CPU with images channels last, ``"stacked"`` convolutions and batch norm of
            all members in one Triton kernel each on a GPU (elsewhere as grouped convolutions); ``"auto"`` measures on
            the first batch, remembers, and tells in `choices`. A `dissensus.execution.Backend` of your own is passed as
            it is; what `save` wrote of such an ensemble is loaded with ``"auto"``.
        output: Which part of what a member returns is its output, where that is more than one tensor: a name (an
            attribute or a key, as ``"logits"`` of transformers' models), a position, or a function of it.
        shared: Parameters and buffers that are stored once for all members, with the values of member 0: ``"frozen"``
            for all parameters that want no gradient and the buffers of their layers, patterns of names (such as
            ``"encoder.*"``, or a list), or a function of a name. Layers with shared buffers stay in evaluation mode.
            What depends on shared tensors and common inputs alone is computed once for all members. Shared
            parameters that want a gradient are trained for all members at once (see `fit`). `dissensus.adapters` makes
            networks for it.
        parallel: Under ``torchrun``, ``"members"`` or ``"members+data"`` builds the members of this process only, and
            `fit` trains them there. `predict` and `save` then need a call in every process, and give what one process
            would give. What needs all members at one place, such as a pass ``ens(x)`` or `member`, is refused:
            `gathered` has them. Without torchrun nothing changes.

    Batch norm, dropout and shared parameters behave as in M separate modules, whatever the backend. Parameters and
    buffers are stored once, ``[M, ...]``; ``.to()``, ``.train()``, ``.parameters()`` are those of any module.

    >>> ens = Ensemble(lambda: nn.Linear(3, 2), members=5)
    >>> ens(torch.zeros(7, 3)).shape
    torch.Size([5, 7, 2])
    """

    def __init__(
        self,
        build: Build,
        members: int = 5,
        seed: int | None = 0,
        backend: str | Backend = "auto",
        *,
        output: OutputChoice | None = None,
        shared: Shared = None,
        parallel: Literal["members", "members+data"] | None = None,
    ) -> None:
        super().__init__()
        self._beside = _Beside()
        self._beside.training_rows = TrainingRows.none()
        self._beside.architecture = build if isinstance(build, Architecture) else None
        members = checks.count("members", members)
        self.seed = seed = _seed(seed)
        check_output_choice(output)
        self.member_ids = list(range(members))
        self._share(parallel)
        own = self.own
        try:
            networks = fresh_members(build, seed, own.stop, own.start)
            if shared is not None and own.start:  # whose values are those of member 0
                networks = chain(fresh_members(build, seed, 1), networks)
            body = StackedMembers.of(networks, shared)
            self.body: Body = body if len(body) == own.stop - own.start else body.subset(range(1, len(body)))
            self.body.output = output
        except DifferentMembers as reason:
            raise ValueError(
                f"`build` must return the same architecture at every call: {reason}. "
                "Different architectures? Use Ensemble.from_modules."
            ) from reason
        self.body.set_keys([(seed, member) for member in self.member_ids[own]])
        self.train(self.body.training)
        self._set_backend(backend)

    def _share(self, parallel: object) -> None:
        """Leave members to other processes, where there are any."""
        beside = self._beside
        beside.parallel = checked_parallel(parallel)
        beside.ranks = None if beside.parallel is None else members_of_rank(self.members, beside.parallel)

    @property
    def parallel(self) -> str | None:
        """How processes share the members: ``"members"``, ``"members+data"``, or None if all of them are here."""
        return self._beside.parallel

    @property
    def own(self) -> slice:
        """The members that this process holds.

        >>> Ensemble(lambda: nn.Linear(3, 2), members=5).own
        slice(0, 5, None)
        """
        return slice(0, self.members) if self._beside.ranks is None else self._beside.ranks.own

    def gathered(self) -> "Ensemble":
        """A copy of the whole ensemble, from the members of all processes: every process must call it.

        >>> len(Ensemble(lambda: nn.Linear(3, 2), members=5).gathered())
        5
        """
        if self.parallel is None:
            return copy.deepcopy(self)
        with several_ranks(self.members, self.device, self.parallel, "gathered") as ranks:
            body = self.body.subset([0] * self.members)
            adopt(body, self.body, ranks)
        whole = self.around(body, self.seed, list(self.member_ids), self.body.requested_backend)
        whole.body.output = self.output
        whole.body.set_keys([(self.seed, member) for member in self.member_ids])
        whole.training_rows, whole.in_bag = self.training_rows, self.in_bag
        whole._beside.architecture = self.architecture
        return whole.train(self.training)

    def check_whole(self, what: str) -> None:
        """Refuse what needs members that other processes hold, and name the way to get them."""
        if self.parallel is not None:
            own, fix = self.own, "Use ens.gathered(), in every process, or ens.predict(...)."
            requirement = f"hold all members for {what}"
            checks.refuse("ensemble", requirement, f"members {own.start} to {own.stop - 1} of {self.members}", fix)

    def _set_backend(self, backend: str | Backend) -> None:
        backend = checked(backend)
        if isinstance(self.body, StackedMembers):  # others run in a loop
            self.body.request_backend(backend)

    @classmethod
    def from_modules(
        cls,
        modules: Iterable[nn.Module],
        *,
        seed: int | None = 0,
        backend: str | Backend = "auto",
        output: OutputChoice | None = None,
        shared: Shared = None,
    ) -> "Ensemble":
        """An ensemble of modules that exist, trained or not; they are copied.

        Modules of one architecture are stacked. Different ones are allowed as long as their outputs agree in shape, and
        run in a loop. ``output`` says which part of what a member returns counts, and ``shared`` what members share, as
        for an `Ensemble`; with ``"frozen"`` that is what is equal in all modules among what is frozen, and otherwise
        tensors that differ are refused.
        """
        check_output_choice(output)
        modules = list(modules)
        checks.count("number of modules", len(modules))
        wrong = next((m for m in modules if not isinstance(m, nn.Module)), None)
        if wrong is not None:
            checks.refuse("modules", "be instances of nn.Module", type(wrong).__name__, error=TypeError)
        for module in modules:
            _check_initialised("modules", "be initialised networks", module, "Run each once on a batch first.")
        if shared is None:
            body = _body_of(modules)
        else:
            frozen = isinstance(shared, str) and shared == FROZEN
            chosen = frozenset(equal_frozen(modules)).__contains__ if frozen else shared
            body = StackedMembers.of((copy.deepcopy(module) for module in modules), chosen, equal=True)
        body.output = output
        seed = _seed(seed)
        body.set_keys([(seed, member) for member in range(len(modules))])
        return cls.around(body, seed, list(range(len(modules))), backend)

    def tell(self, whole: "Ensemble") -> None:
        """Tell an ensemble with the same weights, whose heads these members are, of every training of theirs."""
        self._beside.whole = weakref.ref(whole)

    def _told(self) -> "Ensemble | None":
        return None if self._beside.whole is None else self._beside.whole()

    @classmethod
    def around(cls, body: Body, seed: int, member_ids: list[int], backend: str | Backend) -> "Ensemble":
        """An ensemble around members that are stored already."""
        ensemble = cls.__new__(cls)
        nn.Module.__init__(ensemble)
        ensemble._beside = _Beside()
        ensemble.seed, ensemble.member_ids, ensemble.body = seed, member_ids, body
        ensemble.training = body.training  # layers may have modes of their own
        ensemble._set_backend(backend)
        return ensemble

    def forward(self, *inputs: Any, per_member: bool = False, **named: Any) -> Tensor:
        """Member outputs ``[M, B, ...]``: every member gets ``(*inputs, **named)``.

        Inputs are tensors ``[B, ...]``, or tuples, lists and dictionaries of them, nested in any way. With
        ``per_member=True`` every tensor is ``[M, B, ...]``, and every member gets its own batch. What is no tensor (a
        flag, None) is handed on as it is.
        """
        self.check_whole("a pass")
        return self.body.run(None, call(*inputs, **named), per_member=per_member, replayed=are_passes_replayed())

    def __len__(self) -> int:
        return len(self.member_ids)

    @overload
    def __getitem__(self, index: int) -> nn.Module: ...

    @overload
    def __getitem__(self, index: slice) -> "Ensemble": ...

    def __getitem__(self, index: int | slice) -> "nn.Module | Ensemble":
        """A copy of one member as an ordinary module (`member`), or of several as an ensemble (`subset`).

        >>> ens = Ensemble(lambda: nn.Linear(3, 2), members=5)
        >>> ens[-1], len(ens[1:3])
        (Linear(in_features=3, out_features=2, bias=True), 2)
        """
        if isinstance(index, slice):
            chosen = range(self.members)[index]
            if not chosen:
                checks.refuse("index", "select at least one member", f"{index} of {self.members} members")
            return self.subset(chosen)
        if isinstance(index, bool) or not hasattr(index, "__index__"):
            fix = "Several members? Use ens.subset([0, 2])."
            checks.refuse("index", "be a whole number or a slice", repr(index), fix, TypeError)
        return self.member(index)

    def __iter__(self) -> Iterator[nn.Module]:
        """Copies of the members, one after the other, as ordinary modules."""
        return (self.member(index) for index in range(self.members))

    @property
    def members(self) -> int:
        """M."""
        return len(self.member_ids)

    @property
    def backend(self) -> str:
        """The name of the requested backend. Setting it takes effect at the next pass; ``"auto"`` measures anew."""
        return self.body.backend

    @backend.setter
    def backend(self, backend: str | Backend) -> None:
        if not isinstance(self.body, StackedMembers) and checked(backend) not in ("auto", "loop"):
            checks.refuse("backend", "be 'auto' or 'loop' for members of different architectures", repr(backend))
        self._set_backend(backend)
        self.body.choices = Choices()  # a new one, because ensembles of one sweep share theirs

    @property
    def output(self) -> OutputChoice | None:
        """Which part of what a member returns is its output; None: members return one tensor."""
        return self.body.output

    @property
    def shared(self) -> list[str]:
        """Names of the parameters and buffers that members share."""
        return list(self.body.shared_tensors())

    @property
    def choices(self) -> list[Choice]:
        """What ran so far, one entry per mode of use, with the times that decided and the reasons of refusals."""
        return list(self.body.choices.values())

    @property
    def device(self) -> torch.device:
        """Where the members are."""
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """The members' precision."""
        return next(self.parameters()).dtype

    @property
    def twin(self) -> "Ensemble | None":
        """The same ensemble trained without interaction, by ``fit(..., twin=True)``; None where there is none.

        It is a reference for an audit of this ensemble, and no submodule: ``parameters()``, ``state_dict()``, ``.to()``
        and ``.train()`` do not reach it, and `subset` does not take it along. `save` does not write it; save
        ``ens.twin`` into a folder of its own, and set ``ens.twin = Ensemble.load(...)`` after loading both.
        ``copy.deepcopy`` and ``pickle`` copy it with the ensemble. A `fit` without ``twin`` sets it to None, since the
        ensemble then no longer has the weights that the twin was trained beside. Other changes of weights leave it in
        place; set ``ens.twin = None`` after those.

        >>> ens = Ensemble(lambda: nn.Linear(3, 2), members=2)
        >>> ens.twin = ens.subset([0, 1])
        >>> len(ens.twin), len(list(ens.parameters()))
        (2, 2)
        """
        return self._beside.twin

    @twin.setter
    def twin(self, twin: "Ensemble | None") -> None:
        if twin is not None and not isinstance(twin, Ensemble):
            fix = "Networks? Use Ensemble.from_modules."
            checks.refuse("twin", "be an Ensemble, or None", type(twin).__name__, fix, TypeError)
        if twin is self:
            checks.refuse("twin", "be another ensemble", "the ensemble itself")
        self._beside.twin = twin
        if (whole := self._told()) is not None:
            whole.twin = None

    @property
    def in_bag(self) -> Tensor | Literal["all"] | None:
        """Training examples that each member was trained on, by which an audit reads outputs on them.

        ``"all"``, or a mask ``[M, N]`` over the examples that the last `fit` was given, where it held some out or
        bagged. None: unknown. `save` does not write a mask, so it is unknown after loading.
        """
        return self._beside.in_bag

    @in_bag.setter
    def in_bag(self, in_bag: Tensor | Literal["all"] | None) -> None:
        self._beside.in_bag = in_bag
        if (whole := self._told()) is not None:
            whole.in_bag = in_bag

    @property
    def training_rows(self) -> TrainingRows:
        """A record of the rows that members were trained on by `dissensus.fit`, two numbers of each; see `trained_on`.

        ``training_rows.complete`` is False where there may be other training data: batches of a loader, networks that
        existed before. `save` stores the record. ``ens.training_rows = None`` forgets it.
        """
        return self._beside.training_rows

    @training_rows.setter
    def training_rows(self, rows: TrainingRows | None) -> None:
        self._beside.training_rows = TrainingRows.unknown() if rows is None else rows
        if (whole := self._told()) is not None:
            whole.training_rows = None  # features tell nothing about the rows they come from

    def trained_on(self, data: Inputs, *, unpack: Unpack | None = None) -> Tensor:
        """Which examples are rows that members were trained on, bool ``[N]``.

        Accuracies on such rows say little about new data. Rows count as the same up to rounding. False says nothing
        where the record in `training_rows` is not complete. Of more than 131,072 training rows, that number is kept,
        evenly spaced, and only these are recognised.

        Args:
            data: As for `predict`.
            unpack: As for `predict`.

        >>> x = torch.randn(6, 3)
        >>> ens = Ensemble(lambda: nn.Linear(3, 2), members=2)
        >>> ens.training_rows = TrainingRows.of(x[:2])  # as fit does
        >>> ens.trained_on(x)
        tensor([ True,  True, False, False, False, False])
        """
        return inference.recognised(self.training_rows, self, data, unpack=unpack)

    @property
    def architecture(self) -> Architecture | tuple[Architecture, ...] | None:
        """How `build` is stored by `save`: an architecture, one per member if they differ, or None."""
        return self._beside.architecture

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; properties do not become submodules, which is what `nn.Module` makes of every module."""
        if name in ("twin", "in_bag", "backend"):
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    def member(self, index: int) -> nn.Module:
        """A copy of one member as an ordinary module, in the modes (train or eval) of the ensemble and its layers."""
        self.check_whole("`member`")
        return self.body.member(self._index(index))

    def subset(self, indices: Sequence[int]) -> "Ensemble":
        """An ensemble of copies of these members; each keeps its identity (and so its dropout masks)."""
        self.check_whole("`subset`")
        chosen = [self._index(i) for i in indices]
        checks.count("number of indices", len(chosen))
        subset = self.around(
            self.body.subset(chosen), self.seed, [self.member_ids[i] for i in chosen], self.body.requested_backend
        )
        subset.training_rows = self.training_rows
        several = self.architecture
        subset._beside.architecture = tuple(several[i] for i in chosen) if isinstance(several, tuple) else several
        return subset

    def _index(self, index: int) -> int:
        index = operator.index(index)  # of a tensor or an array as well
        if not -self.members <= index < self.members:
            raise IndexError(f"there is no member {index}: the ensemble has members 0 to {self.members - 1}.")
        return index % self.members

    def soup(self, data: Tensor | None = None, *, batch_size: int = 256) -> nn.Module:
        """One ordinary module whose weights are the members' mean.

        Batch-norm statistics of members do not fit averaged weights: given inputs ``data`` ``[N, ...]`` they are
        computed anew, else they are averaged. Statistics that members share do not change.
        """
        self.check_whole("`soup`")
        network = self.body.mean().eval()
        norms = [
            layer
            for name, layer in network.named_modules()
            if isinstance(layer, nn.modules.batchnorm._BatchNorm) and f"{name}.running_mean" not in self.shared
        ]
        if data is not None and norms:
            momenta = [norm.momentum for norm in norms]
            for norm in norms:
                norm.reset_running_stats()
                norm.momentum = None  # the plain average over all batches
                norm.train()
            with torch.no_grad():
                for batch in data.tensor_split(-(-len(data) // batch_size)):  # even batches: each weighs the same
                    network(batch.to(self.device, copy=True))  # it may write into what it is handed
            for norm, momentum in zip(norms, momenta, strict=True):
                norm.momentum = momentum
        return network.train(self.training)

    def greedy_soup(
        self, score: Callable[[nn.Module], float], data: Tensor | None = None, *, batch_size: int = 256
    ) -> GreedySoup:
        """One ordinary module whose weights are the mean of those members that do each other good.

        Members come in the order of their own scores, of equals the first one first. Each is averaged in where that
        makes the averaged network no worse (Wortsman et al., 2022, recipe 1). So on what ``score`` looks at, the result
        is never worse than the best member; held-out data are best.

        Args:
            score: How good a network is, higher is better. It is called 2M − 1 times, with copies in evaluation mode
                whose parameters want no gradient.
            data: Inputs ``[N, ...]`` for batch-norm statistics of averaged weights, as for `soup`. A member that stays
                alone keeps its own.
            batch_size: Examples at once, for these statistics.

        >>> ens = Ensemble(lambda: nn.Linear(3, 2), members=4)
        >>> soup = ens.greedy_soup(lambda network: -float(network.weight.square().sum()))
        >>> soup.members, soup.network
        ([1, 0, 3], Linear(in_features=3, out_features=2, bias=True))
        """
        if not self.body.alike:
            raise ValueError(
                "members of different architectures cannot be averaged; `greedy_soup` needs one architecture."
            )

        def averaged(indices: list[int]) -> nn.Module:
            alone = len(indices) == 1
            network = self.member(indices[0]) if alone else self.subset(indices).soup(data, batch_size=batch_size)
            return network.train(self.training)

        def score_of(indices: list[int]) -> float:
            value = float(score(averaged(indices).eval().requires_grad_(False)))
            if value != value:
                checks.refuse("score", "return a number", f"NaN for the mean of members {indices}")
            return value

        member_scores = [score_of([index]) for index in range(self.members)]
        first, *others = sorted(range(self.members), key=lambda index: -member_scores[index])
        taken, best = [first], member_scores[first]
        for index in others:
            tried = score_of([*taken, index])
            if tried >= best:
                taken, best = [*taken, index], tried
        return GreedySoup(averaged(taken), taken, best)

    @overload
    def predict(
        self,
        data: Inputs,
        batch_size: int = 1024,
        *,
        targets: Literal[False] = False,
        unpack: Unpack | None = None,
        file: str | Path | None = None,
    ) -> Tensor: ...

    @overload
    def predict(
        self,
        data: Inputs,
        batch_size: int = 1024,
        *,
        targets: Literal[True],
        unpack: Unpack | None = None,
        file: str | Path | None = None,
    ) -> tuple[Tensor, Tensor]: ...

    def predict(
        self,
        data: Inputs,
        batch_size: int = 1024,
        *,
        targets: bool = False,
        unpack: Unpack | None = None,
        file: str | Path | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Member outputs ``[M, N, ...]`` on the host, in evaluation mode, batch by batch; the mode is put back.

        Args:
            data: Inputs ``[N, ...]``, a dictionary of named inputs, or a pair ``(inputs, targets)``, as tensors, NumPy
                arrays or pandas objects; or a ``Dataset``, a ``DataLoader`` or an iterable of batches, whose own
                batches stand. Several inputs go into a pair: ``((x1, x2), None)``. A loader that shuffles, or has
                another sampler than a sequential one, is refused without ``targets``: its rows could not be matched
                with anything; and so is one whose ``drop_last`` leaves examples out. A stream (``IterableDataset``) is
                taken in its own order.
            batch_size: Examples at once: what bounds the memory that is needed besides the result.
            targets: Return ``(outputs, targets)``, with the targets ``[N, ...]`` of the same rows in the same order.
            unpack: Function ``batch -> (inputs, targets)`` for batches of another form; see `dissensus.fit`.
            file: A ``.npy`` file for the outputs; what is returned is then a view of that file, not of memory. Its
                space is reserved before anything is written: a full disk is an `OSError`, and leaves an earlier file.
                A link is followed, and stays; anything but a regular file or a new one is refused.

        Raises:
            OutOfMemory: Memory ran out; the message says what helps.

        On a GPU, passes are replayed from a CUDA graph, and outputs travel while the next batch is computed.

        >>> ens = Ensemble(lambda: nn.Linear(3, 2), members=5)
        >>> outputs, targets = ens.predict((torch.zeros(7, 3), torch.arange(7)), targets=True)
        >>> outputs.shape, targets
        (torch.Size([5, 7, 2]), tensor([0, 1, 2, 3, 4, 5, 6]))
        """
        if self.parallel is not None:
            return self._predicted_together(data, batch_size, targets=targets, unpack=unpack, file=file)
        return inference.predicted(self, self.members, data, batch_size, targets=targets, unpack=unpack, file=file)

    def _predicted_together(self, data: Inputs, batch_size: int, *, file: str | Path | None, **options: Any) -> Any:
        """Outputs of all members on every process; each computes those of its own."""
        place, own = None if file is None else inference.replaceable(file), self.own
        here = self.around(self.body, self.seed, self.member_ids[own], self.body.requested_backend)
        with several_ranks(self.members, self.device, str(self.parallel), "predict") as ranks:
            seen: list[int] = []
            result = inference.predicted(here, len(here), data, batch_size, seen=seen, **options)
            _check_read_alike(ranks.everyone(seen))
            outputs, labels = result if isinstance(result, tuple) else (result, None)
            if place is None:
                outputs = ranks.gathered(outputs)
            else:
                blocks = (ranks.gathered(block) for block in outputs.split(batch_size, 1))
                outputs = inference.written_by_first(blocks, outputs.shape[1], place, ranks)
        return outputs if labels is None else (outputs, labels)

    def save(self, path: str | Path, *, architecture: Architecture | Sequence[Architecture] | None = None) -> None:
        """Save into a folder: safetensors weights and a JSON manifest. A save that breaks off harms no earlier one.

        Args:
            path: The folder.
            architecture: How to build a member, so that `load` needs no ``build``: a `dissensus.Architecture`, or one
                per member if they differ. It is called once, and refused if it builds another network than the
                members. By default that of `Ensemble` or `load`, if there was one.

        >>> import tempfile
        >>> from dissensus import Architecture
        >>> ens = Ensemble(Architecture("dissensus.nets:mlp", inputs=4, outputs=3), members=2)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     ens.save(folder)
        ...     torch.equal(Ensemble.load(folder)(torch.ones(5, 4)), ens(torch.ones(5, 4)))
        True
        """
        stored = _stored_architecture(self.body, self.architecture if architecture is None else architecture)
        details: dict[str, Any] = {
            "members": self.members,
            "seed": self.seed,
            "member_ids": self.member_ids,
            "backend": self.backend,
            "mixed": not self.body.alike,
            "training": self.training,
        }
        if isinstance(self.output, str | int):
            details["output"] = self.output
        if self.in_bag is None or isinstance(self.in_bag, Tensor):
            details["in_bag"] = "unknown"
        made, _ = self.body.late_names()
        if made:
            details["late"] = made
        if self.shared:
            details["shared"] = self.shared
        if stored is not None:
            details["architecture"] = stored
        details["training_rows"] = self.training_rows.to_json()
        if self.parallel is None:
            storage.write_folder(path, KIND, stored_tensors(self.body), details, FORMATS)
            return
        with several_ranks(self.members, self.device, self.parallel, "save") as ranks:
            tensors = stored_tensors(self.body) if ranks.first else self.body.tensors()
            written = tensors if ranks.data_rank == 0 else None
            storage.write_folder_together(path, KIND, written, details, FORMATS, ranks)

    @classmethod
    def load(
        cls,
        path: str | Path,
        build: Build | Sequence[Build] | None = None,
        *,
        output: OutputChoice | None = None,
        trust: str | Iterable[str] = (),
        parallel: Literal["members", "members+data"] | None = None,
    ) -> "Ensemble":
        """Load what `save` wrote, in this release or since 0.1, in any number of processes.

        Args:
            path: The folder.
            build: Returns a member, or one function per member if they differ. None: what was saved with an
                architecture says it.
            output: Which part of what a member returns is its output. By default that of the saved ensemble where it
                was a name or a position. A function has to be passed again.
            trust: Packages, modules or functions (``"my_package"``, ``"my_package.models:build"``) that a stored
                architecture may import and call. Those of `dissensus.nets` and `dissensus.masks.convert` need none.
                Without it, nothing else is imported or run.
            parallel: As for an `Ensemble`: every process loads its members only.
        """
        check_output_choice(output)
        manifest = storage.read_manifest(path, KIND, FORMATS)
        architecture = stored_architecture(path, manifest)
        try:
            members, member_ids, seed = int(manifest["members"]), list(manifest["member_ids"]), int(manifest["seed"])
            mixed, backend, training = bool(manifest["mixed"]), str(manifest["backend"]), bool(manifest["training"])
            training_rows = TrainingRows.from_json(manifest.get("training_rows"))
        except (KeyError, TypeError, ValueError) as reason:
            raise storage.StorageError(f"the manifest in {path} is damaged: {reason!r}.") from reason
        builds = trusted_builds(path, architecture, trust) if build is None else build
        place = None if checked_parallel(parallel) is None else members_of_rank(members, str(parallel))
        if place is not None and mixed:
            checks.refuse("parallel", "be None for members of different architectures", parallel)
        own, common = slice(0, members) if place is None else place.own, frozenset(manifest.get("shared") or ())
        rows = None if place is None else lambda name: None if name in common else own
        tensors, manifest = storage.read_folder(path, KIND, FORMATS, rows)
        body = _empty_body(builds, own.stop - own.start, mixed, manifest.get("shared"))
        body.output = manifest.get("output") if output is None else output
        body.set_keys([(seed, member) for member in member_ids[own]])
        keys = {id(tensor) for tensor in key_tensors(body.modules())}  # earlier releases keyed fewer draws
        tensors = {**{name: t for name, t in body.tensors().items() if id(t) in keys}, **tensors}
        made = {*manifest.get("late", []), *body.late_names()[1]}
        body.adopt({name: tensor for name, tensor in tensors.items() if name in made})
        storage.check_match(path, tensors, {name: t.shape for name, t in stored_tensors(body).items()})
        ensemble = cls.around(body, seed, member_ids, backend if backend in BACKENDS and not mixed else "auto")
        ensemble._share(parallel)
        with torch.no_grad():
            for name, tensor in stored_tensors(body).items():
                tensor.data = tensors[name].to(tensor.device)
        if manifest.get("in_bag") == "unknown":
            ensemble.in_bag = None
        ensemble.training_rows = training_rows
        ensemble._beside.architecture = architecture
        return ensemble.train(training)

    def extra_repr(self) -> str:
        """Members, seed and backend, and the number of shared tensors."""
        shared = f", shared={len(self.shared)} tensors" if self.shared else ""
        here = "" if self.parallel is None else f", here={self.own.start} to {self.own.stop - 1}"
        return f"members={self.members}, seed={self.seed}, backend={self.backend!r}{shared}{here}"


def _check_read_alike(seen: Sequence[Sequence[int]]) -> None:
    """Refuse data that was not the same in all processes; ``seen`` has the checksums of the batches of each."""
    for rank, other in enumerate(seen):
        if other != seen[0]:
            got = f"others on rank {rank} than on rank 0"
            fix = "A loader that shuffles needs generator=torch.Generator().manual_seed(0), and no shard of its own."
            checks.refuse("data", "give the same examples in all processes, in the same order", got, fix)


SHARED_ROWS = "shared/rows"
"""What members of each run of a sweep share and train, ``[R, P]``, in files; no parameter has such a name."""


def stored_tensors(body: Body) -> dict[str, Tensor]:
    """All tensors of a body: those of members, and those that they share, of every run in a sweep."""
    rows = getattr(body, "shared_rows", None)
    of_runs = {} if rows is None else {SHARED_ROWS: rows}
    return {**body.tensors(), **body.shared_tensors(), **of_runs}


def _body_of(modules: Sequence[nn.Module]) -> Body:
    """Copies of modules, stacked where they have one architecture."""
    try:
        return StackedMembers.of(copy.deepcopy(module) for module in modules)
    except DifferentMembers:
        return MixedMembers([copy.deepcopy(module) for module in modules])


def _seed(seed: int | None) -> int:
    """A seed as it is, or drawn from torch's global generator."""
    return drawn_seed() if seed is None else checks.count("seed", seed, 0)


def fresh_members(build: Build, seed: int, members: int, first: int = 0) -> Iterator[nn.Module]:
    """Newly initialised members of a seed, one after the other, from one of them on."""
    if isinstance(build, nn.Module) or not callable(build):
        fix = "Write `lambda: ...` around it. Networks that exist? Use Ensemble.from_modules."
        checks.refuse("build", "be a function that returns a new network", type(build).__name__, fix, TypeError)
    networks: list[weakref.ref[nn.Module]] = []  # what members share is not kept once per member
    for index in range(first, members):
        network = _checked(_built(build, derived_seed(seed, Use.INITIAL_WEIGHTS, index)))
        if any(network is other() for other in networks):
            checks.refuse("build", "return a new network at every call", "the same one twice", "Build it inside.")
        networks.append(weakref.ref(network))
        yield network
        del network


def _built(build: Build, seed: int) -> nn.Module:
    """A network whose initial weights a seed determines."""
    began = torch.cuda.is_initialized()
    with seeded(seed):
        network = build()
    if torch.cuda.is_initialized() and not began:  # it may have drawn on a GPU whose generator was not there to seed
        with seeded(seed):
            network = build()
    return network


def _checked(network: object) -> nn.Module:
    if not isinstance(network, nn.Module):
        checks.refuse("build", "return an nn.Module", type(network).__name__, error=TypeError)
    fix = "Give its sizes, or run it once inside `build`."
    _check_initialised("build", "return initialised layers", network, fix)
    if not any(True for _ in network.parameters()):
        checks.refuse("build", "return a network with parameters", "one without", "There is nothing to stack.")
    return network


def _stored_architecture(
    body: Body, architecture: Architecture | Sequence[Architecture] | None
) -> dict[str, Any] | list[dict[str, Any]] | None:
    """An architecture as the manifest has it; one that builds other networks than the members is refused."""
    if architecture is None:
        return None
    architectures = list(architecture) if isinstance(architecture, Sequence) else [architecture]
    wanted = 1 if isinstance(body, StackedMembers) else len(body)
    if len(architectures) != wanted:
        requirement = "be one Architecture" + (f" per member ({wanted})" if wanted > 1 else "")
        checks.refuse("architecture", requirement, f"{len(architectures)} of them")
    if isinstance(body, StackedMembers):
        shapes = {name: tensor.shape[1:] for name, tensor in body.tensors().items()}
        shapes |= {name: tensor.shape for name, tensor in body.shared_tensors().items()}
        return checked_architecture(architectures[0], body.settings, shapes)
    assert isinstance(body, MixedMembers)
    return [
        checked_architecture(part, settings, {name: tensor.shape for name, tensor in skeleton.tensors().items()})
        for part, settings, skeleton in zip(architectures, body.settings, body.skeletons, strict=True)
    ]


def _check_initialised(name: str, requirement: str, network: nn.Module, fix: str) -> None:
    """Refuse lazy layers, such as ``nn.LazyLinear``, which have no shapes before their first pass."""
    for path, layer in network.named_modules():
        tensors = [*layer.parameters(recurse=False), *layer.buffers(recurse=False)]
        if any(isinstance(tensor, nn.UninitializedParameter | nn.UninitializedBuffer) for tensor in tensors):
            checks.refuse(name, requirement, f"a lazy one ({path or 'the network'}: {type(layer).__name__})", fix)


def _empty_body(build: Build | Sequence[Build], members: int, mixed: bool, shared: Sequence[str] | None = None) -> Body:
    """A body of the right shapes, to be filled with stored tensors."""
    builds = [build] * members if callable(build) else list(build)
    if len(builds) != members:
        checks.refuse("build", f"be one function, or one per member ({members})", f"{len(builds)} functions")
    with seeded(0):
        if mixed:
            return MixedMembers([_checked(build_member()) for build_member in builds])
        network = _checked(builds[0]())
        first = StackedMembers.of([network], stored_choice(network, shared))
    return first.subset([0] * members)
