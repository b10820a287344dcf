"""Models of transformers and peft as members: outputs, gradients and training equal those of separate modules."""

import copy
import logging
from functools import partial

import peft
import pytest
import torch
import transformers
from torch import nn

import dissensus as ds

M, B, T = 3, 4, 7
BACKENDS = ("loop", "streams", "vmap", "batched", "stacked", "auto")
pytestmark = pytest.mark.filterwarnings(
    "ignore:There is a performance drop",
    "ignore:`is_gradient_checkpointing` is deprecated",  # the latter by peft
)
SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}


def bert(**settings):
    config = transformers.BertConfig(vocab_size=50, max_position_embeddings=16, num_labels=3, **SMALL, **settings)
    return transformers.BertForSequenceClassification(config)


def gpt2(**settings):
    config = transformers.GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=2, n_head=2, **settings)
    return transformers.GPT2LMHeadModel(config)


def vit(**settings):
    config = transformers.ViTConfig(image_size=8, patch_size=4, num_channels=2, num_labels=3, **SMALL, **settings)
    return transformers.ViTForImageClassification(config)


def t5(**settings):
    config = transformers.T5Config(
        vocab_size=50, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, decoder_start_token_id=0, **settings
    )
    return transformers.T5ForConditionalGeneration(config)


def lora(**settings):
    """A frozen BERT with trainable adapters and a trainable head."""
    config = peft.LoraConfig(r=2, target_modules=["query", "value"], modules_to_save=["classifier"], lora_dropout=0.0)
    network = peft.get_peft_model(bert(**settings), config)
    for name, parameter in network.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)  # zeros would leave half of the adapters without gradients
    return network


def tokens():
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, 50, (B, T), generator=generator)
    mask = torch.ones(B, T, dtype=torch.int64)
    mask[0, 5:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def pixels():
    return {"pixel_values": torch.randn(B, 2, 8, 8, generator=torch.Generator().manual_seed(1))}


MODELS = {
    "bert": (bert, tokens, {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}),
    "eager_bert": (
        partial(bert, attn_implementation="eager"),
        tokens,
        {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    ),
    "gpt2": (gpt2, tokens, {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}),
    "vit": (vit, pixels, {}),
    "t5": (t5, lambda: {**tokens(), "decoder_input_ids": tokens()["input_ids"]}, {"dropout_rate": 0.0}),
    "lora": (lora, tokens, {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}),
}


def ensemble_of(name, backend, **settings):
    build, batch, without_dropout = MODELS[name]
    ens = ds.Ensemble(partial(build, **{**without_dropout, **settings}), M, seed=3, backend=backend, output="logits")
    return ens, batch()


@pytest.mark.slow(fast=["bert-*", "lora-vmap", "gpt2-vmap", "vit-vmap", "t5-loop"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", MODELS)
def test_outputs_and_gradients_are_those_of_separate_modules(name, backend):
    ens, batch = ensemble_of(name, backend)
    for training in (False, True):
        ens.train(training)
        alone = [ens.member(i) for i in range(M)]
        outputs = ens(**batch)
        separate = torch.stack([network(**batch).logits for network in alone])
        torch.testing.assert_close(outputs, separate, rtol=1e-4, atol=1e-5)
        ens.zero_grad()
        outputs.square().sum().backward()
        separate.square().sum().backward()
        stacked = {n: p.grad for n, p in ens.body.trainable().items()}
        for i, network in enumerate(alone):
            for key, parameter in network.named_parameters():
                if key in stacked and parameter.grad is not None:
                    torch.testing.assert_close(stacked[key][i], parameter.grad, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("backend", ["loop", "vmap"])
@pytest.mark.parametrize("name", ["bert", "lora"])
def test_training_equals_separate_trainings(name, backend):
    """Twenty steps in float64, as for every other network."""
    ens, batch = ensemble_of(name, backend)
    ens = ens.double()
    alone, labels = [ens.member(i) for i in range(M)], torch.tensor([0, 2, 1, 1])

    def steps(parameters, loss):
        optimiser = torch.optim.SGD([p for p in parameters if p.requires_grad], lr=0.05, momentum=0.9)
        for _ in range(20):
            optimiser.zero_grad()
            loss().backward()
            optimiser.step()

    steps(ens.parameters(), lambda: ds.objectives.independent(ens(**batch), labels, loss="cross_entropy").total)
    for network in alone:
        steps(network.parameters(), lambda n=network: nn.functional.cross_entropy(n(**batch).logits, labels))
    for i, network in enumerate(alone):
        for actual, expected in zip(ens.member(i).parameters(), network.parameters(), strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("name", ["bert", "eager_bert", "gpt2", "t5"])
def test_dropout_has_the_same_draws_in_every_backend(name, caplog):
    """Layers and attention; nothing is drawn from torch's global generator."""
    rates = dict.fromkeys(MODELS[name][2], 0.3)
    state = torch.get_rng_state()
    with caplog.at_level(logging.WARNING, "dissensus"):
        outputs = []
        for backend in ("loop", "vmap"):
            ens, batch = ensemble_of(name, backend, **rates)
            before = torch.get_rng_state()
            first, second = ens(**batch), ens(**batch)
            assert torch.equal(torch.get_rng_state(), before)
            assert not torch.allclose(first, second)
            outputs.append((first, second))
    assert not [record for record in caplog.records if "global generator" in record.getMessage()]
    assert torch.equal(torch.get_rng_state(), state)
    for first, second in zip(*outputs, strict=True):
        torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-5)


def test_a_model_output_without_a_choice_is_refused_with_the_fix():
    with pytest.raises(TypeError, match=r'SequenceClassifierOutput.*output="logits"'):
        ds.Ensemble(bert, 2)(**tokens())


def test_an_ensemble_of_transformers_is_copied_saved_and_taken_apart(tmp_path):
    ens, batch = ensemble_of("bert", "auto")
    ens.eval()
    expected = ens(**batch)
    torch.testing.assert_close(copy.deepcopy(ens)(**batch), expected)
    torch.testing.assert_close(ens.subset([2])(**batch)[0], expected[2], rtol=1e-4, atol=1e-5)
    ens.save(tmp_path / "ens")
    build = partial(bert, **MODELS["bert"][2])
    torch.testing.assert_close(
        ds.Ensemble.load(tmp_path / "ens", build).eval()(**batch), expected, rtol=1e-4, atol=1e-5
    )
    mixed = ds.Ensemble.from_modules([bert(), bert(hidden_act="relu")], output="logits").eval()
    torch.testing.assert_close(mixed(**batch)[1], mixed.member(1)(**batch).logits)


ADAPTED = {
    "bert": (["query", "value"], "classifier"),
    "vit": (["q_proj", "v_proj"], "classifier"),
    "gpt2": (["c_attn", "mlp.c_proj"], "ln_f"),
}


def without_zeros(adapted):
    """Adapters that differ from zero, so that all of them get gradients."""
    for name, parameter in adapted.named_parameters():
        if name.endswith(".up"):
            nn.init.normal_(parameter, std=0.1)
    return adapted


def pefts(base, member, targets, head):
    """The same member by peft."""
    config = peft.LoraConfig(
        r=2, lora_alpha=4, target_modules=targets, modules_to_save=[head], lora_dropout=0.0, fan_in_fan_out=False
    )
    theirs = peft.get_peft_model(copy.deepcopy(base), config)
    inside, copied = theirs.base_model.model, 0
    for name, layer in member.named_modules():
        if isinstance(layer, ds.adapters.LoraLinear):
            for part, own in (("lora_A", layer.down), ("lora_B", layer.up)):
                getattr(inside.get_submodule(name), part)["default"].weight.data.copy_(own.detach())
            copied += 1
    assert copied == len([name for name in dict(theirs.named_modules()) if name.endswith("lora_A")])
    return theirs.double()


@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False")
@pytest.mark.slow(fast=["*-vmap"])
@pytest.mark.parametrize("backend", ["loop", "vmap"])
@pytest.mark.parametrize("name", ADAPTED)
def test_adapters_train_as_those_of_peft(name, backend):
    """Twenty steps of members on one frozen network, beside networks of peft with the same adapters."""
    build, batch, without_dropout = MODELS[name]
    targets, head = ADAPTED[name]
    torch.manual_seed(0)
    base, inputs = build(**without_dropout).double(), batch()
    if "pixel_values" in inputs:
        inputs = {"pixel_values": inputs["pixel_values"].double()}

    def adapted():
        return without_zeros(ds.adapters.lora(base, 2, targets, alpha=4, trained=f"*{head}.*"))

    ens = ds.Ensemble(adapted, M, shared="frozen", output="logits", backend=backend)
    theirs = [pefts(base, ens.member(i), targets, head) for i in range(M)]
    logits = ens(**inputs)
    torch.testing.assert_close(logits, torch.stack([network(**inputs).logits for network in theirs]))
    independent = partial(ds.objectives.independent, loss="cross_entropy")
    labels = torch.randint(logits.shape[-1], logits.shape[1:-1], generator=torch.Generator().manual_seed(2))
    ds.fit(
        ens,
        (inputs, labels),
        independent,
        epochs=20,
        batch_size=B,
        lr=0.05,
        optimizer="sgd",
        momentum=0.9,
        class_axis=-1 if labels.ndim == 2 else 2,
    )
    for network in theirs:
        optimiser = torch.optim.SGD([p for p in network.parameters() if p.requires_grad], lr=0.05, momentum=0.9)
        for _ in range(20):
            optimiser.zero_grad()
            nn.functional.cross_entropy(network(**inputs).logits.flatten(0, -2), labels.flatten()).backward()
            optimiser.step()
    after = torch.stack([network(**inputs).logits for network in theirs])
    torch.testing.assert_close(ens(**inputs), after, rtol=1e-8, atol=1e-9)
    assert not torch.allclose(after, logits, atol=1e-3)
    merged, unloaded = ds.adapters.merge(ens.member(0)), theirs[0].merge_and_unload()
    assert type(merged) is type(base)
    torch.testing.assert_close(merged(**inputs).logits, unloaded(**inputs).logits)


@pytest.mark.parametrize("make", [ds.adapters.lora, ds.adapters.batch_ensemble])
def test_layers_of_gpt2_are_adapted_though_their_weights_are_transposed(make):
    base = gpt2(**MODELS["gpt2"][2])
    adapted, inputs = make(base), tokens()
    for name, parameter in adapted.named_parameters():
        if name.endswith((".up", ".scale_in", ".scale_out")):
            nn.init.normal_(parameter, 1.0, 0.3)
    kinds = ("LoraTransposed", "LoraLinear", "ScaledLinear")
    changed = [name for name, layer in adapted.named_modules() if type(layer).__name__ in kinds]
    assert len(changed) == 2 * 4 + 1, "four layers of each block, and the last one"
    merged = ds.adapters.merge(adapted)
    torch.testing.assert_close(merged(**inputs).logits, adapted(**inputs).logits, rtol=1e-4, atol=1e-4)
    assert "Conv1D" not in {type(layer).__name__ for layer in make(base).modules()} or make is ds.adapters.lora
    with pytest.raises(ValueError, match="`targets` must name linear layers.*'c_atn'. Did you mean 'c_attn'"):
        make(base, targets=["c_atn"])
