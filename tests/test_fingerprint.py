"""Fingerprints: different where anything differs that decides a result, and the same in every process."""

import collections
import dataclasses
import functools
import logging
import os
import random
import subprocess
import sys
import threading
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import dissensus as ds
from dissensus import attacks
from dissensus.fingerprint import digest, fingerprint

STRENGTH = 0.01
OPTIONS = types.SimpleNamespace(strength=0.01)


def by_global(x):
    return STRENGTH * x


def by_namespace(x):
    return OPTIONS.strength * x


def through_another(x):
    return [by_global(each) for each in x]


def closing(strength):
    return lambda x: strength * x


def defaulting(strength):
    def function(x, by=strength):
        return by * x

    return function


class Callable:
    def __init__(self, strength):
        self.strength, self.lock = strength, threading.Lock()

    def __call__(self, x):
        return self.strength * x


class Slotted:
    __slots__ = ("strength",)

    def __init__(self, strength):
        self.strength = strength

    def scaled(self, x):
        return self.strength * x


@dataclasses.dataclass
class Config:
    strength: float
    steps: tuple = (1, 2)


def network(seed=0, **changes):
    torch.manual_seed(seed)
    found = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Dropout(changes.get("rate", 0.1)))
    found.do = changes.get("do", torch.tanh)
    found.eval()
    return found


def changed(change):
    found = network()
    with torch.no_grad():
        change(found)
    return found


def class_of(body):
    made = {}
    exec(f"class Net(nn.Module):\n def forward(self, x):\n  return {body}", {"nn": nn, "__name__": "user"}, made)
    return made["Net"]


def caught(value):
    """A function that holds itself."""

    def function(x):
        return function(x - value) if x > 0 else x

    return function


DIFFERENT = {
    "number": (0.01, 0.5),
    "type of number": (1, 1.0),
    "truth": (True, 1),
    "list": ([1, [2]], [1, [3]]),
    "sequence": ([1, 2], (1, 2)),
    "mapping": ({"a": 1}, {"a": 2}),
    "set": ({1, 2}, {1, 3}),
    "tensor": (torch.zeros(2), torch.ones(2)),
    "shape": (torch.zeros(2), torch.zeros(2, 1)),
    "dtype": (torch.zeros(2), torch.zeros(2, dtype=torch.float64)),
    "array": (np.zeros(2), np.ones(2)),
    "objects": (np.array([1, "a"], dtype=object), np.array([1, "b"], dtype=object)),
    "dataclass": (Config(0.1), Config(0.2)),
    "slots": (Slotted(0.1), Slotted(0.2)),
    "object": (Callable(0.1), Callable(0.2)),
    "bound method": (Slotted(0.1).scaled, Slotted(0.2).scaled),
    "closure": (closing(0.01), closing(0.5)),
    "whole number closed over": (closing(1), closing(2)),
    "closure over a list": (closing([1]), closing([2])),
    "default": (defaulting(0.01), defaulting(0.5)),
    "code": (lambda x: 0.01 * x, lambda x: 0.5 * x),
    "constant set": (lambda x: x in {1, 2}, lambda x: x in {1, 3}),
    "call": (lambda x: torch.sin(x), lambda x: torch.cos(x)),
    "inner function": (lambda x: [0.1 * e for e in x], lambda x: [0.2 * e for e in x]),
    "holds itself": (caught(1), caught(2)),
    "partial": (functools.partial(attacks.pgd, epsilon=0.01), functools.partial(attacks.pgd, epsilon=0.5)),
    "partial's function": (functools.partial(attacks.pgd, epsilon=0.1), functools.partial(attacks.bim, epsilon=0.1)),
    "nested partial": tuple(
        functools.partial(attacks.tried, craft=functools.partial(attacks.perturbed, epsilon=e), epsilon=1.0)
        for e in (0.01, 0.5)
    ),
    "partial of a closure": (functools.partial(closing(0.01), 1), functools.partial(closing(0.5), 1)),
    "builtin method": ([1].index, [2].index),
    "class": (class_of("x"), class_of("2 * x")),
    "generator": (torch.Generator().manual_seed(0), torch.Generator().manual_seed(1)),
    "random state": (random.Random(0), random.Random(1)),
    "weights": (network(0), network(1)),
    "buffer": (network(), changed(lambda n: n[1].running_mean.add_(1))),
    "buffer outside the state dict": tuple(
        changed(lambda n, v=v: n.register_buffer("key", torch.tensor(v), persistent=False)) for v in (1, 2)
    ),
    "setting": (network(), changed(lambda n: setattr(n[1], "eps", 1e-3))),
    "function in a network": (network(do=lambda z: z), network(do=lambda z: 100 * z)),
    "mode": (network(), changed(lambda n: n.train())),
    "mode of a layer": (network(), changed(lambda n: n[3].train())),
    "hook": (network(), changed(lambda n: n[0].register_forward_hook(lambda m, i, o: 2 * o))),
    "hook's code": tuple(
        changed(lambda n, f=f: n[0].register_forward_pre_hook(f)) for f in (lambda m, i: None, lambda m, i: (2 * i[0],))
    ),
    "forward": (class_of("x")(), class_of("2 * x")()),
    "networks": ([network(0), network(1)], [network(0), network(0)]),
    "ensemble": tuple(ds.Ensemble(lambda: nn.Linear(2, 2), members=2, seed=s) for s in (0, 1)),
    "mixed ensemble": tuple(
        ds.Ensemble.from_modules([nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2 * k), nn.Linear(2 * k, 2))])
        for k in (1, 2)
    ),
    "Monte Carlo's seed": tuple(ds.masks.MonteCarlo(network(), 3, seed=s) for s in (0, 1)),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_what_differs_is_told_apart(name):
    first, second = DIFFERENT[name]
    assert fingerprint(first) != fingerprint(second)
    assert fingerprint(first) == fingerprint(first)


SAME = {
    "closure": (closing(0.1), closing(0.1)),
    "order of settings": ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    "partial": tuple(functools.partial(attacks.pgd, epsilon=e, steps=3) for e in (0.1, 0.1)),
    "networks": (network(3), network(3)),
    "layout": (torch.rand(2, 3, 4, 4, generator=torch.Generator().manual_seed(0)),) * 2,
    "object with a lock": (Callable(0.1), Callable(0.1)),
    "logger": (lambda x: logging.getLogger("a").info(x),) * 2,
    "regular": (collections.OrderedDict(a=1), collections.OrderedDict(a=1)),
    "path": (Path("a"), Path("a")),
    "sharing": ([1.5, [2.5]], (lambda a: [a[0], [2.5]])([1.5])),
}


@pytest.mark.parametrize("name", SAME)
def test_what_is_alike_is_the_same(name):
    first, second = SAME[name]
    assert fingerprint(first) == fingerprint(second)


def test_globals_and_what_they_hold_count(monkeypatch):
    before = [fingerprint(function) for function in (by_global, by_namespace, through_another)]
    monkeypatch.setattr(sys.modules[__name__], "STRENGTH", 0.5)
    OPTIONS.strength = 0.5
    after = [fingerprint(function) for function in (by_global, by_namespace, through_another)]
    OPTIONS.strength = 0.01
    assert all(old != new for old, new in zip(before, after, strict=True))


def test_layout_and_device_do_not_count():
    x = torch.rand(2, 3, 4, 4)
    assert digest(x) == digest(x.to(memory_format=torch.channels_last)) == digest(x.transpose(2, 3).clone().mT)
    assert digest(torch.ones(())) != digest(torch.ones(1))
    assert len({digest(t) for t in (torch.zeros(0), torch.zeros(0, 2), torch.zeros(2, dtype=torch.complex64))}) == 3


def test_passes_do_not_change_what_a_network_is():
    for model in (
        network(),
        ds.Ensemble(lambda: nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.5)), members=2).eval(),
        ds.masks.MonteCarlo(network(), 3).eval(),
        torch.compile(network(), backend="eager"),
    ):
        before = fingerprint(model)
        model(torch.rand(5, 3))
        assert fingerprint(model) == before
    plain = network()
    assert fingerprint(torch.compile(plain, backend="eager")) != fingerprint(torch.compile(network(1), backend="eager"))


def test_what_cannot_be_looked_into_is_refused():
    with pytest.raises(TypeError, match="must be taken of things that can be looked into; got builtins.generator"):
        fingerprint(closing(i for i in range(3)))


PROGRAM = """
import functools, torch
from torch import nn
from dissensus import attacks
from dissensus.fingerprint import fingerprint

WORDS = {"one", "two", "three"}

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.words = nn.Linear(3, 2), {"x", "y", "z"}

    def forward(self, x):
        return self.layer(x) if x in {"a", "b", "c"} else WORDS

def attack(model, x, y, *, by=functools.partial(attacks.pgd, epsilon=0.1)):
    return by(model, x, y) if WORDS else None

torch.manual_seed(0)
print(fingerprint([Net(), attack, lambda x: x in WORDS, WORDS]))
"""


@pytest.mark.slow
def test_it_is_the_same_in_every_process():
    found = set()
    for seed in ("1", "2", "3"):
        own = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run([sys.executable, "-c", PROGRAM], env=own, capture_output=True, text=True, check=True)
        found.add(done.stdout)
    assert len(found) == 1


class Then(nn.Module):
    def __init__(self, network, do):
        super().__init__()
        self.network, self.do = network, do

    def forward(self, x):
        return self.do(self.network(x))


def test_members_with_other_functions_are_not_run_by_the_first_ones():
    """All lambdas have one name."""
    pair, x = [nn.Linear(2, 2), nn.Linear(2, 2)], torch.rand(3, 2)
    ens = ds.Ensemble.from_modules([Then(pair[0], lambda z: z), Then(pair[1], lambda z: 100 * z)])
    torch.testing.assert_close(ens(x), torch.stack([pair[0](x), 100 * pair[1](x)]))
