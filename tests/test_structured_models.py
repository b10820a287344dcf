"""Networks with several, named and nested inputs, and with outputs of more than one tensor."""

from collections import OrderedDict, namedtuple
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

import dissensus as ds
from dissensus import calls
from dissensus.execution import BACKENDS

Pair = namedtuple("Pair", ["logits", "hidden"])


class TwoTowers(nn.Module):
    """Takes a dictionary, an optional list, and a mask by name; returns a dictionary."""

    def __init__(self):
        super().__init__()
        self.image, self.text = nn.Linear(3, 4), nn.Linear(2, 4)
        self.norm, self.dropout = nn.BatchNorm1d(4), nn.Dropout(0.3)

    def forward(self, batch, extra=None, *, mask=None, scale=1.0):
        hidden = scale * self.image(batch["image"])
        if extra is not None:
            hidden = hidden + self.text(extra[0])
        if mask is not None:
            hidden = hidden * mask
        return {"logits": self.dropout(self.norm(hidden)), "hidden": hidden}


def inputs(*lead):
    generator = torch.Generator().manual_seed(1)
    return (
        {"image": torch.randn(*lead, 3, generator=generator)},
        [torch.randn(*lead, 2, generator=generator)],
        torch.rand(*lead, 4, generator=generator),
    )


@pytest.mark.parametrize("backend", ["auto", *BACKENDS])
def test_every_backend_gives_what_separate_modules_give(backend):
    ens = ds.Ensemble(TwoTowers, members=3, backend=backend, output="logits").eval()
    batch, extra, mask = inputs(5)
    separate = [ens.member(i)(batch, extra, mask=mask, scale=2.0)["logits"] for i in range(3)]
    torch.testing.assert_close(ens(batch, extra, mask=mask, scale=2.0), torch.stack(separate))
    torch.testing.assert_close(ens(batch), torch.stack([ens.member(i)(batch)["logits"] for i in range(3)]))


@pytest.mark.parametrize("backend", BACKENDS)
def test_statistics_of_a_training_pass_are_those_of_separate_modules(backend):
    ens = ds.Ensemble(TwoTowers, members=2, backend=backend, output="logits")
    batch, extra, mask = inputs(6)
    alone = [ens.member(i) for i in range(2)]
    ens(batch, extra, mask=mask)
    for index, network in enumerate(alone):
        network(batch, extra, mask=mask)
        torch.testing.assert_close(ens.member(index).norm.running_mean, network.norm.running_mean)


@pytest.mark.parametrize("backend", BACKENDS)
def test_each_member_gets_its_own_batch_of_every_tensor(backend):
    ens = ds.Ensemble(TwoTowers, members=3, backend=backend, output="logits").eval()
    batch, extra, mask = inputs(3, 5)
    outputs = ens(batch, extra, mask=mask, per_member=True)
    for i in range(3):
        alone = ens.member(i)({"image": batch["image"][i]}, [extra[0][i]], mask=mask[i])["logits"]
        torch.testing.assert_close(outputs[i], alone)


def test_per_member_inputs_with_another_first_axis_are_refused():
    ens = ds.Ensemble(TwoTowers, members=3, output="logits")
    batch, _, _ = inputs(2, 5)
    with pytest.raises(ValueError, match=r"shape \[M=3, B, \.\.\.\] with per_member=True; got \[2, 5, 3\]"):
        ens(batch, per_member=True)


def test_a_network_that_writes_into_one_of_its_inputs_does_not_change_the_users():
    class Writing(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x, mask):
            return self.layer(x.mul_(mask))

    ens = ds.Ensemble(Writing, members=3, backend="loop")
    x, mask = torch.randn(4, 3), torch.rand(4, 1)
    before = x.clone()
    first, second = ens(x, mask), ens(x, mask)
    assert torch.equal(x, before)
    torch.testing.assert_close(first, second)


class Returning(nn.Module):
    def __init__(self, wrap):
        super().__init__()
        self.layer, self.wrap = nn.Linear(3, 2), wrap

    def forward(self, x):
        return self.wrap(self.layer(x), x)


@pytest.mark.parametrize(
    ("wrap", "output"),
    [
        (lambda logits, hidden: {"logits": logits, "hidden": hidden}, "logits"),
        (lambda logits, hidden: OrderedDict(loss=None, logits=logits, hidden=hidden), "logits"),
        (lambda logits, hidden: Pair(logits, hidden), "logits"),
        (lambda logits, hidden: (hidden, logits), 1),
        (lambda logits, hidden: [hidden, logits], -1),
        (lambda logits, hidden: (hidden, {"logits": logits}), lambda out: out[1]["logits"]),
    ],
)
def test_the_chosen_part_is_the_output(wrap, output):
    ens = ds.Ensemble(lambda: Returning(wrap), members=2, output=output)
    x = torch.randn(4, 3)
    torch.testing.assert_close(ens(x), torch.stack([ens.member(i).layer(x) for i in range(2)]))
    torch.testing.assert_close(ens.predict(x), ens(x).detach())
    assert ens.subset([1]).output == output
    torch.testing.assert_close(ens.subset([1])(x)[0], ens(x)[1])


def test_a_saved_ensemble_knows_its_output_or_is_told(tmp_path):
    def build():
        return Returning(lambda logits, hidden: {"logits": logits, "hidden": hidden})

    x = torch.randn(4, 3)
    for output in ("logits", lambda out: out["logits"]):
        ens = ds.Ensemble(build, members=2, output=output)
        ens.save(tmp_path / "ens")
        again = ds.Ensemble.load(tmp_path / "ens", build, **({} if output == "logits" else {"output": output}))
        torch.testing.assert_close(again(x), ens(x))
    with pytest.raises(TypeError, match="Say which part counts"):
        ds.Ensemble.load(tmp_path / "ens", build)(x)
    with pytest.raises(TypeError, match="`output` must be a name, a position or a function"):
        ds.Ensemble.load(tmp_path / "ens", build, output=2.5)


@pytest.mark.parametrize(
    ("wrap", "fix"),
    [
        (lambda logits, hidden: {"logits": logits, "hidden": hidden}, 'output="logits"'),
        (lambda logits, hidden: {"loss": None, "scores": logits}, 'output="scores"'),
        (lambda logits, hidden: (logits, hidden), "output=0"),
        (lambda logits, hidden: Pair(logits, hidden), 'output="logits"'),
    ],
)
def test_an_output_of_several_tensors_is_refused_with_the_fix(wrap, fix):
    with pytest.raises(TypeError, match="must return one tensor") as caught:
        ds.Ensemble(lambda: Returning(wrap), members=2)(torch.randn(4, 3))
    assert fix in str(caught.value)


def test_an_output_that_is_not_there_is_named():
    ens = ds.Ensemble(lambda: Returning(lambda logits, hidden: {"scores": logits}), members=2, output="logits")
    with pytest.raises(TypeError, match="no 'logits' in dict with 'scores'"):
        ens(torch.randn(4, 3))


@pytest.mark.parametrize("output", [3.5, True, nn.ReLU()])
def test_an_output_of_another_kind_is_refused(output):
    with pytest.raises(TypeError, match="`output` must be a name, a position or a function"):
        ds.Ensemble(lambda: nn.Linear(3, 2), members=2, output=output)


def test_members_of_different_architectures_choose_their_output_too():
    wrap = lambda logits, hidden: {"logits": logits}  # noqa: E731
    other = nn.Sequential(nn.Linear(3, 2), Returning(lambda logits, hidden: {"logits": hidden}))
    other[1].layer = nn.Linear(2, 2)
    ens = ds.Ensemble.from_modules([Returning(wrap), other], output="logits")
    assert ens(torch.randn(4, 3)).shape == (2, 4, 2)


def test_inputs_without_a_tensor_are_refused():
    with pytest.raises(TypeError, match="hold at least one tensor"):
        ds.Ensemble(lambda: nn.Linear(3, 2), members=2)(None)


def test_tensors_of_a_call_must_agree_on_the_number_of_examples():
    with pytest.raises(ValueError, match=r"same number of examples in every tensor.*\[4, 2\], \[3\]"):
        calls.examples(calls.call(torch.zeros(4, 2), mask=torch.zeros(3)))
    with pytest.raises(ValueError, match="batch as the first axis"):
        calls.examples(torch.tensor(1.0))


class Sequences(torch.utils.data.Dataset):
    """Sequences of several lengths."""

    def __len__(self):
        return 6

    def __getitem__(self, index):
        return torch.randn(3 + index % 2), index % 2


def test_examples_of_several_lengths_are_refused_with_the_way_to_pad_them():
    ens = ds.Ensemble(lambda: nn.Linear(3, 2), members=2)
    ragged = [[1.0, 2.0, 3.0], [1.0, 2.0]]
    tensors = [torch.tensor(row) for row in ragged]
    objective = partial(ds.objectives.independent, loss="cross_entropy")
    labels = torch.tensor([0, 1])
    for data in [(ragged, labels), (np.array(ragged, dtype=object), labels), (tensors, labels), Sequences()]:
        with pytest.raises((TypeError, ValueError), match=r"Pad them: torch.nn.utils.rnn.pad_sequence"):
            ds.fit(ens, data, objective, epochs=1, batch_size=2)
        with pytest.raises((TypeError, ValueError), match=r"Pad them: torch.nn.utils.rnn.pad_sequence"):
            ens.predict(data)
    validation = torch.utils.data.DataLoader(Sequences(), 2)
    with pytest.raises(ValueError, match=r"`validation` must give examples of one shape.*collate_fn"):
        ds.fit(ens, (torch.randn(4, 3), torch.zeros(4).long()), objective, epochs=1, validation=validation)
