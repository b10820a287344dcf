"""Robustness as a whole: worst cases, intervals, resuming, and every flag on a model that is built to raise it."""

import functools
import html
import json
import sys
import types
from typing import ClassVar

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn
from typer.testing import CliRunner

import dissensus as ds
from dissensus import attacks, pages
from dissensus.attacks import crafting, flags, suites
from dissensus.attacks.diagnostics import AttackDiagnostics, ModelDiagnostics, model_diagnostics
from dissensus.attacks.page import page as robustness_page
from dissensus.attacks.robustness import HEADER, Robustness
from dissensus.cli import app
from dissensus.metrics import wilson
from dissensus.studies import datasets, stored_ensembles
from dissensus.studies.registry import maker

C, SIDE, EPSILON = 4, 6, 0.15


def images(count=64, seed=3):
    """Noisy copies of C patterns."""
    generator = torch.Generator().manual_seed(seed)
    patterns = torch.rand(C, 1, SIDE, SIDE, generator=torch.Generator().manual_seed(9))
    y = torch.randint(C, (count,), generator=generator)
    return (patterns[y] + 0.5 * torch.randn(count, 1, SIDE, SIDE, generator=generator)).clamp(0, 1), y


def trained(seed, *layers):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Flatten(), nn.Linear(SIDE * SIDE, 32), *layers, nn.ReLU(), nn.Linear(32, C))
    optimiser = torch.optim.Adam(model.parameters(), 0.005)
    x, y = images(800, seed=1)
    for _ in range(100):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimiser.step()
    return model.eval().requires_grad_(False)


@pytest.fixture(scope="module")
def network():
    return trained(0)


@pytest.fixture(scope="module")
def other_network():
    return trained(1)


class WithOutputs(nn.Module):
    """A model, and something done to its outputs."""

    def __init__(self, model, do):
        super().__init__()
        self.model, self.do = model, do

    def forward(self, x):
        return self.do(self.model(x))


def quick(model, data=None, **options):
    options = {"epsilon": EPSILON, **options}
    return attacks.evaluate(model, data or images(), "quick", **{"epsilons": [options["epsilon"]], **options})


def raised(result):
    return {flag.name for flag in result.flags}


@pytest.fixture(scope="module")
def honest(network, other_network):
    return quick(network, surrogate=other_network)


@pytest.fixture(scope="module")
def masked(network, other_network):
    return quick(WithOutputs(network, lambda z: 100 * z), surrogate=other_network)


def test_a_sound_model_raises_no_flag(honest):
    assert raised(honest) == set()
    assert honest.flags_raised == "flags raised: none"
    assert len(honest.checks) == 14
    assert 0.1 < honest.worst.value < 0.5 < 0.9 < honest.clean.value


@pytest.mark.slow
def test_an_ensemble_in_l2_raises_no_flag(network, other_network):
    result = quick([network, other_network], norm="l2", epsilon=0.6)
    assert raised(result) == set()
    assert [row.name for row in result.attacks] == [
        "APGD-CE",
        "APGD-T",
        "APGD, members' logits",
        "from member 0",
        "from member 1",
        "Square",
    ]
    assert result.facts["members"] == 2


def test_a_masked_model_raises_most_flags_and_is_broken_all_the_same(honest, masked):
    assert raised(masked) - {"noise as strong"} == {
        "gradients",
        "saturated loss",
        "robust at full range",
        "Square stronger",
        "transfer stronger",
        "losses far apart",
    }
    by_ce = next(row for row in masked.attacks if row.name == "APGD-CE")
    assert by_ce.accuracy.value > 0.8, "which is what the model seems to be worth"
    assert masked.worst.value == pytest.approx(honest.worst.value, abs=0.05)
    assert all(flag.seen and flag.meaning and flag.advice for flag in masked.checks)


def test_noise_as_strong_as_an_attack(network):
    """Without any gradient, an attack is its random start."""
    assert "noise as strong" in raised(quick(WithOutputs(network, lambda z: 1e4 * z)))


def digits():
    """Images of digits and their labels: for training, and for attacks."""
    images, labels = (torch.tensor(part) for part in load_digits(return_X_y=True))
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    x, y = images.float().view(-1, 1, 8, 8)[order] / 16, labels[order]
    return (x[:400], y[:400]), (x[1000:1064], y[1000:1064])


OVERTRAINED = {
    "perceptron": lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)),
    "deeper": lambda: nn.Sequential(
        nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)
    ),
    "convolutional": lambda: nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 10)
    ),
}


@pytest.fixture(
    scope="module", params=[("perceptron", 0), ("perceptron", 1), ("deeper", 0), ("convolutional", 0)], ids=str
)
def overtrained(request):
    """A network that was trained far beyond its last error on training data."""
    name, seed = request.param
    (x, y), _ = digits()
    torch.manual_seed(seed)
    model = OVERTRAINED[name]()
    optimiser = torch.optim.Adam(model.parameters(), 0.04)
    for _ in range(800):
        optimiser.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimiser.step()
    assert loss < 1e-4
    return model.eval().requires_grad_(False)


@pytest.mark.slow(fast=["('perceptron', 0)"])
def test_an_overtrained_network_has_a_saturated_loss_that_hides_nothing(overtrained):
    """Its loss is zero on many examples; attacks on it are as strong as any."""
    _, (x, y) = digits()
    assert model_diagnostics(overtrained, x, y).saturated > flags.SATURATED
    result = quick(overtrained, (x, y), epsilon=0.1)
    assert "saturated loss" not in raised(result)
    terms, unbroken = suites.Terms(0.1, shape=(1, 8, 8)), torch.ones(len(x), dtype=torch.bool)
    for setting in (*suites.adaptive(terms).settings[:2], suites.standard(terms).settings[1]):
        unbroken &= ~setting.attack(overtrained, x, y).success
    assert result.worst.value == pytest.approx(float(unbroken.double().mean()), abs=0.032), "two examples of 64"


@pytest.mark.slow(fast=["('perceptron', 0)-30"])
@pytest.mark.parametrize("factor", [30, 100, 1000])
def test_a_saturated_loss_that_hides_weakness_is_flagged(overtrained, factor):
    """Logits times a number: the same predictions, and cross-entropy without a gradient."""
    _, data = digits()
    result = quick(WithOutputs(overtrained, lambda z: factor * z), data, epsilon=0.1)
    by_ce = next(row for row in result.attacks if row.name == "APGD-CE")
    assert by_ce.accuracy.value > result.worst.value + 0.2
    assert "saturated loss" in raised(result)


@pytest.mark.parametrize(
    ("saturated", "ce", "logits", "square", "raised_flag"),
    [
        (0.9, 50, 50, None, False),
        (0.9, 50, 46, None, False),
        (0.9, 50, 44, None, True),
        (0.9, 50, 50, 44, True),  # whatever does not climb cross-entropy counts
        (0.05, 50, 10, None, False),  # that is another flag's business
        (0.9, 40, 50, None, False),
    ],
)
def test_a_saturated_loss_counts_where_others_find_more(saturated, ce, logits, square, raised_flag):
    probes = AttackDiagnostics(100, 90, 80, 0, {10: ce}, ce, ce, ce, 0, ce, logits, 0, square, {}, {})
    diagnostics = ModelDiagnostics(100, 1, 10, 90, 0.0, 0.0, saturated, False, 0.0, 0.0)
    assert flags._saturated(diagnostics, probes).raised is raised_flag


@pytest.mark.parametrize(
    ("clean", "noise", "unbroken", "raised_flag"),
    [
        (90, 60, 40, True),
        (90, 66, 40, False),  # noise breaks 24, less than half of 50
        (53, 25, 0, False),  # all is broken: the attack is strong enough, and the model weak
        (53, 25, 2, False),
        (53, 25, 3, True),
    ],
)
def test_noise_is_compared_with_what_the_attack_breaks(clean, noise, unbroken, raised_flag):
    probes = AttackDiagnostics(
        100, clean, noise, 0, {10: unbroken}, unbroken, unbroken, unbroken, 0, unbroken, 0, 0, None, {}, {}
    )
    assert flags._noise(probes).raised is raised_flag


class _Lost(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * torch.where(torch.arange(len(gradient)) % 4 == 0, torch.nan, 1.0).view(-1, 1)


def test_gradients_that_are_lost(network):
    without_gradients = WithOutputs(network, lambda z: _Lost.apply(z))
    flag = quick(without_gradients).checks[0]
    assert flag.raised
    assert "NaN or infinities for 2" in flag.seen


def test_probabilities_as_logits(network):
    assert "probabilities as logits" in raised(quick(WithOutputs(network, lambda z: z.softmax(-1))))
    assert not model_diagnostics(WithOutputs(network, lambda z: z.log_softmax(-1)), *images()).sums_to_one


@pytest.mark.slow
def test_random_outputs_and_the_mean_of_passes(network):
    shaky = WithOutputs(network, lambda z: z + 0.5 * torch.randn_like(z))
    result = quick(shaky)
    assert "random outputs" in raised(result)
    assert "depends on the batch" not in raised(result), "one reason is enough"
    names = [s.name for s in suites.adaptive(suites.Terms(EPSILON, stochastic=True)).settings]
    assert "PGD, mean of passes" in names
    assert "PGD, mean of passes" not in [s.name for s in suites.adaptive(suites.Terms(EPSILON)).settings]
    x, y = images(30)
    last = suites.adaptive(suites.Terms(EPSILON, classes=C, stochastic=True)).settings[4]
    assert last.name == "PGD, mean of passes"
    assert int(last.attack(shaky, x, y).success.sum()) > 10
    passes = crafting.RepeatedPasses(shaky, 3)
    assert passes(images(5)[0]).shape == (3, 5, C)


def test_outputs_that_depend_on_the_batch():
    normed = trained(0, nn.BatchNorm1d(32))
    normed.train()
    assert model_diagnostics(normed, *images()).between_batches < 1e-5, "a module is evaluated in evaluation mode"
    assert "depends on the batch" in raised(quick(lambda x: normed(x)))


class _Turned(torch.autograd.Function):
    """Slopes that point the other way where a number lies in a band."""

    @staticmethod
    def forward(ctx, f, low, high):
        ctx.save_for_backward((f.abs() > low) & (f.abs() < high))
        return f.clone()

    @staticmethod
    def backward(ctx, gradient):
        (inside,) = ctx.saved_tensors
        return torch.where(inside, -gradient, gradient), None, None


class _Straight(torch.autograd.Function):
    """One number forwards, the slope of another one backwards."""

    @staticmethod
    def forward(ctx, f, value):
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


SIGNS = torch.where(torch.arange(64) % 2 == 0, 1.0, -1.0)


def on_a_line(count=64):
    """Two classes, each at half an ε from the border between them, in L∞."""
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(count) % 2
    noise = 0.1 * torch.randn(count, 64, generator=generator)
    noise -= (noise @ SIGNS / 64).unsqueeze(1) * SIGNS
    return (0.5 + (y.view(-1, 1) - 0.5) * EPSILON * SIGNS + noise).clamp(0, 1), y


def position(x):
    return (x - 0.5) @ SIGNS / 64


def wall(x):
    """Small steps towards the border turn back."""
    f = 20 * _Turned.apply(position(x), 0.02 * EPSILON, 0.4 * EPSILON)
    return torch.stack([-f, f], -1)


def strip(x):
    """The second class, but for a strip that slopes lead across."""
    f = position(x)
    value = _Straight.apply(f, torch.where(f.abs() < 0.2 * EPSILON, -1.0, 1.0))
    return torch.stack([-value, value], -1)


def test_small_steps_that_get_lost_where_one_large_step_does_not():
    result = quick(wall, on_a_line())
    assert {"more steps weaker", "one step stronger"} <= raised(result)


def test_a_last_point_that_is_unbroken_again():
    x, y = on_a_line(128)
    result = quick(strip, (x[y == 1], y[y == 1]))
    assert "last point unbroken" in raised(result)


def test_restarts_that_are_weaker(network):
    """Only a model whose answers change can do that."""
    hard = {"now": False}

    def changing(x):
        return network(x.round()) if hard["now"] else network(x)

    result = quick(changing, progress=lambda name, _: hard.update(now=name == "FGSM"))
    assert "more restarts weaker" in raised(result)


def test_flags_leave_room_for_luck():
    assert flags.chance_margin(64) == 2.0
    assert flags.chance_margin(200) == 4.0


def test_the_evaluation_is_its_attacks_one_after_the_other(network):
    x, y = images()
    result = quick(network, batch_size=25)
    misclassified = network(x).argmax(-1) != y
    assert result.clean == wilson(int((~misclassified).sum()), 64)
    broken = misclassified.clone()
    chosen = suites.quick(suites.Terms(EPSILON, classes=C, shape=(1, SIDE, SIDE)))
    for row, setting in zip(result.attacks, chosen.settings, strict=True):
        adversarial = setting.attack(network, x, y)
        assert row.tried == int((~broken).sum())
        assert row.broken == int((adversarial.success & ~broken).sum())
        broken |= adversarial.success
        assert row.accuracy == wilson(int((~broken).sum()), 64)
    assert result.worst == wilson(int((~broken).sum()), 64)
    assert result.standing == (~broken).nonzero().squeeze(1).tolist()
    assert result.worst.low < result.worst.value < result.worst.high


def few_steps(terms):
    """The paper's suite, in less time."""
    settings = []
    for setting in suites.paper(terms).settings:
        attack = setting.attack
        short = {"steps": 30} if attack.keywords.get("steps") == 1000 else {}
        settings.append(setting._replace(attack=functools.partial(attack, **short)))
    return suites.Suite(settings, False, suites.quick(terms).budget, "paper")


def test_the_papers_attacks_are_run_on_their_own_and_judged_at_epsilon(network):
    x, y = images(240)
    result = attacks.evaluate(network, (x, y), few_steps, epsilon=EPSILON)
    assert [row.name for row in result.attacks] == [
        "FGSM",
        "BIM",
        "PGD",
        "MIM",
        "JSMA γ=0.3",
        "JSMA γ=0.6",
        "C&W c=0.1",
        "C&W c=1",
        "C&W c=10",
        "EAD c=5",
        "EAD c=10",
    ]
    bim = attacks.bim(network, x, y, epsilon=EPSILON, stop=False, step_size=EPSILON / 10)
    assert result.attacks[1].accuracy == wilson(int((~bim.success).sum()), 240)
    assert result.attacks[4].examples == 200
    bounded = [row.accuracy.value for row in result.attacks if row.bounded]
    assert result.worst.value <= min(bounded)
    unbounded = next(row for row in result.attacks if row.name == "EAD c=10")
    assert unbounded.accuracy.value < result.worst.value, "what lies beyond ε does not count"
    assert "* not bound by ε" in result.summary()
    colour = suites.paper(suites.Terms(0.01))
    assert {"JSMA γ=0.05", "C&W c=0.001", "EAD c=1"} <= {s.name for s in colour.settings}
    assert {s.examples for s in colour.settings} == {None, 200, 1000}


@pytest.mark.slow
def test_the_adaptive_suite_has_the_standard_one_in_it(network, other_network):
    terms = suites.Terms(0.3, members=2, surrogate=other_network)
    names = [s.name for s in suites.adaptive(terms).settings]
    assert names[-4:] == [s.name for s in suites.standard(terms).settings]
    assert {"from member 0", "from member 1", "from surrogate", "APGD, members' losses", "PGD, mean logits"} <= set(
        names
    )
    x, y = images(8)
    for setting in suites.adaptive(terms).settings[:-3]:
        result = setting.attack([network, other_network], x, y)
        assert bool((result.distance <= 0.3).all()), setting.name
        assert bool(result.success.any()), setting.name
    l2 = [s.name for s in suites.standard(suites.Terms(0.5, "l2")).settings]
    assert l2 == ["APGD-CE", "APGD-T", "C&W at ε", "Square"]
    flat = [s.name for s in suites.standard(suites.Terms(0.5, "l2", shape=(20,))).settings]
    assert "Square" not in flat, "in L2 it needs images"


def test_attacks_on_members_are_judged_by_the_pooled_prediction(network, other_network):
    x, y = images()
    pair = [network, WithOutputs(other_network, lambda z: 5 * z)]
    settings = suites.quick(suites.Terms(EPSILON, pool="score", classes=C, members=2)).settings[2:5]
    assert [setting.name for setting in settings] == ["APGD, members' logits", "from member 0", "from member 1"]
    for setting in settings:
        result = setting.attack(pair, x, y)
        scores = sum(member(result.inputs) for member in pair)
        assert torch.equal(scores.argmax(-1) != y, result.success)


@pytest.mark.slow
def test_members_logits_break_an_ensemble_that_hides_its_gradients(network, other_network):
    """Confident members' mean probability is flat for every loss of it; their own ratios of logits are not."""
    pair = [WithOutputs(member, lambda z: 1000 * z) for member in (network, other_network)]
    result = quick(pair)
    accuracies = {row.name: row.accuracy.value for row in result.attacks}
    assert accuracies["APGD-CE"] > 0.8
    assert result.worst.value < 0.6
    assert next(point for point in result.over_epsilon if point.at == EPSILON).accuracy.value < 0.6
    assert "losses far apart" in raised(result)


def test_rescaled_scores_break_what_cross_entropy_cannot(network):
    x, y = images()
    masked = WithOutputs(network, lambda z: 100 * z)
    unscaled = attacks.pgd(masked, x, y, epsilon=EPSILON)
    craft = functools.partial(
        crafting.craft_on_rescaled, craft=functools.partial(attacks.pgd, epsilon=EPSILON), pool="probability"
    )
    result = attacks.tried(masked, x, y, craft=craft, epsilon=EPSILON)
    assert int(result.success.sum()) > 3 * int(unscaled.success.sum())


def test_points_beyond_epsilon_do_not_count(network):
    x, y = images()
    attack = functools.partial(attacks.carlini_wagner, steps=50, step_size=0.02, constant=1.0, search_steps=2)
    unbounded = attack(network, x, y)
    result = attacks.tried(network, x, y, craft=attack, epsilon=0.5, norm="l2")
    within = unbounded.success & (unbounded.distance <= 0.5)
    assert torch.equal(result.success, within)
    assert 0 < int(within.sum()) < int(unbounded.success.sum())
    assert torch.equal(result.inputs[~within], x[~within])


def test_noise_stays_in_the_ball(network):
    x, y = images()
    result = attacks.random_noise(network, x, y, epsilon=0.4, draws=20)
    assert 0 < int(result.success.sum()) < 64
    assert bool((result.distance <= 0.4).all())
    fewer = attacks.random_noise(network, x, y, epsilon=0.4, draws=2)
    assert bool((result.success | ~fewer.success).all()), "more draws are never weaker"


@pytest.mark.slow
def test_an_evaluation_goes_on_where_it_was_broken_off(network, tmp_path):
    class Enough(Exception):
        pass

    reports = []

    def interrupt_at_square(name, share):
        reports.append((name, share))
        if name == "Square":
            raise Enough

    with pytest.raises(Enough):
        quick(network, folder=tmp_path, batch_size=40, progress=interrupt_at_square)
    shares = [share for _, share in reports]
    assert shares == sorted(shares)
    modified = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*.safetensors")}
    assert len(modified) == 4, "two batches of the first attack, one of what is left for each of the others"
    expected, resumed = quick(network), quick(network, folder=tmp_path, batch_size=40)
    assert resumed.worst == expected.worst
    assert [row[:6] for row in resumed.attacks] == [row[:6] for row in expected.attacks]
    assert {file: file.stat().st_mtime_ns for file in modified} == modified
    with pytest.raises(ValueError, match="`folder` must hold results of the same attack, model and examples"):
        quick(trained(2), folder=tmp_path, batch_size=40)


def test_curves_fall(network):
    result = quick(network, epsilons=[0.05, 0.3])
    assert [point.at for point in result.over_epsilon] == [0.0, 0.05, EPSILON, 0.3]
    assert [point.at for point in result.over_steps] == [0, 1, 2, 5, 10]
    for curve in (result.over_epsilon, result.over_steps):
        heights = [point.accuracy.value for point in curve]
        assert heights[0] == result.clean.value
        assert heights[-1] < heights[0] - 0.3
    by_epsilon = [point.accuracy.value for point in result.over_epsilon]
    assert by_epsilon == sorted(by_epsilon, reverse=True)


def test_json_and_back(masked):
    result = masked
    restored = Robustness.from_json(result.to_json())
    assert restored == result
    fields = json.loads(result.to_json())
    assert fields["flags_raised"].startswith("flags raised: gradients")
    assert "passed" not in result.to_json() + result.summary()
    assert max(map(len, result.summary().splitlines())) <= 80
    rows = result.table()
    assert {len(row) for row in rows} == {len(HEADER)}
    assert [row[0] for row in rows] == ["no attack", *(row.name for row in result.attacks), "worst case"]


def test_examples_that_a_weak_suite_missed_are_reported(network):
    def weak(terms):
        return suites.Suite(suites.paper(terms).settings[:1], False, suites.quick(terms).budget, "quick")

    result = attacks.evaluate(
        WithOutputs(network, lambda z: 100 * z), images(), weak, epsilon=EPSILON, epsilons=[EPSILON]
    )
    assert result.facts["beyond"] > 10
    assert "a stronger one would leave fewer" in " ".join(result.summary().split())


def test_refusals(network, unchecked):
    x, y = images(8)
    for options, message in (
        ({"suite": "standrad"}, "Did you mean 'standard'"),
        ({"epsilon": 0.0}, "`epsilon` must be a number above 0"),
        ({"norm": "l1"}, "`norm` must be one of"),
        ({"examples": 0}, "`examples` must be a whole number"),
        ({"batch_size": 0}, "`batch_size` must be"),
    ):
        with pytest.raises(ValueError, match=message):
            attacks.evaluate(network, (x, y), **{"epsilon": 0.1, "suite": "quick", **options})
    with pytest.raises(TypeError, match="`data` must be a pair of tensors"):
        attacks.evaluate(network, x, "quick", epsilon=0.1)
    with pytest.raises(ValueError, match="hold examples with a label each"):
        attacks.evaluate(network, (x, y[:3]), "quick", epsilon=0.1)
    with pytest.raises(ValueError, match=r"`x` must lie in \[0, 1\]"):
        attacks.evaluate(network, (2 * x, y), "quick", epsilon=0.1)
    with pytest.raises(ValueError, match=r"members cannot take inputs \[8, .*first layer with weights"):
        attacks.evaluate(network, (x[..., :-1], y), "quick", epsilon=0.1)


def stored(tmp_path, seed=0, name="kept"):
    """A small ensemble of the studies' perceptrons for made-up images, trained a little."""
    problem = datasets.load_unscaled("made-images")
    x, y = problem.train
    mean, std = x.mean((0, 2, 3), keepdim=True), x.std((0, 2, 3), keepdim=True)
    ens = ds.Ensemble(maker("mlp", problem, {"width": 16}), members=2, seed=seed, backend="loop")
    objective = functools.partial(ds.objectives.independent, loss="cross_entropy")
    ds.fit(ens, ((x - mean) / std, y), objective, epochs=6, batch_size=50, lr=0.01)
    ens.save(tmp_path / name)
    return problem, ens.eval()


def test_a_stored_ensemble_behind_its_standardisation(tmp_path):
    problem, ens = stored(tmp_path)
    result = stored_ensembles.load(tmp_path / "kept", "mlp", problem, {"width": 16}, standardise=True)
    x, y = result.data
    assert 0 <= float(x.min()) <= float(x.max()) <= 1
    train = problem.train[0]
    mean, std = train.mean((0, 2, 3), keepdim=True), train.std((0, 2, 3), keepdim=True)
    torch.testing.assert_close(result.model(x), ens((x - mean) / std))
    assert float((result.model(x).mean(0).argmax(-1) == y).float().mean()) > 0.9
    unstandardised = stored_ensembles.load(tmp_path / "kept", "mlp", problem, {"width": 16}, standardise=False)
    assert isinstance(unstandardised.model, ds.Ensemble)
    digits = datasets.load_unscaled("digits", train_examples=100)
    assert digits.shape == (1, 8, 8)
    assert len(digits.train[0]) == 100
    assert float(digits.test[0].max()) <= 1


def test_the_command(tmp_path, unchecked):
    stored(tmp_path)
    run = CliRunner().invoke
    command = [
        "robust",
        "--ensemble",
        str(tmp_path / "kept"),
        "--network",
        "mlp",
        "--option",
        "width=16",
        "--data",
        "made-images",
        "--suite",
        "quick",
        "--examples",
        "40",
        "--epsilon",
    ]
    out, page = tmp_path / "out.json", tmp_path / "page.html"
    files = ["--json", str(out), "--page", str(page), "--folder", str(tmp_path / "runs")]
    done = run(app, [*command, "20/255", "--attack", "mim", *files])
    assert done.exit_code == 0, done.output
    assert "flags raised" in done.output
    assert "worst case" in done.output
    result = Robustness.from_json(out.read_text())
    assert result.facts["epsilon"] == 20 / 255
    assert result.attacks[-1].name == "MIM"
    assert result.facts["examples"] == 40
    assert result.facts["members"] == 2
    assert max(len(line) for line in done.output.splitlines() if "Open" not in line) <= 80
    text = page.read_text()
    assert text.count("<figure") == 3
    for wrong_arguments, message in (
        (["a/b"], "--epsilon must be a number or a fraction"),
        (["0.1", "--suite", "paperr"], "Did you mean 'paper'"),
        (["0.1", "--attack", "mimm"], "Did you mean 'mim'"),
        (["0.1", "--network", "mlpp"], "Did you mean 'mlp'"),
        (["0.1", "--data", "minst"], "Did you mean 'mnist'"),
        (["0.1", "--option", "width"], "write it as name=value"),
        (["0.1", "--ensemble", str(tmp_path / "absent")], "holds no manifest.json"),
        (["0.1", "--option", "width=8"], "does not fit the network"),
    ):
        failed = run(app, [*command, *wrong_arguments])
        assert failed.exit_code == 1, wrong_arguments
        assert message in " ".join(failed.output.split())


def test_the_page_lists_every_attack_and_check(masked):
    text = pages.html(robustness_page(masked, "a masked <model>"))
    for row in masked.attacks:
        assert row.name in text
    for flag in masked.checks:
        assert flag.name in text
        assert html.escape(flag.meaning) in text
    for flag in masked.flags:
        assert html.escape(flag.advice) in text
    assert text.count(">raised<") == len(masked.flags)
    assert f"flags raised: {len(masked.flags)} of 14" in text
    assert "passed" not in text
    assert "a masked &lt;model&gt;" in text
    assert "://" not in text


def test_the_page_says_when_no_flag_is_raised(honest):
    assert "flags raised: none" in pages.html(robustness_page(honest, "sound"))


class Original:
    """Stands for pyautoattack's."""

    instances: ClassVar[list] = []

    def __init__(self, model, *, eps, norm, version, device, seed):
        self.model, self.eps = model, eps
        self.apgd_targeted, self.fab = types.SimpleNamespace(), types.SimpleNamespace()
        self.settings = {"norm": norm, "version": version, "device": str(device), "seed": seed}
        Original.instances.append(self)

    def run_standard_evaluation(self, x, y, *, batch_size):
        point = x.clone().requires_grad_()
        scores = self.model(point)
        assert torch.allclose(scores.exp().sum(-1), torch.ones(len(x)))
        (slope,) = torch.autograd.grad(nn.functional.cross_entropy(scores, y, reduction="sum"), point)
        return (x + 1.0001 * self.eps * slope.sign()).clamp(0, 1), y


def test_autoattack_of_the_package(network, other_network, monkeypatch):
    x, y = images()
    monkeypatch.setitem(sys.modules, "pyautoattack", types.SimpleNamespace(AutoAttack=Original))
    result = attacks.autoattack([network, other_network], x, y, epsilon=EPSILON)
    expected = attacks.fgsm([network, other_network], x, y, epsilon=EPSILON)
    assert torch.equal(result.success, expected.success)
    assert bool((result.distance <= EPSILON).all())
    assert Original.instances[-1].settings == {"norm": "Linf", "version": "standard", "device": "cpu", "seed": 0}
    assert Original.instances[-1].fab.n_target_classes == C - 1
    with pytest.raises(ValueError, match="four classes or more"):
        attacks.autoattack(lambda x: network(x)[:, :3], x[y < 3], y[y < 3], epsilon=EPSILON)


def test_autoattack_says_what_it_needs(network, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyautoattack", None)
    with pytest.raises(ImportError, match="pip install pyautoattack"):
        attacks.autoattack(network, *images(4), epsilon=EPSILON)


@pytest.mark.parametrize(("norm", "words"), [("linf", "of every number of an input"), ("l2", "of a whole input")])
def test_the_page_explains_its_norm_and_its_columns_and_cuts_long_names(norm, words):
    def attack_with_a_name_that_leaves_no_room_for_bars(_, x, _y):
        return x

    x = torch.rand(1, 1, 4, 4)
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 4))
    own = [attack_with_a_name_that_leaves_no_room_for_bars]
    options = {"epsilon": 0.05, "norm": norm, "batch_size": 1, "attacks": own}
    result = ds.attacks.evaluate(network, (x, network(x).argmax(1)), "quick", **options)
    assert " of 1 example (" in result.sentence
    text = pages.html(robustness_page(result, "one example"))
    assert words in text
    assert "<b>attacked</b>: those that were still classified correctly before it" in text
    name = own[0].__name__
    assert f">{name[:25]}…</text>" in text
    assert f'<td class="long" data-label="attack">{name}</td>' in text
