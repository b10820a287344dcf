"""Attacks against other libraries, whose results are kept as golden tensors.

foolbox: FGSM, BIM, PGD, C&W, EAD; torchattacks: MIM, JSMA; pyautoattack: APGD, Square. ``oracles/attacks_*.py``
made the tensors; ``golden/attacks.json`` says with which settings.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from dissensus import attacks

GOLDEN = Path(__file__).parent / "golden"
TENSORS = load_file(GOLDEN / "attacks.safetensors")
ENTRIES = json.loads((GOLDEN / "attacks.json").read_text())["entries"]
X, Y = TENSORS["x"], TENSORS["labels"]
DETERMINISTIC = {"rtol": 0.0, "atol": 1e-5}


def network(name):
    net = nn.Sequential(nn.Conv2d(3, 6, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(96, 5))
    with torch.no_grad():
        for layer, index in (("conv", 0), ("linear", 3)):
            net[index].weight.copy_(TENSORS[f"{name}.{layer}.weight"])
            net[index].bias.copy_(TENSORS[f"{name}.{layer}.bias"])
    return net.eval()


def case(key):
    """Settings, model and options of an entry."""
    entry = ENTRIES[key]
    model = [network("net"), network("net2")] if entry["model"] == "ensemble" else network("net")
    return entry["parameters"], model, {"target": TENSORS["targets"] if entry["targeted"] else None}


def entries(*kinds):
    return [key for key in ENTRIES if any(key.startswith(kind) for kind in kinds)]


@pytest.mark.parametrize("key", entries("foolbox.fgsm", "foolbox.bim", "foolbox.pgd", "torchattacks.mifgsm"))
def test_gradient_steps_lead_where_theirs_lead(key):
    settings, model, options = case(key)
    norm, epsilon = ENTRIES[key]["norm"].lower(), ENTRIES[key]["eps"]
    momentum = "decay" in settings
    length = settings["alpha"] if momentum else settings["abs_stepsize"] or settings["rel_stepsize"] * epsilon
    options |= {"epsilon": epsilon, "norm": norm, "steps": settings["steps"], "step_size": length}
    decay = {"decay": settings["decay"]} if momentum else {}
    result = attacks.perturbed(model, X, Y, random_start=False, **options, **decay)
    torch.testing.assert_close(result, TENSORS[key], **DETERMINISTIC)
    attack = attacks.mim if momentum else attacks.bim
    adversarial = attack(model, X, Y, stop=False, **options, **decay)
    assert torch.equal(adversarial.success, TENSORS[f"{key}.success"])
    torch.testing.assert_close(
        adversarial.inputs[adversarial.success], TENSORS[key][adversarial.success], **DETERMINISTIC
    )
    if "fgsm" in key and not momentum:
        single = attacks.fgsm(model, X, Y, epsilon=epsilon, norm=norm, target=options["target"])
        assert torch.equal(single.inputs, adversarial.inputs)
    assert (attack(model, X, Y, **options, **decay).success >= adversarial.success).all(), "stopping is never weaker"


@pytest.mark.slow(
    cases=[
        "foolbox.cw.search-5.ensemble",
        "foolbox.cw.search-5.confidence",
        "foolbox.cw.search-5.targeted",
        "foolbox.cw.search-5.weak",
    ]
)
@pytest.mark.parametrize("key", entries("foolbox.cw"))
def test_carlini_wagner_finds_what_foolbox_finds(key):
    """Foolbox loses its last update: its n steps are our n − 1. Its tanh space is no wider than the box."""
    settings, model, options = case(key)
    options |= {"confidence": settings["confidence"], "constant": settings["initial_const"]}
    options |= {"search_steps": settings["binary_search_steps"], "step_size": settings["stepsize"]}
    result = attacks.carlini_wagner(
        model, X, Y, steps=settings["steps"] - 1, abort_early=False, widening=0.0, **options
    )
    expected = TENSORS[f"{key}.found"]
    assert torch.equal(result.success, expected)
    torch.testing.assert_close(result.inputs[expected], TENSORS[key][expected], **DETERMINISTIC)
    assert torch.equal(result.inputs[~expected], X[~expected]), "failures are clean, not black"


@pytest.mark.parametrize("key", entries("foolbox.ead"))
def test_elastic_net_finds_what_foolbox_finds(key):
    settings, model, options = case(key)
    options |= {"confidence": settings["confidence"], "constant": settings["initial_const"]}
    options |= {"search_steps": settings["binary_search_steps"], "step_size": settings["initial_stepsize"]}
    options |= {"rule": settings["decision_rule"], "l1_weight": settings["regularization"]}
    result = attacks.elastic_net(model, X, Y, steps=settings["steps"], abort_early=False, **options)
    expected = TENSORS[f"{key}.found"]
    assert torch.equal(result.success, expected)
    # Foolbox in float32 differs that much from foolbox in float64.
    rounding = max(DETERMINISTIC["atol"], ENTRIES[key]["largest_difference_to_float64"])
    torch.testing.assert_close(result.inputs[expected], TENSORS[key][expected], rtol=0.0, atol=rounding)


@pytest.mark.parametrize("key", entries("torchattacks.jsma"))
def test_saliency_maps_lead_where_those_of_torchattacks_lead(key):
    """torchattacks rounds its number of steps up: the same number of steps is a larger share of features."""
    settings, model, options = case(key)
    share = 2 * settings["most_iterations"] / X[0].numel()
    result = attacks.jsma(model, X, Y, step_size=settings["theta"], distortion=share, **options)
    expected = TENSORS[f"{key}.success"]
    assert torch.equal(result.success, expected)
    torch.testing.assert_close(result.inputs[expected], TENSORS[key][expected], **DETERMINISTIC)


@pytest.mark.parametrize("key", entries("pyautoattack.apgd"))
def test_auto_pgd_breaks_what_the_authors_code_breaks(key):
    settings, model, options = case(key)
    loss = "targeted_dlr" if "n_target_classes" in settings else settings["loss"]
    result = attacks.apgd(
        model,
        X,
        Y,
        epsilon=ENTRIES[key]["eps"],
        steps=settings["n_iter"],
        loss=loss,
        classes=settings.get("n_target_classes", 9),
        **options,
    )
    assert torch.equal(result.success, TENSORS[f"{key}.success"])


@pytest.mark.slow
def test_square_breaks_as_much_as_the_authors_code():
    """Over twenty seeds each. Theirs never changes the last row and column, so ours may break some more."""
    key = "pyautoattack.square"
    settings, model, options = case(key)
    shares = [
        attacks.square(
            model,
            X,
            Y,
            epsilon=ENTRIES[key]["eps"],
            queries=settings["n_queries"] + 1,
            share=settings["p_init"],
            seed=seed,
            **options,
        )
        .success.double()
        .mean()
        for seed in range(20)
    ]
    expected = sum(ENTRIES[key]["seeds"]["success"]) / 20 / len(X)
    assert expected <= float(sum(shares)) / 20 <= expected + 0.25


def test_no_entry_is_left_out():
    kinds = ("fgsm", "bim", "pgd", "cw", "ead", "mifgsm", "jsma", "apgd", "square")
    assert {key.split(".")[1].split("-")[0] for key in ENTRIES} == set(kinds)
