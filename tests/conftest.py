"""Set-up of all tests: shape checks, random generators, one thread, and the marker of slow tests."""

import os
from fnmatch import fnmatchcase
from pathlib import Path

import fixed_times
import jaxtyping
import pytest
import torch
from hypothesis import HealthCheck, settings

SOURCE = Path(__file__).parents[1] / "src"
shaped = [path.relative_to(SOURCE) for path in SOURCE.rglob("*.py") if "from jaxtyping import" in path.read_text()]
"""Modules with shapes in their annotations. Checked calls are slow, so pyright alone checks the types of the others."""
jaxtyping.install_import_hook([".".join(path.with_suffix("").parts) for path in shaped], "typechecker.checker")

slow_start = [HealthCheck.too_slow]
settings.register_profile("ci", max_examples=25, deadline=None, derandomize=True, suppress_health_check=slow_start)
settings.register_profile("thorough", max_examples=500, deadline=None, suppress_health_check=slow_start)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

torch.set_num_threads(1)


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(config, items):
    """Let `slow` mark some cases of a parametrised test, by patterns of their ids.

    ``@pytest.mark.slow(cases=["vgg-*"])`` marks these cases; ``@pytest.mark.slow(fast=["mlp-*"])`` marks all others.
    """
    unmatched = {}
    for item in items:
        for mark in [mark for mark in item.own_markers if mark.name == "slow" and mark.kwargs]:
            case, ((kind, patterns),) = item.callspec.id, mark.kwargs.items()
            matching = {pattern for pattern in patterns if fnmatchcase(case, pattern)}
            remaining = unmatched.setdefault(item.nodeid.partition("[")[0], set(patterns))
            remaining -= matching
            if bool(matching) != {"cases": True, "fast": False}[kind]:
                item.own_markers.remove(mark)
    unmatched = {test: sorted(patterns) for test, patterns in unmatched.items() if patterns}
    if unmatched and not any("::" in argument for argument in config.args):
        raise pytest.UsageError(f"`slow` must name cases that exist; got {unmatched}")


@pytest.fixture(autouse=True)
def _same_start():
    torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def _same_backends():
    """Let ``backend="auto"`` choose the same in every run of the tests."""
    with pytest.MonkeyPatch.context() as patch:
        fixed_times.fix(patch.setattr)
        yield


@pytest.fixture(autouse=True)
def _measured_backends(request, monkeypatch):
    if "measures_backends" in request.keywords:
        fixed_times.measure(monkeypatch.setattr)


@pytest.fixture
def unchecked():
    """Switch the shape annotations off, so that a test sees the message that users see."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)
