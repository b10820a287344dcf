"""Each attack of this library and of others, with equal settings, as functions without arguments.

Used by attacks.py and attacks_gpu.py. A library that is installed runs itself. Otherwise its loop runs as it is written
out in attack_loops.py, if it is there, and the result says so. torchattacks does not say which inputs it has broken, so
the pass that tells is added to its attacks. All others count it in any case.
"""

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import attack_loops as loops
import torch
from torch import Tensor, nn

from dissensus import attacks

WRITTEN_OUT = "written out"


class Settings(NamedTuple):
    """Settings of all attacks."""

    epsilon: float = 1 / 255
    """So small that few examples are broken: ours leave out those that are."""
    short: int = 10
    """Steps of BIM, PGD and MIM."""
    long: int = 50
    """Steps of C&W, EAD and APGD."""
    queries: int = 200
    """Queries of Square."""
    rate: float = 0.001
    """Step size of C&W: so small that torchattacks' does not end early."""

    @property
    def step_size(self) -> float:
        """Of BIM, PGD and MIM."""
        return self.epsilon / self.short

    def titles(self) -> dict[str, str]:
        """Names of attacks in tables."""
        titles = {"fgsm": "FGSM", "square": f"Square, {self.queries} queries"}
        titles |= {name: f"{name.upper()}, {self.short} steps" for name in ("bim", "pgd", "mim")}
        long = {"carlini_wagner": "C&W", "elastic_net": "EAD", "apgd": "APGD"}
        return titles | {name: f"{label}, {self.long} steps" for name, label in long.items()}


class Way(NamedTuple):
    """One way to run an attack."""

    run: Callable[[], Tensor]
    """Returns which inputs are broken."""
    how: str
    """Version of the library that runs, or that its loop is written out."""


def ours(name: str, model: Any, x: Tensor, y: Tensor, settings: Settings) -> Callable[[], Tensor]:
    """Our attack. All steps are taken."""
    search = {"steps": settings.long, "search_steps": 1, "constant": 1.0, "abort_early": False}
    steps = {"epsilon": settings.epsilon, "steps": settings.short, "step_size": settings.step_size, "stop": False}
    options: dict[str, dict[str, Any]] = {
        "fgsm": {"epsilon": settings.epsilon},
        "bim": steps,
        "pgd": steps,
        "mim": steps,
        "carlini_wagner": search | {"step_size": settings.rate},
        "elastic_net": search,
        "apgd": {"epsilon": settings.epsilon, "steps": settings.long},
        "square": {"epsilon": settings.epsilon, "queries": settings.queries},
    }
    attack = getattr(attacks, name)
    return lambda: attack(model, x, y, **options[name]).success


def peers(
    name: str, network: nn.Module, x: Tensor, y: Tensor, settings: Settings, written_out: bool = False
) -> dict[str, Way]:
    """The same attack of other libraries. ``written_out``: their loops, also where they are installed."""
    makers = {"foolbox": _foolbox, "torchattacks": _torchattacks, "pyautoattack": _pyautoattack}
    ways: dict[str, Way] = {}
    for library, maker in makers.items():
        if importlib.util.find_spec(library) and not written_out:
            call, how = maker(name, network, x, y, settings), importlib.metadata.version(library)
        else:
            call, how = _loop(library, name, network, x, y, settings), WRITTEN_OUT
        if call is not None:
            ways[library] = Way(call, how)
    return ways


@torch.no_grad()
def _misclassified(network: nn.Module, points: Tensor, y: Tensor) -> Tensor:
    return network(points).argmax(-1) != y


def _changed(points: Tensor, x: Tensor) -> Tensor:
    """Which inputs AutoAttack has broken: it returns the others as they were."""
    return (points != x).flatten(1).any(1)


def _loop(
    library: str, name: str, network: nn.Module, x: Tensor, y: Tensor, settings: Settings
) -> Callable[[], Tensor] | None:
    """The loop of a library, written out."""
    epsilon, short, step = settings.epsilon, settings.short, settings.step_size
    points: dict[tuple[str, str], Callable[[], Tensor]] = {
        ("torchattacks", "fgsm"): lambda: loops.fgsm(network, x, y, epsilon),
        ("torchattacks", "bim"): lambda: loops.bim(network, x, y, epsilon, short, step),
        ("torchattacks", "pgd"): lambda: loops.pgd(network, x, y, epsilon, short, step),
        ("torchattacks", "mim"): lambda: loops.mim(network, x, y, epsilon, short, step),
        ("torchattacks", "carlini_wagner"): lambda: loops.carlini_wagner(
            network, x, y, 1.0, settings.long, settings.rate
        ),
        ("foolbox", "elastic_net"): lambda: loops.elastic_net(network, x, y, 1.0, settings.long, 0.01),
        ("pyautoattack", "apgd"): lambda: loops.apgd(network, x, y, epsilon, settings.long),
        ("pyautoattack", "square"): lambda: loops.square(network, x, y, epsilon, settings.queries),
    }
    call = points.get((library, name))
    if call is None:
        return None
    if library == "pyautoattack":
        return lambda: _changed(call(), x)
    return lambda: _misclassified(network, call(), y)


def _foolbox(name: str, network: nn.Module, x: Tensor, y: Tensor, s: Settings) -> Callable[[], Tensor] | None:
    foolbox: Any = importlib.import_module("foolbox")
    fb, long = foolbox.attacks, {"abort_early": False, "initial_const": 1.0}
    made: dict[str, Callable[[], Any]] = {
        "fgsm": fb.LinfFastGradientAttack,
        "bim": lambda: fb.LinfBasicIterativeAttack(abs_stepsize=s.step_size, steps=s.short),
        "pgd": lambda: fb.LinfPGD(abs_stepsize=s.step_size, steps=s.short),
        "carlini_wagner": lambda: fb.L2CarliniWagnerAttack(1, s.long, stepsize=s.rate, **long),
        "elastic_net": lambda: fb.EADAttack(1, s.long, **long),
    }
    if name not in made:
        return None
    model = foolbox.PyTorchModel(network, bounds=(0, 1), device=x.device)
    criterion, attack = foolbox.criteria.Misclassification(y), made[name]()
    epsilon = None if name in ("carlini_wagner", "elastic_net") else s.epsilon
    return lambda: attack(model, x, criterion, epsilons=epsilon)[2]


def _torchattacks(name: str, network: nn.Module, x: Tensor, y: Tensor, s: Settings) -> Callable[[], Tensor] | None:
    ta: Any = importlib.import_module("torchattacks")
    steps = (s.epsilon, s.step_size, s.short)
    made: dict[str, Callable[[], Any]] = {
        "fgsm": lambda: ta.FGSM(network, s.epsilon),
        "bim": lambda: ta.BIM(network, *steps),
        "pgd": lambda: ta.PGD(network, *steps),
        "mim": lambda: ta.MIFGSM(network, *steps),
        "carlini_wagner": lambda: ta.CW(network, c=1.0, steps=s.long, lr=s.rate),
    }
    return (lambda: _misclassified(network, made[name]()(x, y), y)) if name in made else None


def _pyautoattack(name: str, network: nn.Module, x: Tensor, y: Tensor, s: Settings) -> Callable[[], Tensor] | None:
    common = {"norm": "Linf", "n_restarts": 1, "eps": s.epsilon, "seed": 0, "device": x.device}
    if name == "apgd":
        base: Any = importlib.import_module("pyautoattack.autopgd_base")
        attack = base.APGDAttack(network, n_iter=s.long, loss="ce", **common)
    elif name == "square":
        base = importlib.import_module("pyautoattack.square")
        attack = base.SquareAttack(network, n_queries=s.queries, **common)
    else:
        return None
    return lambda: _changed(attack.perturb(x, y), x)
