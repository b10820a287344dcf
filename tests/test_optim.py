"""Stacked optimisers equal torch's, and a member that rests does not move."""

import pytest
import torch

from dissensus.train import optim, schedules

M, P = 3, 11
CASES = {
    "sgd": ("sgd", torch.optim.SGD, {}),
    "sgd decay": ("sgd", torch.optim.SGD, {"weight_decay": 0.1}),
    "momentum": ("sgd", torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1}),
    "nesterov": ("sgd", torch.optim.SGD, {"momentum": 0.8, "nesterov": True}),
    "adam": ("adam", torch.optim.Adam, {"weight_decay": 0.1}),
    "adamw": ("adamw", torch.optim.AdamW, {"weight_decay": 0.1}),
    "adamw betas": ("adamw", torch.optim.AdamW, {"betas": (0.7, 0.95), "eps": 1e-3, "weight_decay": 0.0}),
}


def settings(flat, lr, *, weight_decay=0.0, momentum=0.0, nesterov=False, betas=(0.9, 0.999), eps=1e-8, everyone=False):
    def column(name, value):
        return optim.column(name, value, M, flat)

    return optim.OptimizerColumns(
        lr=column("lr", lr),
        weight_decay=column("weight_decay", weight_decay),
        momentum=column("momentum", momentum),
        betas=betas,
        eps=eps,
        nesterov=nesterov,
        decays=weight_decay != 0,
        everyone=everyone,
    )


def gradients(steps):
    return torch.randn(steps, M, P, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("everyone", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_updates_equal_torch_with_a_rate_per_member(case, everyone):
    name, make_optimiser, options = CASES[case]
    rates = [0.1, 0.01, 0.3]
    start = torch.randn(M, P, dtype=torch.float64)
    flat = start.clone()
    columns = settings(flat, rates, everyone=everyone, **options)
    state = optim.initial_moments(name, flat, columns.momentum)
    rows = [torch.nn.Parameter(row.clone()) for row in start]
    optimisers = [make_optimiser([row], lr=rate, **options) for row, rate in zip(rows, rates, strict=True)]
    for grad in gradients(20):
        optim.OPTIMIZERS[name](flat, grad.clone(), state, columns, torch.ones(M, 1, dtype=torch.float64))
        for row, optimiser, member_grad in zip(rows, optimisers, grad, strict=True):
            row.grad = member_grad.clone()
            optimiser.step()
    torch.testing.assert_close(flat, torch.stack([row.detach() for row in rows]), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("clipped", [False, True])
@pytest.mark.parametrize("case", ["adam", "adamw", "adamw betas"])
def test_neighbours_with_equal_settings_are_updated_by_one_call(case, clipped, monkeypatch):
    monkeypatch.setattr(optim, "FUSED_ROWS", 1)
    calls: list[int] = []
    name, make_optimiser, options = CASES[case]
    kernel = f"_fused_{name}_"
    original = getattr(torch, kernel)

    def counted(rows, *arguments, **keywords):
        calls.append(len(rows[0]))
        return original(rows, *arguments, **keywords)

    monkeypatch.setattr(torch, kernel, counted)
    rates = [0.1, 0.1, 0.3]
    start = torch.randn(M, P, dtype=torch.float64)
    flat = start.clone()
    columns = settings(flat, rates, everyone=True, **options)
    state = optim.initial_moments(name, flat, columns.momentum)
    active = torch.ones(M, 1, dtype=torch.float64)
    scale = torch.tensor([[0.5], [1.0], [0.2]], dtype=torch.float64) if clipped else None
    rows = [torch.nn.Parameter(row.clone()) for row in start]
    optimisers = [make_optimiser([row], lr=rate, **options) for row, rate in zip(rows, rates, strict=True)]
    for grad in gradients(5):
        optim.OPTIMIZERS[name](flat, grad.clone(), state, columns, active, scale)
        for row, optimiser, member_grad in zip(rows, optimisers, grad if scale is None else grad * scale, strict=True):
            row.grad = member_grad.clone()
            optimiser.step()
    torch.testing.assert_close(flat, torch.stack([row.detach() for row in rows]), rtol=1e-10, atol=1e-12)
    assert calls == [2, 1] * 5
    assert state["steps"].tolist() == [[5.0]] * M


@pytest.mark.parametrize("case", CASES)
def test_an_inactive_member_keeps_weights_and_state(case):
    name, _, options = CASES[case]
    flat = torch.randn(M, P, dtype=torch.float64)
    columns = settings(flat, 0.1, **options)
    state = optim.initial_moments(name, flat, columns.momentum)
    plan = torch.tensor([[1, 0, 1, 1, 0, 1], [0, 0, 1, 0, 1, 1], [1, 1, 1, 1, 1, 1]], dtype=torch.float64)
    expected = []
    for member in range(M):
        single = flat[member : member + 1].clone()
        single_columns = optim.OptimizerColumns(
            **{k: v[:1] if isinstance(v, torch.Tensor) else v for k, v in vars(columns).items()}
        )
        single_state = optim.initial_moments(name, single, single_columns.momentum)
        for step, grad in enumerate(gradients(6)):
            if plan[member, step]:
                optim.OPTIMIZERS[name](
                    single, grad[member : member + 1], single_state, single_columns, single.new_ones(1, 1)
                )
        expected.append(single)
    for step, grad in enumerate(gradients(6)):
        optim.OPTIMIZERS[name](flat, grad.clone(), state, columns, plan[:, step : step + 1])
    torch.testing.assert_close(flat, torch.cat(expected), rtol=1e-12, atol=1e-14)


def test_clipping_is_per_member_and_equals_torch():
    grad = gradients(1)[0] * torch.tensor([[0.01], [1.0], [100.0]])
    expected = []
    for row in grad:
        p = torch.nn.Parameter(torch.zeros(P, dtype=torch.float64))
        p.grad = row.clone()
        torch.nn.utils.clip_grad_norm_([p], 1.5)
        expected.append(p.grad)
    limit = torch.full((M, 1), 1.5, dtype=torch.float64)
    torch.testing.assert_close(optim.clip_scale(grad, limit) * grad, torch.stack(expected))
    assert optim.clip_scale(grad, limit)[0] == 1.0


def test_hyperparameters_are_checked():
    flat = torch.zeros(M, P)
    with pytest.raises(ValueError, match=r"one per member \(M=3\)\)?; got 2 numbers"):
        optim.column("lr", [0.1, 0.2], M, flat)
    with pytest.raises(ValueError, match="`lr` must be a number of at least 0; got -1"):
        optim.column("lr", -1.0, M, flat)
    with pytest.raises(ValueError, match="nan"):
        optim.column("lr", float("nan"), M, flat)


def test_schedules_follow_torch():
    def torch_factors(make, epochs):
        optimiser = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        scheduler, factors = make(optimiser), []
        for _ in range(epochs):
            factors.append(optimiser.param_groups[0]["lr"])
            optimiser.step()
            scheduler.step()
        return torch.tensor(factors, dtype=torch.float64)

    epochs = torch.arange(10, dtype=torch.float64)
    steps = torch_factors(lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [3, 7], 0.2), 10)
    torch.testing.assert_close(schedules.step([3, 7], 0.2)(epochs, 10.0), steps)
    cosine = torch_factors(lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 10, 0.1), 10)
    torch.testing.assert_close(schedules.cosine(0.1)(epochs, 10.0), cosine)
    warmed_up = schedules.warmup(4.0, schedules.cosine())(epochs, 10.0)
    torch.testing.assert_close(warmed_up[:4], epochs[:4] / 4 * schedules.cosine()(epochs, 10.0)[:4])
    torch.testing.assert_close(schedules.resolved("constant")(epochs, 10.0), torch.ones(10, dtype=torch.float64))
    with pytest.raises(ValueError, match="Did you mean 'cosine'"):
        schedules.resolved("cosin")


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
def test_low_precision_weights_follow_float32_ones(name):
    exact, low_precision = torch.ones(M, P), torch.ones(M, P, dtype=torch.bfloat16)
    for flat in (exact, low_precision):
        columns = settings(flat, 0.01, weight_decay=0.1)
        state = optim.initial_moments(name, flat, columns.momentum)
        for grad in gradients(30):
            optim.OPTIMIZERS[name](flat, grad.to(flat.dtype).abs(), state, columns, torch.ones(M, 1))
    assert (exact - 1).abs().min() > 0.05
    torch.testing.assert_close(low_precision.float(), exact, rtol=0.1, atol=0.03)


def test_settings_that_torch_refuses_are_refused():
    hyper = {"lr": torch.tensor(0.1), "weight_decay": 0.0, "momentum": 0.0, "betas": (0.9, 0.999), "eps": 1e-8}
    flat = torch.zeros(M, P)
    assert optim.settings(hyper, M, flat, nesterov=False).lr.flatten().tolist() == pytest.approx([0.1] * M)
    with pytest.raises(ValueError, match="`betas` must be"):
        optim.settings({**hyper, "betas": (1.0, 0.9)}, M, flat, nesterov=False)
    with pytest.raises(ValueError, match="`nesterov` must come with a momentum"):
        optim.settings(hyper, M, flat, nesterov=True)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("case", ["momentum", "nesterov", "adam", "adamw", "adamw betas"])
def test_one_kernel_equals_the_passes_it_replaces(case, monkeypatch):
    """Rows that rest hold NaN in their gradients, and are left exactly as they are."""
    name, _, options = CASES[case]
    width = 5000
    results = []
    for fused in (False, True):
        torch.manual_seed(0)
        flat = torch.randn(M, width, device="cuda")
        columns = settings(flat, [0.1, 0.01, 0.3], **options)
        state = optim.initial_moments(name, flat, columns.momentum)
        with monkeypatch.context() as patch:
            if not fused:
                patch.setattr("dissensus.train.fused_optim.takes", lambda flat: False)
            for step in range(20):
                active = torch.tensor([[1.0], [float(step % 3 > 0)], [1.0]], device="cuda")
                grad = torch.where(active > 0, torch.randn(M, width, device="cuda"), torch.nan)
                scale = torch.tensor([[1.0], [0.5], [0.1]], device="cuda")
                optim.OPTIMIZERS[name](flat, grad, state, columns, active, scale)
        results.append([flat, *state.values()])
    for passes, kernel in zip(*results, strict=True):
        torch.testing.assert_close(kernel, passes, rtol=1e-5, atol=1e-6)


def test_without_a_compiler_updates_take_several_passes(monkeypatch, caplog):
    fused = optim.fused
    flat = torch.randn(M, P)
    kernels = type("Room", (), {"BLOCK": 4})()
    monkeypatch.setattr(fused, "kernels", lambda: kernels)  # launching anything fails
    monkeypatch.setattr(fused, "_refused", [])
    monkeypatch.setattr(fused, "takes", lambda flat: not fused._refused)
    columns = settings(flat, 0.1)
    state = optim.initial_moments("adam", flat, columns.momentum)
    expected, expected_state = flat.clone(), {name: tensor.clone() for name, tensor in state.items()}
    grad = torch.randn(M, P)
    optim.adam(flat, grad, state, columns, torch.ones(M, 1))
    assert "updates take several passes" in caplog.text
    optim.adam(expected, grad, expected_state, columns, torch.ones(M, 1))
    torch.testing.assert_close(flat, expected)
    torch.testing.assert_close(state, expected_state)
