"""Shapes and types are checked under the tests only; every test starts from the same generators and one thread."""

import os

import jaxtyping
import pytest
import torch
from hypothesis import HealthCheck, settings

jaxtyping.install_import_hook("dissensus", "typechecker.checker")

slow_start = [HealthCheck.too_slow]
settings.register_profile("ci", max_examples=25, deadline=None, derandomize=True, suppress_health_check=slow_start)
settings.register_profile("thorough", max_examples=500, deadline=None, suppress_health_check=slow_start)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _same_start():
    torch.manual_seed(0)


@pytest.fixture
def unchecked():
    """Switch the shape annotations off, so that a test sees the message that users see."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)
