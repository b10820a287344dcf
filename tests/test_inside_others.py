"""An ensemble as part of another library's module: Lightning, skorch, and stand-ins that do what these do."""

import copy
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dissensus as ds

PAGE = (Path(__file__).parents[1] / "docs" / "models.md").read_text()
M = 3


def documented(library):
    """The names that the page's block about a library defines."""
    (block,) = [
        b
        for b in re.findall(r"```py\n(.*?)```", PAGE, flags=re.DOTALL)
        if f"import {library}" in b or f"from {library} " in b
    ]
    names = {"torch": torch, "nn": nn, "ds": ds}
    exec(compile(block, f"docs/models.md, {library}", "exec"), names)
    return names


def problem():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(32, 6, generator=generator), torch.randint(0, 3, (32,), generator=generator)


def trained_alone(ens, x, y, epochs):
    modules = [ens.member(i).train() for i in range(len(ens))]
    for module in modules:
        optimiser = torch.optim.Adam(module.parameters(), lr=1e-2)
        for _ in range(epochs):
            for rows in torch.arange(len(x)).split(8):
                optimiser.zero_grad()
                nn.functional.cross_entropy(module(x[rows]), y[rows]).backward()
                optimiser.step()
    return torch.stack([module.eval()(x) for module in modules])


class Holder(nn.Module):
    """What a LightningModule does with its submodules."""

    def __init__(self):
        super().__init__()
        self.ens = ds.Ensemble(lambda: ds.nets.mlp(6, 3, (16,), dropout=0.2), M)
        self.temperature = nn.Parameter(torch.ones(()), requires_grad=False)

    def training_step(self, batch):
        x, y = batch
        return ds.objectives.independent(self.ens(x) / self.temperature, y, loss="cross_entropy").total


def test_a_module_that_holds_an_ensemble_trains_it_as_separate_modules():
    x, y = problem()
    holder = copy.deepcopy(Holder()).to(torch.float64).to(torch.float32).train()
    expected = trained_alone(holder.ens, x, y, epochs=2)
    assert {name.split(".")[0] for name, _ in holder.named_parameters()} == {"ens", "temperature"}
    optimiser = torch.optim.Adam([p for p in holder.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(2):
        for batch in DataLoader(TensorDataset(x, y), 8):
            optimiser.zero_grad()
            holder.training_step(batch).backward()
            optimiser.step()
    torch.testing.assert_close(holder.eval().ens(x), expected, rtol=1e-4, atol=1e-5)
    other = Holder().eval()
    other.load_state_dict(holder.state_dict())
    torch.testing.assert_close(other.ens(x), expected, rtol=1e-4, atol=1e-5)
    assert not holder.ens.training
    assert not other.ens.body.network.training


@pytest.mark.filterwarnings("ignore")  # Lightning gives advice by warnings
def test_lightning_trains_saves_and_loads_an_ensemble(tmp_path):
    lightning = pytest.importorskip("lightning")
    x, y = problem()
    module = documented("lightning")["LitEnsemble"](members=M)
    expected = trained_alone(module.ens, x, y, epochs=2)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    trainer = lightning.Trainer(max_epochs=2, default_root_dir=tmp_path, **quiet)
    trainer.fit(module, DataLoader(TensorDataset(x, y), 8))
    torch.testing.assert_close(module.eval().ens(x), expected, rtol=1e-4, atol=1e-5)
    trainer.save_checkpoint(tmp_path / "it.ckpt")
    again = type(module).load_from_checkpoint(tmp_path / "it.ckpt", members=M)
    torch.testing.assert_close(again.eval().ens(x), expected, rtol=1e-4, atol=1e-5)
    predicted = torch.cat(trainer.predict(module, DataLoader(TensorDataset(x, y), 8)))
    torch.testing.assert_close(predicted, expected.softmax(-1).mean(0), rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore")
def test_skorch_fits_clones_and_searches_an_ensemble():
    pytest.importorskip("skorch")
    from sklearn.base import clone
    from sklearn.model_selection import GridSearchCV

    net = documented("skorch")["net"]
    settings = {"max_epochs": 2, "batch_size": 8, "iterator_train__shuffle": False, "train_split": None, "lr": 1e-2}
    net = clone(net.set_params(optimizer=torch.optim.Adam, **settings))
    assert net.get_params()["module__members"] == M
    x, y = problem()
    net.initialize()
    expected = trained_alone(net.module_.ens, x, y, epochs=2)
    net.partial_fit(x.numpy(), y.numpy())
    torch.testing.assert_close(net.module_.eval().ens(x), expected, rtol=1e-4, atol=1e-5)
    probabilities = torch.from_numpy(net.predict_proba(x.numpy()))
    torch.testing.assert_close(probabilities, expected.softmax(-1).mean(0), rtol=1e-4, atol=1e-5)
    search = GridSearchCV(net, {"module__members": [1, 2]}, cv=2).fit(x.numpy(), y.numpy())
    assert len(search.best_estimator_.module_.ens) == search.best_params_["module__members"]
