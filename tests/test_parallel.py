"""Members over several processes give what one process gives, to rounding."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import spawn

import dissensus as ds
from dissensus import objectives
from dissensus.train import Convergence

pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="torch was built without gloo"
)
MEMBERS = 5
JOINT = partial(objectives.joint, loss="cross_entropy", pool="probability")
ATTACK = ds.train.AdversarialTraining(0.1, steps=2, box=(-9.0, 9.0), norm="l2")
"""Without signs, which would make large differences of rounded gradients."""
INDEPENDENT = partial(objectives.independent, loss="cross_entropy")


def _network() -> nn.Module:
    # ADP takes fewer members than classes: else its volume is singular, and its gradient is rounding.
    # A bias before batch norm has no gradient but rounding, which Adam would make as large as any.
    layers = [nn.Linear(4, 6, bias=False), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.2), nn.Linear(6, 7)]
    return nn.Sequential(*layers).double()


def _regressor() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).double()


def _data() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 4, generator=generator, dtype=torch.float64)
    return x, torch.randint(7, (40,), generator=generator), torch.randn(16, 4, generator=generator, dtype=torch.float64)


def _cases() -> dict[str, tuple[Any, dict[str, Any]]]:
    """Objective and settings of every case; five epochs of four steps are twenty steps."""
    held_out = _data()[:2]
    return {
        "independent": (INDEPENDENT, {}),
        "augmented": (partial(objectives.augmented, beta=0.5, loss="cross_entropy", pool="probability"), {}),
        "joint": (JOINT, {}),
        "adp": (partial(objectives.adp, alpha=1.0, beta=0.5), {}),
        "ldr": (partial(objectives.ldr, strength=0.3), {}),
        "sampled": (partial(objectives.ldr, strength=0.3), {"active_members": 3}),
        "attacked": (JOINT, {"adversarial": ATTACK}),
        "attacked apart": (INDEPENDENT, {"adversarial": replace(ATTACK, against="members")}),
        "a2d": (partial(objectives.a2d, strength=0.3), {"unlabelled": _data()[2]}),
        "gradient_adjusted": (partial(objectives.gradient_adjusted, alpha=0.5), {}),
        "negative_correlation": (partial(objectives.negative_correlation, strength=0.3, loss="squared_error"), {}),
        "rates of members": (JOINT, {"lr": [0.01, 0.02, 0.03, 0.04, 0.05], "clip_norm": 0.5, "ema": 0.9}),
        "frozen": (JOINT, {"frozen": [3, 4]}),
        "converged": (INDEPENDENT, {"freeze": Convergence(patience=1, tolerance=0.2)}),
        "early stopping": (JOINT, {"validation": held_out, "patience": 1, "min_delta": 0.15}),
        "frozen, validated": (JOINT, {"validation": held_out, "frozen": [0, 1, 2]}),
        "each member": (
            INDEPENDENT,
            {"validation": held_out, "watch": "member", "patience": 1, "min_delta": 0.15},
        ),
        "callback": (JOINT, {"callbacks": [lambda entry: entry["epoch"] == 2]}),
        "bagging": (INDEPENDENT, {"bootstrap": True}),
    }


def _trained(name: str, parallel: Any) -> tuple[dict[str, torch.Tensor], ds.History]:
    objective, settings = _cases()[name]
    x, y, _ = _data()
    regression = name in ("gradient_adjusted", "negative_correlation")
    ens = ds.Ensemble(_regressor if regression else _network, members=MEMBERS, seed=1)
    targets = x[:, :1].sin() if regression else y
    settings = {"lr": 0.02, **settings}
    history = ds.fit(ens, (x, targets), objective, epochs=5, batch_size=10, seed=3, parallel=parallel, **settings)
    return dict(ens.state_dict()), history


def _diverged(parallel: Any) -> tuple[str, list[int]]:
    x, y, _ = _data()
    ens = ds.Ensemble(_network, members=MEMBERS, seed=1)
    with torch.no_grad():
        ens.body.tensors()["0.weight"][4] = float("nan")
    with pytest.raises(ds.TrainingDiverged) as told:
        ds.fit(ens, (x, y), JOINT, epochs=1, lr=0.01, parallel=parallel)
    return told.value.part, told.value.members


def _join(rank: int, size: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=size)


def _rank(rank: int, size: int, folder: str, names: list[str]) -> None:
    _join(rank, size, folder)
    results = {name: _trained(name, "members") for name in names}
    torch.save((results, _diverged("members")), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def _check(size: int, folder: Path, names: list[str]) -> None:
    spawn(_rank, (size, str(folder), names), size)
    ranks = [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(size)]
    for name in names:
        tensors, history = _trained(name, None)
        for results, _ in ranks:
            own, record = results[name]
            for key, tensor in tensors.items():
                torch.testing.assert_close(own[key], tensor, rtol=1e-9, atol=1e-11, msg=f"{name}: {key} differs")
            assert record == ranks[0][0][name][1], name
            assert record.steps == history.steps, name
            assert (record.best_epoch, record.frozen_at) == (history.best_epoch, history.frozen_at), name
            assert (record.stopped_early, record.stopped_by) == (history.stopped_early, history.stopped_by), name
            for mine, expected in zip(record.epochs, history.epochs, strict=True):
                assert mine.keys() == expected.keys()
                for key in mine.keys() - {"seconds"}:
                    assert mine[key] == pytest.approx(expected[key], rel=1e-8), (name, key)
    told = _diverged(None)
    assert all(own == told for _, own in ranks)


def test_five_members_on_two_ranks(tmp_path: Path) -> None:
    _check(2, tmp_path, list(_cases()))


@pytest.mark.slow
def test_five_members_on_four_ranks(tmp_path: Path) -> None:
    _check(4, tmp_path, ["joint", "ldr", "each member", "rates of members"])


def test_without_torchrun_nothing_changes() -> None:
    one, other = _trained("joint", None), _trained("joint", "members")
    assert all(torch.equal(one[0][name], other[0][name]) for name in one[0])


def test_several_processes_per_member_are_refused() -> None:
    with pytest.raises(ValueError, match="`parallel` must be 'members' or None"):
        _trained("joint", "members+data")


def _failing(rank: int, size: int, folder: str) -> None:
    _join(rank, size, folder)
    x, y, _ = _data()

    def objective(outputs: torch.Tensor, targets: torch.Tensor) -> Any:
        if rank == 1:
            raise ValueError("no more paper")
        return JOINT(outputs, targets)

    try:
        ds.fit(ds.Ensemble(_network, members=MEMBERS), (x, y), objective, epochs=2, parallel="members")
    except Exception as reason:
        Path(folder, f"{rank}.txt").write_text(f"{type(reason).__name__}: {reason}")


def _refused(rank: int, size: int, folder: str) -> None:
    _join(rank, size, folder)
    x, y, _ = _data()
    with pytest.raises(ValueError, match="`active_members` must be left out"):
        ds.fit(ds.Ensemble(_network), (x, y), JOINT, epochs=1, active_members=2, parallel="members")
    with pytest.raises(ValueError, match="2 processes, 1 members"):
        ds.fit(ds.Ensemble(_network, members=1), (x, y), JOINT, epochs=1, parallel="members")
    Path(folder, f"refused-{rank}").touch()
    dist.destroy_process_group()


def test_a_rank_that_fails_tells_the_others(tmp_path: Path) -> None:
    spawn(_failing, (2, str(tmp_path)), 2)
    assert (tmp_path / "1.txt").read_text() == "ValueError: no more paper"
    told = (tmp_path / "0.txt").read_text()
    assert told.startswith("RankFailed")
    assert "rank 1: ValueError: no more paper" in told


@pytest.mark.slow
def test_what_ranks_do_not_take_is_refused(tmp_path: Path) -> None:
    spawn(_refused, (2, str(tmp_path)), 2)
    assert len(list(tmp_path.glob("refused-*"))) == 2
