"""A training step of M members beside other libraries at equal epochs, and detection beside OpenOOD.

Each way of training is the library itself, as its README says (its version is told), or its step written down from its
source ("reproduced"), where it is not installed. All ways have the same networks, batches of the same size and the same
optimiser; they take turns, in one process. Times are those of whole trainings, with all that happens before the first
step, over the number of steps.

- dissensus: `fit` with its defaults.
- loop by hand: modules and optimisers in a Python loop.
- torch.func by hand: ``stack_module_state``, ``functional_call`` under ``vmap``, one optimiser over stacked weights.
- torch-uncertainty, deep ensembles: ``deep_ensembles``; outputs of all members end to end, targets repeated, one
  optimiser. Its training loop is Lightning's, which is left out here, in its favour.
- torch-uncertainty, Packed-Ensembles: ``PackedLinear``, products of groups, α = M, γ = 1, so that members have the
  width of the others'; for networks of linear layers. Without Lightning as well.
- Ensemble-PyTorch: ``VotingRegressor`` or ``VotingClassifier``, members one after the other in every epoch.
- TabM: ``TabM.make(k=M)``, whose members share most weights: another method, for tables.

Cases: five MLPs on abalone (from DISSENSUS_DATA; without it on noise, and no error is told), three or 20 ResNet-20 and
five ResNet-18 on noise of CIFAR-10's shape. On a GPU, steps of the library are captured and all ways are in bf16 with
channels last for images; Ensemble-PyTorch has no mixed precision and runs in float32 with TF32.

Detection: five ResNet-20 score noise of CIFAR-10's shape, half of it "inside". OpenOOD's ``EnsemblePostprocessor`` and
``compute_all_metrics`` are called batch by batch as its evaluator does, which itself needs a GPU. Ours computes the
same score and metrics, and then all twelve scores with intervals.

The peers are in an environment of their own, installed without their dependencies, which would bring another PyTorch:
torchensemble, tabm, rtdl_num_embeddings, torch-uncertainty, einops, and OpenOOD from its repository with tqdm, pyyaml
and scikit-learn. Of torch-uncertainty and OpenOOD only the files that are timed are imported.

Usage: python benchmarks/peers.py [--json FILE] [--device cuda] [--only NAME] [--rounds 3] [--epochs 50]
       [--noise-epochs 2]
"""

import argparse
import contextlib
import copy
import importlib
import importlib.metadata
import io
import json
import math
import os
import platform
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from importlib.machinery import PathFinder
from pathlib import Path
from statistics import median
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from provenance import command_line, library
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import dissensus as ds
from dissensus.data import sources

LR = 1e-3


class Case(NamedTuple):
    """Members that train together, and their data."""

    name: str
    build: Callable[[], nn.Module]
    members: int
    batch: int
    x: Tensor
    y: Tensor
    test_x: Tensor | None = None
    test_y: Tensor | None = None
    scale: float = 1.0
    """Of targets, in which the error is told."""

    @property
    def classifies(self) -> bool:
        """Whether targets are labels."""
        return not self.y.is_floating_point()

    @property
    def images(self) -> bool:
        """Whether inputs are images."""
        return self.x.ndim == 4

    @property
    def batches(self) -> int:
        """Batches of an epoch."""
        return math.ceil(len(self.x) / self.batch)

    def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        """The loss of a member."""
        return F.cross_entropy(outputs.float(), y) if self.classifies else F.mse_loss(outputs.float(), y)


Trained = tuple[Callable[[], None], Callable[[Tensor], Tensor]]
"""A function that trains for one epoch, and one that gives the mean prediction."""


def precision(device: torch.device) -> Any:
    """bf16 on a GPU."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda")


def modules_of(case: Case, device: torch.device) -> list[nn.Module]:
    """New members."""
    modules = [case.build().to(device) for _ in range(case.members)]
    if device.type == "cuda" and case.images:
        modules = [module.to(memory_format=torch.channels_last) for module in modules]  # pyright: ignore[reportCallIssue]
    return modules


def batches_of(case: Case, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """An epoch from data on the device, in random order."""
    return [(case.x[rows], case.y[rows]) for rows in torch.randperm(len(case.x), device=device).split(case.batch)]


def mean_of(modules: list[nn.Module]) -> Callable[[Tensor], Tensor]:
    """The mean prediction of modules."""

    def predict(x: Tensor) -> Tensor:
        with torch.no_grad():
            return torch.stack([module.eval()(x) for module in modules]).mean(0)

    return predict


def loop_by_hand(case: Case, device: torch.device) -> Trained:
    """M modules, M optimisers."""
    modules = modules_of(case, device)
    optimisers = [torch.optim.AdamW(module.parameters(), lr=LR, weight_decay=0.0) for module in modules]

    def epoch() -> None:
        for x, y in batches_of(case, device):
            for module, optimiser in zip(modules, optimisers, strict=True):
                optimiser.zero_grad(set_to_none=True)
                with precision(device):
                    outputs = module(x)
                case.loss(outputs, y).backward()
                optimiser.step()

    return epoch, mean_of(modules)


def functions_by_hand(case: Case, device: torch.device) -> Trained:
    """As the tutorial on ensembles in PyTorch's documentation, with a training step."""
    modules = modules_of(case, device)
    params, buffers = torch.func.stack_module_state(modules)
    params = {name: tensor.detach().requires_grad_() for name, tensor in params.items()}
    base = copy.deepcopy(modules[0]).to("meta")
    optimiser = torch.optim.AdamW(params.values(), lr=LR, weight_decay=0.0)

    def outputs_of(own: dict[str, Tensor], state: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(base, (own, state), (x,))

    run = torch.func.vmap(outputs_of, in_dims=(0, 0, None), randomness="different")

    def epoch() -> None:
        base.train()
        for x, y in batches_of(case, device):
            optimiser.zero_grad(set_to_none=True)
            with precision(device):
                outputs = run(params, buffers, x)
            torch.stack([case.loss(output, y) for output in outputs]).sum().backward()
            optimiser.step()

    def predict(x: Tensor) -> Tensor:
        base.eval()
        with torch.no_grad():
            return run(params, buffers, x).mean(0)

    return epoch, predict


def imported(module: str) -> Any:
    """A module of a peer; None where the peer is not installed.

    The ``__init__`` files of its packages are not run: they import the whole peer, and what that needs.
    """
    names = module.split(".")
    spec = PathFinder.find_spec(names[0])
    if spec is None or not spec.submodule_search_locations:
        return None
    for depth in range(1, len(names)):
        folder = Path(spec.submodule_search_locations[0], *names[1:depth])
        package = ModuleType(".".join(names[:depth]))
        package.__path__ = [str(folder)]
        sys.modules.setdefault(package.__name__, package)
    return importlib.import_module(module)


class EndToEnd(nn.Module):
    """torch-uncertainty's `_DeepEnsembles`, where it is not installed."""

    def __init__(self, modules: list[nn.Module]) -> None:
        super().__init__()
        self.core_models = nn.ModuleList(modules)

    def forward(self, x: Tensor) -> Tensor:
        """Outputs of all members end to end."""
        return torch.cat([module(x) for module in self.core_models], dim=0)


def deep_ensembles(case: Case, device: torch.device) -> Trained:
    """torch-uncertainty's deep ensembles, and the step of its routines (``RepeatTarget``)."""
    modules = modules_of(case, device)
    package = imported("torch_uncertainty.methods.deep_ensembles")
    task = {"task": "classification"} if case.classifies else {"task": "regression", "probabilistic": False}
    network = EndToEnd(modules) if package is None else package.deep_ensembles(modules, **task)
    optimiser = torch.optim.AdamW(network.parameters(), lr=LR, weight_decay=0.0)

    def epoch() -> None:
        for x, y in batches_of(case, device):
            optimiser.zero_grad(set_to_none=True)
            with precision(device):
                outputs = network(x)
            # The mean over all members' outputs: Adam is nearly indifferent to the factor 1/M.
            case.loss(outputs, y.repeat(case.members, *[1] * (y.ndim - 1))).backward()
            optimiser.step()

    return epoch, mean_of(modules)


class PackedLinear(nn.Module):
    """torch-uncertainty's layer of that name with its defaults, where it is not installed: products of groups."""

    def __init__(self, inputs: int, outputs: int, members: int, *, first: bool) -> None:
        super().__init__()
        bound, groups = 1 / math.sqrt(inputs), 1 if first else members
        self.weight = nn.Parameter(torch.empty(groups, outputs * members // groups, inputs).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(members * outputs).uniform_(-bound, bound))

    def forward(self, x: Tensor) -> Tensor:
        """Outputs ``[B, M·out]``; the first layer sees the same inputs for all members."""
        groups, _, inputs = self.weight.shape
        products = torch.einsum("bgi,goi->bgo", x.unflatten(1, (groups, inputs)), self.weight)
        return products.flatten(1) + self.bias


def packed_layer(inputs: int, outputs: int, members: int, *, first: bool) -> nn.Module:
    """A layer of all members."""
    package = imported("torch_uncertainty.layers.packed")
    if package is None:
        return PackedLinear(inputs, outputs, members, first=first)
    return package.PackedLinear(inputs, outputs, alpha=members, num_estimators=members, first=first)


def packed(case: Case, device: torch.device) -> Trained:
    """Packed-Ensembles of a perceptron."""
    layers = [layer for layer in case.build().modules() if isinstance(layer, nn.Linear)]
    parts: list[nn.Module] = []
    for place, layer in enumerate(layers):
        parts += [packed_layer(layer.in_features, layer.out_features, case.members, first=place == 0), nn.ReLU()]
    network = nn.Sequential(*parts[:-1]).to(device)
    optimiser = torch.optim.AdamW(network.parameters(), lr=LR, weight_decay=0.0)

    def epoch() -> None:
        for x, y in batches_of(case, device):
            optimiser.zero_grad(set_to_none=True)
            with precision(device):
                outputs = network(x).unflatten(1, (case.members, -1)).transpose(0, 1).flatten(0, 1)
            case.loss(outputs, y.repeat(case.members, *[1] * (y.ndim - 1))).backward()
            optimiser.step()

    def predict(x: Tensor) -> Tensor:
        with torch.no_grad():
            return network(x).unflatten(1, (case.members, -1)).mean(1)

    return epoch, predict


def torchensemble(case: Case, device: torch.device) -> Trained:
    """Ensemble-PyTorch as in its README; without the package its step, of which a member takes an epoch at a time."""
    loader = DataLoader(TensorDataset(case.x.cpu(), case.y.cpu()), batch_size=case.batch, shuffle=True)
    package = imported("torchensemble")
    if package is not None:

        class Member(nn.Module):
            """The class that the package wants."""

            def __init__(self) -> None:
                super().__init__()
                self.network = case.build()

            def forward(self, x: Tensor) -> Tensor:
                """Outputs of one member."""
                return self.network(x)

        voting = package.VotingClassifier if case.classifies else package.VotingRegressor
        model = voting(estimator=Member, n_estimators=case.members, cuda=device.type == "cuda", n_jobs=None)
        model.set_criterion(nn.CrossEntropyLoss() if case.classifies else nn.MSELoss())
        model.set_optimizer("AdamW", lr=LR, weight_decay=0.0)

        def all_epochs(epochs: int) -> None:
            with contextlib.redirect_stdout(io.StringIO()):
                model.fit(loader, epochs=epochs, log_interval=10**9, save_model=False)

        def epoch() -> None:
            raise RuntimeError("its `fit` begins anew: it trains all epochs in one call")

        setattr(epoch, "whole", all_epochs)  # noqa: B010  # its training cannot go on
        return epoch, lambda x: torch.stack([m.eval()(x) for m in model.estimators_]).mean(0).detach()
    modules = [case.build().to(device) for _ in range(case.members)]
    optimisers = [torch.optim.AdamW(module.parameters(), lr=LR, weight_decay=0.0) for module in modules]

    def one_after_the_other() -> None:
        for module, optimiser in zip(modules, optimisers, strict=True):
            for batch in loader:
                x, y = (part.to(device) for part in batch)
                optimiser.zero_grad()
                case.loss(module(x), y).backward()
                optimiser.step()

    return one_after_the_other, mean_of(modules)


def tabm(case: Case, device: torch.device) -> Trained:
    """TabM's package as in its README."""
    package: Any = importlib.import_module("tabm")
    width = next(layer for layer in case.build().modules() if isinstance(layer, nn.Linear)).out_features
    outputs = case.y.shape[1]
    model = package.TabM.make(
        n_num_features=case.x.shape[1], d_out=outputs, k=case.members, n_blocks=2, d_block=width, dropout=0.0
    ).to(device)
    optimiser = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)

    def epoch() -> None:
        for x, y in batches_of(case, device):
            optimiser.zero_grad(set_to_none=True)
            with precision(device):
                predicted = model(x)  # [B, k, d_out]
            case.loss(predicted.flatten(0, 1), y.repeat_interleave(case.members, 0)).backward()
            optimiser.step()

    def predict(x: Tensor) -> Tensor:
        with torch.no_grad():
            return model(x).mean(1)

    return epoch, predict


def ours(case: Case, device: torch.device) -> Trained:
    """This library; all epochs in one call, since a call chooses how members run and captures steps."""
    ensemble = ds.Ensemble(case.build, case.members).to(device)
    loss = "cross_entropy" if case.classifies else "squared_error"
    objective = partial(ds.objectives.independent, loss=loss)

    def all_epochs(epochs: int) -> None:
        ds.fit(ensemble, (case.x, case.y), objective, epochs=epochs, batch_size=case.batch, lr=LR)

    def epoch() -> None:
        all_epochs(1)

    setattr(epoch, "whole", all_epochs)  # noqa: B010
    return epoch, lambda x: ensemble.predict(x).mean(0).to(x.device)


WAYS: dict[str, tuple[Callable[[Case, torch.device], Trained], str, str]] = {
    # the way, the package that it runs, and what it is without the package
    "dissensus": (ours, "", "this library"),
    "loop by hand": (loop_by_hand, "", "written by hand"),
    "torch.func by hand": (functions_by_hand, "", "written by hand"),
    "torch-uncertainty, deep ensembles": (deep_ensembles, "torch-uncertainty", "reproduced"),
    "torch-uncertainty, Packed-Ensembles": (packed, "torch-uncertainty", "reproduced"),
    "Ensemble-PyTorch": (torchensemble, "torchensemble", "reproduced"),
    "TabM": (tabm, "tabm", "left out"),
}


def abalone(device: torch.device) -> Case:
    """Four fifths of abalone, standardised, and the rest for testing; noise without a data folder."""
    build = partial(ds.nets.mlp, 8, 1, (64, 64))
    name = "abalone, MLP 8-64-64-1"
    try:
        columns, targets = sources.load("abalone")
        values = torch.as_tensor(columns, dtype=torch.float32)
        y = torch.as_tensor(targets, dtype=torch.float32).view(-1, 1)
    except Exception as reason:  # whatever keeps data away
        print(f"abalone: {reason}")
        generator = torch.Generator().manual_seed(0)
        x, y = torch.randn(3341, 8, generator=generator), torch.randn(3341, 1, generator=generator)
        return Case(f"noise, {name}", build, 5, 128, x.to(device), y.to(device))
    order = torch.randperm(len(values), generator=torch.Generator().manual_seed(0))
    train, test = order[: len(order) * 4 // 5], order[len(order) * 4 // 5 :]
    x = (values - values[train].mean(0)) / values[train].std(0)
    scale = float(y[train].std())
    y = (y - y[train].mean()) / scale
    build = partial(ds.nets.mlp, x.shape[1], 1, (64, 64))
    name = f"abalone, MLP {x.shape[1]}-64-64-1"
    x, y = x.to(device), y.to(device)
    return Case(name, build, 5, 128, x[train], y[train], x[test], y[test], scale)


def images(name: str, build: Callable[[], nn.Module], members: int, batch: int, *, device: torch.device) -> Case:
    """Noise of CIFAR-10's shape."""
    count = batch * 40
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, 3, 32, 32, generator=generator).to(device)
    return Case(name, build, members, batch, x, torch.randint(10, (count,), generator=generator).to(device))


def cases(device: torch.device) -> list[Case]:
    """What is measured on a device."""
    if device.type != "cuda":
        return [abalone(device), images("ResNet-20", ds.nets.resnet20, 3, 32, device=device)]
    large, small = (
        images("ResNet-18", ds.nets.resnet18, 5, 128, device=device),
        images("ResNet-20", ds.nets.resnet20, 20, 64, device=device),
    )
    return [abalone(device), large, small]


def synchronised(device: torch.device) -> float:
    """The time when the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def trained(way: Callable[[Case, torch.device], Trained], case: Case, device: torch.device, epochs: int) -> Any:
    """Seconds of a whole training, and the root mean squared error on test data, in units of the targets."""
    torch.manual_seed(0)
    epoch, predict = way(case, device)
    start = synchronised(device)
    whole = getattr(epoch, "whole", None)
    if whole is not None:
        whole(epochs)
    else:
        for _ in range(epochs):
            epoch()
    seconds = synchronised(device) - start
    if case.test_x is None or case.test_y is None:
        return seconds, None
    error = (predict(case.test_x).float() - case.test_y).square().mean().sqrt()
    return seconds, float(error) * case.scale


def version(package: str) -> str | None:
    """The version of a package that is installed."""
    try:
        return importlib.metadata.version(package) if package else None
    except importlib.metadata.PackageNotFoundError:
        return None


def first_line(reason: Exception) -> str:
    """An error in a line."""
    return (str(reason).splitlines() or [type(reason).__name__])[0]


def row_of(case: Case, device: torch.device, rounds: int, epochs: int) -> dict[str, Any]:
    """Seconds of all ways, which take turns."""
    taken: dict[str, list[float]] = {}
    told: dict[str, dict[str, Any]] = {}
    ways = {name: way for name, way in WAYS.items() if not case.images or name.split(", ")[-1] not in _OF_TABLES}
    for turn in range(rounds + 1):
        for name, (way, package, otherwise) in ways.items():
            if "refused" in told.get(name, {}):
                continue
            installed = version(package)
            how = f"{package} {installed}" if installed else otherwise
            try:
                seconds, error = trained(way, case, device, 1 if turn == 0 else epochs)
            except Exception as reason:  # foreign code may raise anything
                told[name] = {"how": how, "refused": first_line(reason)}
                print(f"    {name}: {told[name]}", flush=True)
                continue
            if turn:  # the first shows whether it runs, and warms up
                taken.setdefault(name, []).append(seconds)
                milliseconds = 1e3 * median(taken[name]) / (epochs * case.batches)
                told[name] = {"how": how, "seconds": median(taken[name]), "ms_per_step": milliseconds, "rmse": error}
    for name, numbers in told.items():
        print(f"    {name:38s} {numbers}", flush=True)
    return {"case": case.name, "members": case.members, "batch": case.batch, "epochs": epochs, "ways": told}


_OF_TABLES = ("Packed-Ensembles", "TabM")


def detected_by_openood(modules: list[nn.Module], batches: list[Tensor], labels: Tensor) -> Callable[[], float]:
    """A call that scores batches and rates the score as OpenOOD does, and returns the AUROC."""
    postprocessors = imported("openood.postprocessors.ensemble_postprocessor")
    metrics = imported("openood.evaluators.metrics")
    with tempfile.TemporaryDirectory() as folder:
        for number, module in enumerate(modules):
            (Path(folder) / f"{number}").mkdir()
            torch.save(module.state_dict(), Path(folder) / f"{number}" / "best.ckpt")
        arguments = {"network_name": "network", "checkpoint_root": folder, "num_networks": len(modules)}
        arguments["checkpoints"] = [f"{number}" for number in range(len(modules))]
        postprocessor = SimpleNamespace(postprocessor_args=SimpleNamespace(**arguments))
        config = SimpleNamespace(postprocessor=postprocessor, network=SimpleNamespace(name="network"))
        detector = postprocessors.EnsemblePostprocessor(config)
        detector.setup(modules[0], {}, {})

    def run() -> float:
        with torch.no_grad():
            results = [detector.postprocess(modules[0], batch) for batch in batches]
        predicted, confidence = (torch.cat(parts).cpu().numpy() for parts in zip(*results, strict=True))
        return float(metrics.compute_all_metrics(confidence, labels.numpy(), predicted)[1])

    return run


def detected_by_us(ensemble: ds.Ensemble, x: Tensor, batch: int, inside: int) -> Callable[[], float]:
    """The same score and metrics, the latter without intervals as OpenOOD's."""

    def run() -> float:
        outputs = ensemble.predict(x, batch_size=batch)
        score = 1 - ds.pooling.mean_score(outputs).exp().amax(-1)
        return ds.metrics.ood(score[:inside], score[inside:], repeats=0).auroc.value

    return run


def detected_by_all_scores(ensemble: ds.Ensemble, x: Tensor, batch: int, inside: int) -> Callable[[], float]:
    """All scores, with intervals; the AUROC of the one that is nearest to OpenOOD's."""

    def run() -> float:
        scores = ds.scores.table(ensemble.predict(x, batch_size=batch))
        return {name: ds.metrics.ood(s[:inside], s[inside:]) for name, s in scores.items()}["model_average"].auroc.value

    return run


def detection_row(device: torch.device, rounds: int, members: int = 5, batch: int = 200) -> dict[str, Any]:
    """Seconds to score images and to rate the score, by ways that take turns, and the AUROC that each finds."""
    inside = 500
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2 * inside, 3, 32, 32, generator=generator)
    x[inside:] *= 0.9
    labels = torch.cat([torch.randint(10, (inside,), generator=generator), torch.full((inside,), -1)])
    ensemble = ds.Ensemble(ds.nets.resnet20, members).to(device).eval()
    modules = [ensemble.member(m) for m in range(members)]
    x = x.to(device)
    runs: dict[str, Callable[[], float]] = {
        "dissensus, the same score": detected_by_us(ensemble, x, batch, inside),
        "dissensus, twelve scores with intervals": detected_by_all_scores(ensemble, x, batch, inside),
    }
    told: dict[str, dict[str, Any]] = {}
    try:
        runs = {"OpenOOD": detected_by_openood(modules, list(x.split(batch)), labels), **runs}
    except Exception as reason:  # foreign code may raise anything
        told["OpenOOD"] = {"how": version("openood") or "not installed", "refused": first_line(reason)}
    taken: dict[str, list[float]] = {}
    for turn in range(rounds + 1):
        for name, run in runs.items():
            start = synchronised(device)
            found = run()
            seconds = synchronised(device) - start
            if turn:  # the first warms up
                taken.setdefault(name, []).append(seconds)
            how = f"openood {version('openood')}" if name == "OpenOOD" else "this library"
            told[name] = {"how": how, "seconds": median(taken.get(name, [seconds])), "auroc": found}
    for name, numbers in told.items():
        print(f"    {name:38s} {numbers}", flush=True)
    return {"case": "ResNet-20, 32×32", "members": members, "examples": len(x), "batch": batch, "ways": told}


def main() -> None:
    """Measure all cases, and write as it goes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", default="")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=50, help="of trainings whose error is told")
    parser.add_argument("--noise-epochs", type=int, default=2, help="of trainings on noise, whose time alone counts")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    device = torch.device(options.device)
    machine = torch.cuda.get_device_name() if device.type == "cuda" else f"{platform.machine()}, {os.cpu_count()} cores"
    made = {
        "command": command_line(),
        "device": machine,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        **library(),
        "rounds": options.rounds,
    }
    print(", ".join(f"{key} {value}" for key, value in made.items()), flush=True)
    rows: list[dict[str, Any]] = []
    for case in cases(device):
        if options.only not in case.name:
            continue
        print(f"{case.name}, {case.members} members, batch {case.batch}", flush=True)
        epochs = options.epochs if case.test_x is not None else options.noise_epochs
        rows.append(row_of(case, device, options.rounds, epochs))
        if options.json:
            options.json.write_text(json.dumps({"made": made, "rows": rows}, indent=1) + "\n")
    if options.only in "detection":
        print("detection", flush=True)
        content = {"made": made, "rows": rows, "detection": detection_row(device, options.rounds)}
        if options.json:
            options.json.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
