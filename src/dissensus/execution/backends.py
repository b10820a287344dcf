"""The backends: ways to run the members of one pass. A new one is one function and one line of `BACKENDS`.

A backend from outside of the package is a `Backend` passed as an argument: ``Ensemble(build, backend=Backend(...))``.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from dissensus import checks
from dissensus.calls import NetworkInputs
from dissensus.execution.batched import run_batched
from dissensus.execution.compilation import (
    run_batched_compiled,
    run_loop_compiled,
    run_streams_compiled,
    run_vmapped_compiled,
)
from dissensus.execution.layerwise import run_layerwise
from dissensus.execution.loop import run_loop, run_streams
from dissensus.execution.skeleton import Skeleton, Tensors
from dissensus.execution.stacked_pass import run_stacked, seconds_to_compile
from dissensus.execution.vmapped import run_vmapped
from dissensus.execution.weights import Weights
from dissensus.execution.wide import run_wide


def run_products(skeleton: Skeleton, weights: Weights, buffers: Tensors, x: NetworkInputs, per_member: bool) -> Tensor:
    """Run all members as batched products, with a form of its own for members that share weights."""
    run = run_wide if skeleton.shared else run_batched
    return run(skeleton, weights, buffers, x, per_member)


Run = Callable[[Skeleton, Weights, Tensors, NetworkInputs, bool], Tensor]
"""``(skeleton, weights, buffers, x, per_member) -> outputs [M, B, ...]``; buffers are written to in place."""


@dataclass(frozen=True)
class Backend:
    """One way to run the members of a pass.

    Args:
        name: What users write as ``backend=``, and what `Ensemble.choices` reports.
        run: Computes the outputs of all members. Outputs and what it writes to buffers equal the loop's.
        takes_every_network: Whether it runs whatever the loop runs. Others are tried before their first pass, and the
            loop runs where they raise an error.
        on_cuda_only: Whether ``backend="auto"`` measures it on a GPU only.
        on_cpu_only: Whether ``backend="auto"`` measures it on a CPU only.
        seconds_to_compile: About how long a network's first pass takes to compile. ``backend="auto"`` measures it where
            passes follow that may save more. None: nothing is compiled.
    """

    name: str
    run: Run
    takes_every_network: bool = False
    on_cuda_only: bool = False
    on_cpu_only: bool = False
    seconds_to_compile: Callable[[nn.Module], float] | None = None


LOOP = Backend("loop", run_loop, takes_every_network=True)
"""The reference: every other backend must give its outputs."""

BACKENDS: dict[str, Backend] = {
    backend.name: backend
    for backend in (
        LOOP,
        Backend("batched", run_products),
        Backend("vmap", run_vmapped),
        Backend("layerwise", run_layerwise, on_cpu_only=True),
        Backend("streams", run_streams, takes_every_network=True, on_cuda_only=True),
        Backend("stacked", run_stacked, on_cuda_only=True, seconds_to_compile=seconds_to_compile),
    )
}
"""Backends by name; ``"auto"`` measures them in this order."""

COMPILED: dict[str, Backend] = {
    name: Backend(f"{name}, compiled", run, takes_every_network=False, on_cuda_only=BACKENDS[name].on_cuda_only)
    for name, run in (
        ("loop", run_loop_compiled),
        ("batched", run_batched_compiled),
        ("vmap", run_vmapped_compiled),
        ("streams", run_streams_compiled),
    )
}
"""The same with compiled passes, by the names of backends. No backend that is asked for: `fit` has ``compile=``."""


def backend_named(name: str) -> Backend | None:
    """The backend of this name, or the compiled form of one; None if there is neither."""
    return BACKENDS.get(name) or next((form for form in COMPILED.values() if form.name == name), None)


def checked(backend: str | Backend) -> str | Backend:
    """``backend`` if it is ``"auto"``, a name of `BACKENDS`, or a `Backend` with another name; refused otherwise."""
    if isinstance(backend, Backend):
        if backend.name in ("auto", *BACKENDS):
            checks.refuse("backend", "have a name that is not taken", repr(backend.name), "Rename it.")
        return backend
    checks.one_of("backend", backend, ["auto", *BACKENDS])
    return backend
