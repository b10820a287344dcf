"""One ensemble in several threads: they wait for each other where tensors are lent, so that no weights are lost."""

import copy
import pickle
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import dissensus as ds
from dissensus.execution.skeleton import Skeleton

M, THREADS = 4, 4


@pytest.fixture
def often_switched():
    """Threads switch far more often than usual, so that what can go wrong does."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("often_switched")
@pytest.mark.parametrize("backend", ["loop", "streams", "vmap", "batched", "stacked"])
def test_passes_in_several_threads_lose_no_weights_and_give_the_same_outputs(backend):
    ensemble = ds.Ensemble(lambda: ds.nets.mlp(5, 3, (7,)), M, backend=backend).eval()
    before = {name: tensor.clone() for name, tensor in ensemble.body.tensors().items()}
    x = torch.randn(6, 5)
    expected = ensemble(x)

    def passes(_):
        return [ensemble(x) for _ in range(30)]

    with ThreadPoolExecutor(THREADS) as pool:
        outputs = [output for several in pool.map(passes, range(THREADS)) for output in several]
    after = ensemble.body.tensors()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert all(torch.equal(output, expected) for output in outputs)


def test_another_thread_waits_while_tensors_are_lent():
    skeleton = Skeleton(nn.Linear(2, 1))
    own, lent, asked = skeleton.tensors(), {"weight": torch.ones(1, 2)}, []
    thread = threading.Thread(target=lambda: asked.append(skeleton.tensors()))
    with skeleton.lending(lent):
        thread.start()
        thread.join(0.05)
        assert thread.is_alive(), "it waits"
        with skeleton.lending({"weight": torch.zeros(1, 2)}):  # the same thread need not
            assert not skeleton.tensors()["weight"].any()
        assert skeleton.tensors()["weight"] is lent["weight"]
    thread.join(10)
    assert asked[0]["weight"] is own["weight"]


def test_a_failed_pass_lets_other_threads_go_on():
    skeleton = Skeleton(nn.Linear(2, 1))
    with pytest.raises(RuntimeError, match="on purpose"), skeleton.lending({"weight": torch.ones(1, 2)}):
        raise RuntimeError("on purpose")
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(skeleton.tensors).result(10).keys() == {"weight", "bias"}


def test_ensembles_are_copied_and_pickled():
    ensemble = ds.Ensemble(lambda: nn.Linear(2, 1), M)
    x = torch.randn(3, 2)
    for copied in (copy.deepcopy(ensemble), pickle.loads(pickle.dumps(ensemble.body))):
        assert torch.equal(copied(x) if isinstance(copied, ds.Ensemble) else copied.run(None, x), ensemble(x))
