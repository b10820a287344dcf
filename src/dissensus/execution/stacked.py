"""Members of one architecture: every parameter and buffer stored once, stacked ``[M, ...]``."""

import copy
import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._compile import _disable_dynamo

from dissensus import calls, checks
from dissensus.calls import NetworkInputs, OutputChoice
from dissensus.dropout import keyed, set_keys
from dissensus.execution.backends import COMPILED, LOOP, Backend, backend_named
from dissensus.execution.batched import batched_plan
from dissensus.execution.body import ALL_ROWS, Body
from dissensus.execution.choice import Choice, Choices, Mode, TrialPass, chosen, with_compiled
from dissensus.execution.compiled import is_compiled, uncompiled
from dissensus.execution.exporting import is_exporting, refuse_training
from dissensus.execution.global_draws import MESSAGE, unkeyed_layer
from dissensus.execution.loop import run_loop
from dissensus.execution.recomputation import recomputation_refused, refuse_recomputation, run_recomputed
from dissensus.execution.recurrent import as_ordinary, keep_in_place
from dissensus.execution.runs import JOINABLE, joined, joining_pays
from dissensus.execution.sharing import Shared, shared_names
from dissensus.execution.signature import Visit, architecture_fingerprint, other_class, signature, with_output
from dissensus.execution.skeleton import Skeleton, Tensors, Unsupported, first_line, has_hooks, members_inside
from dissensus.execution.weights import Hanging, Layout, Packed, Section, Weights, check_one_dtype, check_real
from dissensus.execution.wide import wide_plan
from dissensus.randomness import generators_kept

log = logging.getLogger("dissensus")


class DifferentMembers(ValueError):
    """Networks that cannot be stacked, because they differ; the message says where."""


def _never_traced(function: Callable[..., None]) -> Callable[..., None]:
    """A function that a compiler does not look into, as by ``torch.compiler.disable``.

    That would load the whole compiler, a second of time, at the first call at the latest. Here only a compiler that is
    at work loads it.
    """
    disabled = _disable_dynamo(function)

    @functools.wraps(function)
    def called(*arguments: Any) -> None:
        if torch.compiler.is_compiling():
            disabled(*arguments)
        else:
            function(*arguments)

    return called


class MembersPass(NamedTuple):
    """What one pass of members takes."""

    weights: Weights
    buffers: Tensors
    x: NetworkInputs
    per_member: bool
    replayed: bool


class StackedMembers(nn.Module):
    """M networks of one architecture as one network whose tensors have a leading member axis; a `Body`.

    Tensors named in ``shared`` have no member axis: all members use the same. In a sweep, each run has those of them
    that are trained for itself.
    """

    shared_rows: Tensor | None
    """With several runs: the shared parameters of each that are trained, ``[R, P]``. Rows of members are run by run."""

    def __init__(
        self, network: nn.Module, output: OutputChoice | None = None, shared: frozenset[str] = frozenset()
    ) -> None:
        super().__init__()
        self.register_buffer("shared_rows", None, persistent=False)
        self.network = keep_in_place(network)
        self.skeleton = Skeleton(network, output, shared=shared)
        self.settings = signature(network)
        """The network's settings before its first pass, which may change attributes."""
        self.backend = "auto"
        self.custom_backend: Backend | None = None
        self.ran = ""
        self.channels_last = self.by_rule = self.recompute = False
        self.compiling: bool | str = False
        self.choices = Choices()
        self.passes: int | None = None
        """Number of training passes that follow, for which a backend is chosen; None: unknown."""
        self._told: set[str] = set()
        """Reasons for the loop that the log has."""
        self._layouts: dict[tuple[object, ...], Layout] = {}
        self._late: list[dict[str, Tensor]] = []
        """Buffers that a pass has made, of each member, until all members have them."""
        self._compiled: set[Mode] = set()
        """Modes whose compiled pass has been tried by this process."""
        self._outdated: set[Mode] = set()
        """Modes whose backend was chosen before members had all of their buffers, or the hooks that they have now."""
        self._untried: set[Mode] = set()
        """Modes whose backend was chosen with other settings of layers."""

    @classmethod
    def of(
        cls, networks: Iterable[nn.Module], shared: Shared = None, *, equal: bool = False, members: int | None = None
    ) -> "StackedMembers":
        """Stack networks; `DifferentMembers` names the first member and tensor that differ.

        Shared tensors are those of the first network. ``equal``: those of the others must be equal to them.
        ``members``: networks come run by run, with as many in each. Shared parameters that are trained are then those
        of the first network of each run, and the other shared tensors must be equal in all networks.
        """
        first: nn.Module | None = None
        names: frozenset[str] = frozenset()
        settings: list[tuple[str, str, str]] = []
        stacks: dict[str, list[Tensor]] = {}
        common: dict[str, Tensor] = {}
        trained: list[str] = []
        rows: list[Tensor] = []
        for network in networks:
            if first is None and is_compiled(network):
                log.warning("members run without the code that was compiled for them: use torch.compile(ensemble)")
            network = keyed(uncompiled(network))
            tensors = Skeleton(network).tensors()
            if first is None:
                first, settings = network, signature(network)
                names = shared_names(network, shared, tensors)
                trained = [name for name, tensor in tensors.items() if name in names and tensor.requires_grad]
                common = {name: tensors.pop(name).detach() for name in list(tensors) if name in names}
                stacks = {name: [tensor.detach()] for name, tensor in tensors.items()}
                continue
            index = len(next(iter(stacks.values())))
            others = {name: tensors.pop(name) for name in common if name in tensors}
            _check_same(index, {name: [tensor] for name, tensor in common.items()}, others)
            compared = list(others) if equal else [] if members is None else [n for n in others if n not in trained]
            differing = [name for name in compared if not torch.equal(common[name], others[name])]
            if members is not None and trained and index % members == 0:
                first_row = [] if rows else [_row(common[name] for name in trained)]
                rows += [*first_row, _row(others[name] for name in trained)]
            if differing:
                fix = "make it once, outside of `build`, or leave it out of `shared`"
                raise DifferentMembers(
                    f"tensor {differing[0]!r}, which members share, differs in member {index} ({fix})"
                )
            _check_same(index, stacks, tensors)
            differing = sorted(set(signature(network)) ^ set(settings))
            if differing:
                name, what, _ = differing[0]
                where = f"layer {name!r}" if name else "the network"
                raise DifferentMembers(f"{what} of {where} differs in member {index} (a tensor? make it a buffer)")
            name = other_class(first, network)
            if name is not None:
                where = f"layer {name!r}" if name else "the network"
                raise DifferentMembers(f"the code of the class of {where} differs in member {index}")
            for name, tensor in tensors.items():
                stacks[name].append(tensor.detach())
            del network, tensors, others  # what they share is freed before the next one is made
        if first is None:
            raise DifferentMembers("an ensemble needs at least one member")
        body = cls(attached(first, {name: torch.stack(tensors) for name, tensors in stacks.items()}), shared=names)
        body.shared_rows = torch.cat(rows) if rows else None
        return body.train(first.training)

    def __len__(self) -> int:
        return next(iter(self.tensors().values())).shape[0]

    def tensors(self) -> dict[str, Tensor]:
        """Every stacked tensor by name, dropout's counters included."""
        return self.skeleton.tensors()

    def shared_tensors(self) -> dict[str, Tensor]:
        """Tensors that all members share, by name."""
        return self.skeleton.shared_tensors()

    def train(self, mode: bool = True) -> "StackedMembers":
        """Set the mode. Layers whose buffers are shared stay in evaluation mode: nobody may move them for all.

        Modules that hold other layers follow the mode, as dropout in their code does.
        """
        super().train(mode)
        for layer in self.skeleton.fixed_layers():
            layer.training = False
        return self

    def state(self) -> dict[str, Tensor]:
        """Stacked tensors that training moves without a gradient, and frozen parameters."""
        return {name: t for name, t in self.tensors().items() if not (isinstance(t, nn.Parameter) and t.requires_grad)}

    def trainable(self) -> dict[str, nn.Parameter]:
        """Stacked parameters that want a gradient."""
        return {name: p for name, p in self.tensors().items() if isinstance(p, nn.Parameter) and p.requires_grad}

    def layout(self) -> Layout:
        """How parameters are laid out in the matrix of all of them."""
        params = self.trainable()
        key = (self.channels_last, *params, *(tensor.dtype for tensor in params.values()))
        if key not in self._layouts:
            self._layouts[key] = Layout.of(self.skeleton, params, self.channels_last)
        return self._layouts[key]

    def packed(self) -> Tensor:
        """All trainable parameters as one matrix ``[M, P]``; afterwards the parameters are views of it."""
        params = self.trainable()
        check_real(params)
        if not params and (shared := self.shared_trainable()):  # what is trained belongs to all members
            return next(iter(shared.values())).detach().new_zeros((len(self), 0))
        flat = self.layout().packed(params)
        for name, view in self.layout().weights(flat).items():
            params[name].data = view
        return flat

    def shared_trainable(self) -> dict[str, nn.Parameter]:
        """Parameters that all members share and that want a gradient."""
        return {n: p for n, p in self.shared_tensors().items() if isinstance(p, nn.Parameter) and p.requires_grad}

    def shared_packed(self) -> Tensor:
        """Shared trainable parameters, one row per run ``[R, P]``; afterwards the parameters are views of it."""
        params = self.shared_trainable()
        check_real(params)
        check_one_dtype(params)
        rows = _row(params.values()) if self.shared_rows is None else self.shared_rows.detach()
        self.attach_shared(rows)
        return rows

    def attach_shared(self, rows: Tensor) -> None:
        """Replace the shared trainable parameters of all runs ``[R, P]``; see `shared_packed`."""
        if len(rows) != 1:
            self.shared_rows = rows.detach()
            return
        self.shared_rows, params = None, self.shared_trainable()
        for name, view in self.shared_views(rows.detach()).items():
            params[name].data = view

    def shared_views(self, row: Tensor) -> dict[str, Tensor]:
        """Shared trainable parameters by name, as views of a row ``[1, P]``."""
        params = self.shared_trainable()
        pieces = row[0].split([parameter.numel() for parameter in params.values()])
        return {n: piece.view(p.shape) for (n, p), piece in zip(params.items(), pieces, strict=True)}

    @property
    def sections(self) -> tuple[Section, ...]:
        """The columns of every dtype in the matrix of all parameters; empty where all have one."""
        return self.layout().sections

    def views(self, flat: Tensor) -> list[dict[str, Tensor]]:
        """Each row's columns of trainable parameters as views of its row; see `Body.views`."""
        return self._by_row(self.layout().views, flat)

    def weights(self, flat: Tensor) -> list[dict[str, Tensor]]:
        """Each row's trainable parameters in their own dtypes, as views of its row; see `Body.weights`."""
        return self._by_row(self.layout().weights, flat)

    def _by_row(self, views_of: Callable[[Tensor], Tensors], flat: Tensor) -> list[dict[str, Tensor]]:
        names = list(self.trainable())
        rows = [views_of(row) for row in flat.unbind(0)]
        return [{name: views[name] for name in names} for views in rows]

    @property
    def alike(self) -> bool:
        """True: members have one architecture."""
        return True

    def run(
        self,
        flat: Tensor | None,
        x: NetworkInputs,
        *,
        per_member: bool = False,
        rows: slice | Tensor = ALL_ROWS,
        replayed: bool = False,
        backend: str | None = None,
        shared: Tensor | None = None,
    ) -> Tensor:
        """Outputs ``[M, B, ...]``; see `Body.run`.

        Buffers are the body's, and are written to. Under autocast all packed weights are cast at once.
        """
        shared = self.shared_rows if shared is None else shared
        how = {"per_member": per_member, "replayed": replayed, "backend": backend}
        if shared is None or len(shared) == 1:
            trained = {} if shared is None else self.shared_views(shared)
            with self.skeleton.lending(trained, self._lowered_shared(calls.first_tensor(x).device)):
                return self._run_rows(flat, x, rows=rows, **how)
        assert isinstance(rows, slice)
        assert rows == ALL_ROWS
        return self._run_runs(flat, x, shared, **how)

    def _lowered_shared(self, device: torch.device) -> dict[str, Tensor]:
        """Frozen shared weights of products in the precision of autocast: cast once, not anew by every member.

        Those of layers that are trained keep theirs, so that gradients of members are summed in it.
        """
        kind, compiling = device.type, torch.compiler.is_compiling()
        if not self.skeleton.shared or compiling or kind not in ("cpu", "cuda") or not torch.is_autocast_enabled(kind):
            return {}
        dtype, shared = torch.get_autocast_dtype(kind), self.shared_tensors()
        names = self.skeleton.once(_read_by_products_alone)
        return {n: t.to(dtype) for n, t in shared.items() if n in names and not t.requires_grad and _lowers(t, dtype)}

    def _run_runs(
        self,
        flat: Tensor | None,
        x: NetworkInputs,
        shared: Tensor,
        *,
        per_member: bool,
        replayed: bool,
        backend: str | None,
    ) -> Tensor:
        """Outputs of all runs, whose members share rows of ``shared`` ``[R, P]``.

        The first pass of a mode finds out whether a pass of all runs at once is faster than one each.
        """
        count = len(self) // len(shared)

        def each() -> Tensor:
            weights = [None] * len(shared) if flat is None else flat.unflatten(0, (-1, count)).unbind(0)
            outputs: list[Tensor] = []
            for run, row in enumerate(shared.unbind(0)):
                own = slice(run * count, (run + 1) * count)
                with self.skeleton.lending(self.shared_views(row.unsqueeze(0))):
                    own_x = calls.rows(x, own) if per_member else x
                    how = {"per_member": per_member, "replayed": replayed, "backend": backend}
                    outputs.append(self._run_rows(weights[run], own_x, rows=own, **how))
            return torch.cat(outputs)

        def at_once() -> Tensor:
            packed = None if flat is None else Packed(self.layout(), flat, _autocast_dtype(flat))
            weights = self.trainable() if packed is None else packed.stacked()
            run = self._named(self.ran).run
            return joined(run, self.skeleton, weights, self.state(), x, per_member, shared, self.shared_views)

        if backend is not None or self.recompute or torch.compiler.is_compiling() or is_exporting():
            return each()
        self._notice_changes()
        grad = torch.is_grad_enabled()
        mode = (self.backend, self.training, grad, per_member, len(shared), self.by_rule, *calls.form(x))
        if mode not in self.choices.joined:
            if calls.first_tensor(x).is_cuda and torch.cuda.is_current_stream_capturing():
                return each()
            leaves = [t for t in (flat, shared) if t is not None and t.requires_grad]
            self.choices.join(mode, self._ran_joined(each, at_once, leaves))
        joins = self.choices.joined[mode]
        if joins is None:
            return each()
        self.ran = joins
        outputs = at_once()
        return outputs.flatten(0, 1) if members_inside(self.network) else outputs

    def _ran_joined(
        self, each: Callable[[], Tensor], at_once: Callable[[], Tensor], leaves: list[Tensor]
    ) -> str | None:
        """The backend whose passes are joined; None where runs are passed one after another. Nothing is changed."""
        restore = self.snapshot()
        try:
            with generators_kept(next(self.parameters()).device):
                each()
                joinable = self.ran in JOINABLE and self.custom_backend is None and not self.skeleton.appearing
                if not joinable or not joining_pays(each, at_once, leaves, restore, by_rule=self.by_rule):
                    return None
                return self.ran
        finally:
            restore()

    def _run_rows(
        self,
        flat: Tensor | None,
        x: NetworkInputs,
        *,
        per_member: bool,
        rows: slice | Tensor,
        replayed: bool,
        backend: str | None,
    ) -> Tensor:
        """Outputs of members whose shared parameters hang in the network."""
        buffers = _selected(self.state(), rows)
        if flat is None:
            assert isinstance(rows, slice)
            weights: Weights = Hanging(_selected(self.trainable(), rows), len(range(len(self))[rows]))
        else:
            weights = Packed(self.layout(), flat, _autocast_dtype(flat))
        if per_member:
            _check_per_member(x, len(weights))
        members_pass = MembersPass(weights, buffers, x, per_member, replayed and calls.first_tensor(x).is_cuda)
        if self.training and self.skeleton.functions_keyed is None and not is_exporting():
            self._look_for_draws(members_pass)
        recomputed = self.recompute and (self.training or torch.is_grad_enabled()) and not is_exporting()
        if recomputed and not self.skeleton.appearing:  # buffers would be made once more by a repeated pass
            self.ran = "loop, recomputed"
            run = run_recomputed if torch.is_grad_enabled() else run_loop
            outputs = run(self.skeleton, weights, buffers, x, per_member)
        else:
            outputs = self._run(members_pass, backend, rows)
        if isinstance(rows, Tensor):
            self._write_back(rows, buffers)
        return outputs.flatten(0, 1) if members_inside(self.network) else outputs

    def _run(self, members_pass: MembersPass, backend: str | None, rows: slice | Tensor) -> Tensor:
        weights, buffers, x, per_member, _ = members_pass
        self._notice_changes()
        if not torch.compiler.is_compiling():
            self.skeleton.ways, self.choices.ways.by_rule = self.choices.ways, self.by_rule
        if is_exporting():  # values cannot be tried, and what a trial keeps would belong to the tracer
            refuse_training(self.training)
            self.ran = LOOP.name if backend is None else backend
        else:
            self.ran = self._chosen_backend(members_pass) if backend is None else self._tried(backend, members_pass)
        if torch.compiler.is_compiling() and self.skeleton.appearing and not is_exporting():
            return self._run_untraced(members_pass, rows)
        # A compiler would trace into the guard; `_choose` has tried one member by then, outside of any graph.
        guarded = torch.is_grad_enabled() and not torch.compiler.is_compiling()
        chosen_backend = self._named(self.ran)
        keeps = chosen_backend.takes_every_network and not torch.compiler.is_compiling()
        late_kept = self._late_kept(rows, len(weights)) if keeps else nullcontext()
        with recomputation_refused() if guarded else nullcontext(), late_kept:
            return chosen_backend.run(self.skeleton, weights, buffers, x, per_member)

    def _notice_changes(self) -> None:
        """Choose backends again where layers have got hooks, or lost them, and try them again where settings change."""
        if torch.compiler.is_compiling():
            return
        if self.skeleton.notice_hooks():
            self._outdated = set(self.choices)
        elif self.skeleton.notice_settings():
            self._untried = set(self.choices)

    @_disable_dynamo
    def _run_untraced(self, members_pass: MembersPass, rows: slice | Tensor) -> Tensor:
        """A pass that makes buffers, which a compiler could not keep."""
        return self._run(members_pass, None, rows)

    @contextmanager
    def _late_kept(self, rows: slice | Tensor, count: int) -> Iterator[None]:
        """A block in which every member keeps the buffers that its pass makes.

        Once all members have them, they are stacked. Groups of members (a slice) have them one group after the other.
        """
        if isinstance(rows, Tensor) and not self.skeleton.appearing:  # reading rows back would wait for the device
            yield
            return
        members = count if isinstance(rows, slice) and rows == ALL_ROWS else len(self)
        if len(self._late) != members:
            self._late = [{} for _ in range(members)]
        late = self._late
        numbers = range(members)[rows] if isinstance(rows, slice) else rows.tolist()
        with self.skeleton.collecting([late[number] for number in numbers]):
            yield
        if not any(late):
            return
        names = {name: None for own in late for name in own}
        if all(own.keys() == names.keys() for own in late):
            try:
                self.skeleton.adopt({name: torch.stack([own[name] for own in late]) for name in names})
            finally:
                self._late = []
            self._outdated = set(self.choices)
        elif len(numbers) == members or isinstance(rows, Tensor):
            self._late = []
            fix = "Leave `active_members` out, or run the network once inside `build`."
            got = f"{sum(map(bool, late))} of {members}"
            checks.refuse(f"buffer {next(iter(names))}", "appear in the same pass in all members", got, fix)

    def _write_back(self, rows: Tensor, buffers: Tensors) -> None:
        """Write buffers of rows that were copied for a pass back to their places."""
        with torch.no_grad():
            for name, tensor in self.state().items():
                if not isinstance(tensor, nn.Parameter):
                    tensor.index_copy_(0, rows, buffers[name])

    @property
    def output(self) -> OutputChoice | None:
        """Which part of what the network returns is its output."""
        return self.skeleton.output

    @output.setter
    def output(self, output: OutputChoice | None) -> None:
        self.skeleton.output = output

    @property
    def requested_backend(self) -> str | Backend:
        """``"auto"``, the name of a backend, or a backend from outside of the package."""
        return self.backend if self.custom_backend is None else self.custom_backend

    def request_backend(self, backend: str | Backend) -> None:
        """Use a backend from now on; see `dissensus.execution.backends.checked`."""
        self.custom_backend = backend if isinstance(backend, Backend) else None
        self.backend = backend.name if isinstance(backend, Backend) else backend

    def _named(self, name: str) -> Backend:
        if self.custom_backend is not None and name == self.custom_backend.name:
            return self.custom_backend
        backend = backend_named(name)
        assert backend is not None
        return backend

    def _chosen_backend(self, members_pass: MembersPass) -> str:
        """The backend to use in this mode; the first pass in a mode chooses, later ones remember."""
        both_ways = torch.is_grad_enabled() or bool(self.training and members_pass.weights.leaves())
        by_rule = self.by_rule and self.backend == "auto"
        weights, _, x, per_member, replayed = members_pass
        device = calls.first_tensor(x).device.type
        autocast = device in ("cpu", "cuda") and torch.is_autocast_enabled(device)
        lowered = [str(torch.get_autocast_dtype(device)), isinstance(weights, Packed)] if autocast else []
        compiles = self.training and both_ways and self._may_compile()
        how = [*lowered, *(["compiled"] if compiles else [])]
        mode = (self.backend, self.training, both_ways, per_member, device, replayed, by_rule, *how, *calls.form(x))
        if mode in self._untried:
            self._untried.discard(mode)
            if mode in self.choices and self._refusal(self.choices[mode].backend, members_pass, both_ways):
                self._outdated.add(mode)
        if mode not in self.choices or mode in self._outdated:
            self._outdated.discard(mode)
            self._choose(mode, members_pass, both_ways)
            if compiles and mode in self.choices:
                self._choose_compiled(mode, members_pass)
        elif compiles and mode not in self._compiled:
            self._try_compiled(mode, members_pass)
        return self.choices[mode].backend if mode in self.choices else LOOP.name

    @_never_traced
    def _choose(self, mode: Mode, members_pass: MembersPass, both_ways: bool) -> None:
        if both_ways:
            self._refuse_recomputation(members_pass)
        if self.backend == "auto":
            weights, buffers, x, per_member, replayed = members_pass
            passes = self.passes if self.training else None
            with torch.set_grad_enabled(both_ways):
                choice = chosen(
                    self.skeleton,
                    weights,
                    buffers,
                    x,
                    per_member,
                    replayed=replayed,
                    by_rule=self.by_rule,
                    passes=passes,
                )
            refusal = choice.refused.get("vmap") if choice.backend == LOOP.name and not self.by_rule else None
        else:
            refusal = self._refusal(self.backend, members_pass, both_ways)
            if refusal and self._error(LOOP.name, members_pass, both_ways):
                return  # the input is at fault, or the network: the pass itself will say so
            choice = Choice(LOOP.name if refusal else self.backend, {}, {self.backend: refusal} if refusal else {})
        self.choices.add(mode, choice)
        if refusal and refusal not in self._told and not self.skeleton.appearing:  # else it is for one pass
            self._told.add(refusal)
            log.warning("members run in a loop: %s", refusal)

    def _may_compile(self) -> bool:
        """Whether passes of training are compiled, or ``"auto"`` may do it."""
        return self.compiling is True or (self.compiling == "auto" and self.backend == "auto" and not self.by_rule)

    @_never_traced
    def _choose_compiled(self, mode: Mode, members_pass: MembersPass) -> None:
        """Replace the choice of a mode by its compiled form, if that is wanted or faster."""
        self._compiled.add(mode)
        weights, buffers, x, per_member, replayed = members_pass
        trial = TrialPass(self.skeleton, weights, buffers, x, per_member)
        before, always = self.choices[mode], self.compiling is True
        with torch.enable_grad():
            choice = with_compiled(before, trial, always=always, passes=self.passes, replayed=replayed)
        if choice is not before:
            self.choices.add(mode, choice)
        if always:
            self._tell_of_refusal(choice)

    @_never_traced
    def _try_compiled(self, mode: Mode, members_pass: MembersPass) -> None:
        """Try a compiled pass that another process has chosen, on a machine that may have no compiler."""
        self._compiled.add(mode)
        choice = self.choices[mode]
        names = {form.name: name for name, form in COMPILED.items()}
        if choice.backend not in names:
            return
        problem = self._error(choice.backend, members_pass, both_ways=True)
        if problem:
            refused = {**choice.refused, choice.backend: problem}
            choice = Choice(names[choice.backend], choice.milliseconds, refused)
            self.choices.add(mode, choice)
            self._tell_of_refusal(choice)

    def _tell_of_refusal(self, choice: Choice) -> None:
        """Say once in the log why members are not compiled."""
        reason = next((reason for form, reason in choice.refused.items() if form.endswith("compiled")), None)
        if reason and reason not in self._told and not self.skeleton.appearing:
            self._told.add(reason)
            log.warning("members are not compiled: %s", reason)

    @_never_traced
    def _look_for_draws(self, members_pass: MembersPass) -> None:
        """Key functions that drop units, and tell once if the network draws numbers that have no key."""
        weights, buffers, x, per_member, _ = members_pass
        first = {name: tensor[0] for name, tensor in buffers.items()}
        params = weights.first(1).members()(0)
        layer = unkeyed_layer(self.skeleton, params, first, calls.rows(x, 0) if per_member else x)
        if layer is not None:
            log.warning(MESSAGE, layer)

    def _tried(self, backend: str, members_pass: MembersPass) -> str:
        """A backend for one pass, or the loop where it fails; nothing is remembered."""
        self._refuse_recomputation(members_pass)
        # Forward only: this pass may be one that counts what autograd saves.
        return LOOP.name if self._refusal(backend, members_pass, both_ways=False) else backend

    def _refuse_recomputation(self, members_pass: MembersPass) -> None:
        weights, buffers, x, per_member, _ = members_pass
        first = {name: tensor[:1] for name, tensor in buffers.items()}
        x = calls.rows(x, slice(1)) if per_member else x
        refuse_recomputation(self.skeleton, weights.first(1), first, x, per_member)

    def _refusal(self, backend: str, members_pass: MembersPass, both_ways: bool) -> str | None:
        """Why a requested backend cannot run; the loop and streams take every network."""
        return None if self._named(backend).takes_every_network else self._error(backend, members_pass, both_ways)

    def _error(self, backend: str, members_pass: MembersPass, both_ways: bool) -> str | None:
        """Try a backend on copies of the buffers, so that a failure half-way leaves no trace; both ways or forward."""
        weights, buffers, x, per_member, _ = members_pass
        trial = TrialPass(self.skeleton, weights, buffers, x, per_member)
        with torch.set_grad_enabled(both_ways), generators_kept(calls.first_tensor(x).device):
            try:
                trial.whole(self._named(backend).run)
            except Exception as reason:
                return first_line(reason)
        return None

    def is_batchable(self) -> bool:
        """Whether the backend ``"batched"`` knows every layer."""
        self._notice_changes()
        try:
            if self.skeleton.shared:
                wide_plan(self.skeleton, per_member=False)
            else:
                self.skeleton.once(batched_plan)
        except Unsupported:
            return False
        return True

    def member(self, index: int) -> nn.Module:
        """A copy of one member as an ordinary module."""
        if self.shared_rows is not None:
            return self.subset([index]).member(0)
        return as_ordinary(self._reduced(lambda tensor: tensor[index].clone()))

    def mean(self) -> nn.Module:
        """An ordinary module whose floating-point tensors are the members' means; whole numbers are the first's."""
        return as_ordinary(self._reduced(lambda t: t.mean(0) if t.is_floating_point() else t[0].clone()))

    def subset(self, indices: Sequence[int]) -> "StackedMembers":
        """The members at these indices, copied."""
        reduced = self._reduced(lambda tensor: tensor[list(indices)].clone())
        body = StackedMembers(reduced, self.output, self.skeleton.shared)
        body.request_backend(self.requested_backend)
        body.skeleton.adopted = dict(self.skeleton.adopted)
        body.channels_last, body.by_rule = self.channels_last, self.by_rule
        if self.shared_rows is not None:
            body.attach_shared(self._rows_of_runs(indices).clone())
        body.training = self.training  # its layers have their modes
        return body

    def _rows_of_runs(self, indices: Sequence[int]) -> Tensor:
        """What members of one run share, or those of several whole runs."""
        assert self.shared_rows is not None
        members = len(self) // len(self.shared_rows)
        runs = [index // members for index in indices]
        size = len(runs) if len(set(runs)) == 1 else members
        blocks = [set(runs[start : start + size]) for start in range(0, len(runs), size)]
        if len(runs) % size or any(len(block) > 1 for block in blocks):
            raise ValueError("members of several runs, which share other weights, cannot be one ensemble")
        return self.shared_rows[[block.pop() for block in blocks]]

    def _reduced(self, reduce: Any) -> nn.Module:
        left_behind = [v for m in self.network.modules() for v in vars(m).values() if isinstance(v, Tensor)]
        memo: dict[int, Any] = {
            id(t): None for t in left_behind if t.grad_fn is not None or is_functorch_wrapped_tensor(t)
        }
        with torch.no_grad():
            for tensor in self.tensors().values():
                new = reduce(tensor.detach())
                memo[id(tensor)] = nn.Parameter(new, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else new
        return copy.deepcopy(self.network, memo)

    def fingerprint_parts(self) -> list[object]:
        """Everything that determines the outputs; how members run does not."""
        return [self.training, *with_output(self.output), self.network]

    def identity(self, opaque: list[str] | None = None, visit: Visit | None = None) -> str:
        """A checksum of the architecture, by which checkpoints recognise it; see `Body.identity`."""
        tensors = {name: tensor for name, tensor in self.tensors().items() if name not in self.skeleton.adopted}
        shapes = [tuple(tensor.shape[1:]) for tensor in tensors.values()]
        columns = list(self.layout().shapes), self.channels_last
        dtypes = [(part.stop, str(part.dtype)) for part in self.sections]
        shared = [(name, tuple(tensor.shape)) for name, tensor in self.shared_tensors().items()]
        extra = [part for part in (dtypes, shared) if part]
        settings = (shapes, columns, *extra, *with_output(self.output))
        return architecture_fingerprint([self.network], [self.settings], tensors, settings, opaque, visit)

    def set_keys(self, owners: Sequence[tuple[int, int]]) -> None:
        """Key dropout by the (run seed, member) of each row."""
        set_keys(self.network, owners)

    def copy_member(self, index: int, other: Body) -> None:
        """Overwrite one member with the member at the same index of another body."""
        tensors = self.tensors()
        late = next((name for name in other.tensors() if name not in tensors), None)
        if late is not None:  # the other members are to make it in their own first pass
            fix = "Run the network once inside `build`."
            checks.refuse(f"buffer {late}", "exist in all members that train one after the other", "one of them", fix)
        with torch.no_grad():
            for name, tensor in other.tensors().items():
                tensors[name][index].copy_(tensor[index])

    def attach(self, flat: Tensor, state: Tensors) -> None:
        """Replace all rows: parameters become views of a matrix ``[G, P]``, and ``state`` replaces the buffers."""
        self.adopt(state)
        views = self.layout().weights(flat.detach())
        for name, parameter in self.trainable().items():
            parameter.data = views[name]
        for name, tensor in self.state().items():
            tensor.data = state[name]

    def late_names(self) -> tuple[list[str], list[str]]:
        """Buffers that a pass has made, and those that are None; see `Body.late_names`."""
        return list(self.skeleton.adopted), self.skeleton.empty

    def adopt(self, tensors: Tensors) -> None:
        """Take buffers that the members do not have yet, because their first pass makes them; others are left."""
        known = self.tensors()
        self.skeleton.adopt({n: t for n, t in tensors.items() if n not in known and self.skeleton.takes(n)})

    def snapshot(self) -> Callable[[], None]:
        """Copy all buffers; what is returned restores them, and takes those away that have appeared since."""
        copies = {name: tensor.clone() for name, tensor in self.state().items()}

        def restore() -> None:
            self._late = []
            self.skeleton.discard([name for name in self.state() if name not in copies])
            with torch.no_grad():
                for name, tensor in self.state().items():
                    tensor.copy_(copies[name])

        return restore

    def average(self, into: Tensors, source: Tensors, weight: Tensor) -> None:
        """Move tensors towards those of ``source`` by a weight ``[M]``; names are those of `state`."""
        with torch.no_grad():
            for name, tensor in into.items():
                target, part = source[name].to(tensor.dtype), weight.view(-1, *[1] * (tensor.ndim - 1)).to(tensor.dtype)
                # Infinities of a mask, and NaN of a member that stands still, would become NaN.
                moves = (part > 0) & (target != tensor)
                tensor.copy_(torch.where(moves, tensor.lerp(target, part), tensor))

    def merge(self, into: Tensors, source: Tensors, members: Tensor) -> None:
        """Copy the members of a mask (bool ``[M]``) from ``source`` to ``into``, both as `state` returns them."""
        with torch.no_grad():
            for name, tensor in into.items():
                selected = members.view(-1, *[1] * (tensor.ndim - 1))
                tensor.copy_(torch.where(selected, source[name], tensor))  # reads no mask back: a graph may hold it


def _check_per_member(x: NetworkInputs, members: int) -> None:
    """Refuse inputs whose tensors have another first axis than that of the members."""
    wrong = next((t for t in calls.tensors(x) if not t.ndim or t.shape[0] != members), None)
    if wrong is not None:
        shape = f"[M={members}, B, ...]"
        raise ValueError(f"`x` must have shape {shape} with per_member=True; got {list(wrong.shape)}.")


def _row(tensors: Iterable[Tensor]) -> Tensor:
    """Tensors as one row."""
    return torch.cat([tensor.detach().reshape(1, -1) for tensor in tensors], 1)


def _selected(tensors: Tensors, rows: slice | Tensor) -> dict[str, Tensor]:
    whole = isinstance(rows, slice) and rows == slice(None)
    return {name: tensor if whole else tensor[rows] for name, tensor in tensors.items()}


_PRODUCTS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def _read_by_products_alone(skeleton: Skeleton) -> frozenset[str]:
    """Names of tensors that hang in linear layers and convolutions, and nowhere else."""
    layers = list(skeleton.network.named_modules())
    held = {
        is_product: {
            id(tensor)
            for _, layer in layers
            for tensor in [*layer._parameters.values(), *layer._buffers.values()]
            if tensor is not None and (type(layer) in _PRODUCTS and not has_hooks(layer)) == is_product
        }
        for is_product in (True, False)
    }
    return frozenset(n for n, t in skeleton.shared_tensors().items() if id(t) in held[True] - held[False])


def _lowers(tensor: Tensor, dtype: torch.dtype) -> bool:
    return tensor.dtype == torch.float32 and dtype in (torch.bfloat16, torch.float16)


def _autocast_dtype(flat: Tensor) -> torch.dtype | None:
    """The dtype to which autocast casts weights; None where it is off."""
    kind = flat.device.type
    lowered = torch.is_autocast_enabled(kind) and flat.dtype == torch.float32
    return torch.get_autocast_dtype(kind) if lowered else None


def _check_same(index: int, stacks: dict[str, list[Tensor]], tensors: Tensors) -> None:
    for name in [*stacks, *tensors]:
        if name not in tensors or name not in stacks:
            where = "member 0" if name not in stacks else f"member {index}"
            raise DifferentMembers(f"tensor {name!r} is missing in {where}")
        first, tensor = stacks[name][0], tensors[name]
        if first.shape != tensor.shape or first.dtype != tensor.dtype:
            raise DifferentMembers(
                f"tensor {name!r} is {list(tensor.shape)} {tensor.dtype} in member {index}"
                f" and {list(first.shape)} {first.dtype} in member 0"
            )


def attached(network: nn.Module, stacked: Tensors) -> nn.Module:
    """Replace a network's tensors by stacked ones."""
    skeleton = Skeleton(network)
    single = skeleton.tensors()
    replacements = {
        name: nn.Parameter(tensor, single[name].requires_grad) if isinstance(single[name], nn.Parameter) else tensor
        for name, tensor in stacked.items()
    }
    skeleton.hang(replacements)
    return network
