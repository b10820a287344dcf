"""Fingerprints: different where anything differs that decides a result, and the same in every process."""

import abc
import collections
import copy
import dataclasses
import enum
import functools
import importlib
import json
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
from dissensus.fingerprint import array_digest, differing, digest, fingerprint, fingerprints

STRENGTH = 0.01
OPTIONS = types.SimpleNamespace(strength=0.01)


def by_global(x):
    return STRENGTH * x


def by_namespace(x):
    return OPTIONS.strength * x


def through_another(x):
    return [by_global(row) for row in x]


def closing(strength):
    return lambda x: strength * x


def defaulting(strength):
    def function(x, factor_by_default=strength):
        return factor_by_default * x

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
    layers = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Dropout(changes.get("rate", 0.1)))
    layers.do = changes.get("do", torch.tanh)
    return layers.eval()


def changed(change):
    result = network()
    with torch.no_grad():
        change(result)
    return result


def class_of(body, name="Net"):
    namespace = {}
    exec(
        f"class {name}(nn.Module):\n def forward(self, x):\n  return {body}", {"nn": nn, "__name__": "user"}, namespace
    )
    return namespace[name]


def sequential(*names):
    """The same layers under the same names, in this order."""
    torch.manual_seed(0)
    layers = {"a": nn.Linear(2, 2), "b": nn.Tanh()}
    return nn.Sequential(collections.OrderedDict((name, layers[name]) for name in names))


def with_attribute(value):
    def function(x):
        return x

    function.value = value
    return function


def documented(text):
    namespace = {}
    exec(f"def function(x):\n    {text!r}\n    # {text}\n    return [x]", {"__name__": "user"}, namespace)
    return namespace["function"]


class Setting(enum.Enum):
    FEW = 1
    MANY = 2


class Powered:
    """An objective whose setting is a whole number."""

    def __init__(self, power, **options):
        self.power = power
        vars(self).update(options)

    def __call__(self, outputs, targets):
        return outputs**self.power


def caught(value):
    """A function that holds itself."""

    def function(x):
        return function(x - value) if x > 0 else x

    return function


def of_installed_module(code):
    function = eval(code)
    function.__module__ = "dissensus.losses"
    return function


def user_module(factor, **variables):
    """A module that is not installed."""
    module = types.ModuleType("users_module")
    vars(module).update(factor=factor, **variables)
    return module


def through_module(module):
    return lambda x: module.factor * x


def through_package(package):
    return lambda x: package.factor.factor * x


def in_module(kind, module):
    kind.__module__ = module
    return kind


def wrapped(code, wrapped_function=ds.objectives.independent):
    """A user's function with the name of a function of the library."""
    return functools.wraps(wrapped_function)(eval(code, {"__name__": "user", "torch": torch}))


def with_inner_lambda(module):
    return lambda values: [(lambda value: module.factor * value)(value) for value in values]


class Fitted:
    """Attributes as scikit-learn names them."""

    def __init__(self, mean):
        self.mean_ = mean


def reading(holder):
    return lambda x: x - holder.mean_


def shifting(tensor):
    return lambda x: tensor.add(x)


def sorting(tensor):
    return lambda x: x * tensor.sort().values[0]


def copying(tensor):
    return lambda x: x * tensor.clone().mul_(2)


def through_function_named(name):
    """A function of a user's module with the name of a method that changes a container."""
    return lambda factor: eval(f"lambda x: module.{name}(x)", {"module": user_module(0, **{name: closing(factor)})})


DIFFERENT = {
    "wrapped function": (wrapped("lambda o, t: 2 * o"), wrapped("lambda o, t: 3 * o")),
    "wrapped function of torch": tuple(wrapped(f"lambda x: {by} * torch.silu(x)", nn.functional.silu) for by in (2, 3)),
    "decorated function": tuple(torch.no_grad()(closing(factor)) for factor in (1, 2)),
    "module in an inner lambda": tuple(with_inner_lambda(user_module(factor)) for factor in (2, 3)),
    "module in a partial": tuple(functools.partial(max, key=user_module(factor)) for factor in (2, 3)),
    "module in a dict": tuple({"module": user_module(factor)} for factor in (2, 3)),
    "module of a class": tuple(type("A", (), {"module": user_module(factor)}) for factor in (2, 3)),
    "attribute that ends with an underscore": tuple(reading(Fitted(mean)) for mean in (1.0, 2.0)),
    "tensor with a method named like a container's": tuple(shifting(torch.tensor(value)) for value in (1.0, 2.0)),
    "tensor that is sorted": tuple(sorting(torch.tensor([3.0, value])) for value in (1.0, 2.0)),
    "tensor whose copy is changed": tuple(copying(torch.tensor(value)) for value in (1.0, 2.0)),
    "function named like a container's method": tuple(through_function_named("update")(factor) for factor in (1, 2)),
    "number": (0.01, 0.5),
    "type of number": (1, 1.0),
    "truth": (True, 1),
    "sign of zero": (0.0, -0.0),
    "word": ("1", 1),
    "bytes": (b"1", "1"),
    "number of NumPy": (np.float64(0.1), np.float64(0.2)),
    "enumeration": (Setting.FEW, Setting.MANY),
    "depth": ([1, [2]], [[1], 2]),
    "order of a list": ([1, 2], [2, 1]),
    "order of an OrderedDict": (collections.OrderedDict(a=1, b=2), collections.OrderedDict(b=2, a=1)),
    "order of functions": ({"a": torch.sin, "b": torch.exp}, {"b": torch.exp, "a": torch.sin}),
    "key": ({"a": 1}, {"b": 1}),
    "keys and values": ({"a": "b"}, {"b": "a"}),
    "default factory": (collections.defaultdict(int), collections.defaultdict(list)),
    "whole number in an object": (Powered(2), Powered(3)),
    "list in an object": (Powered([1]), Powered([2])),
    "tensor in an object": (Powered(torch.zeros(2)), Powered(torch.ones(2))),
    "attribute's name": (Powered(2, a=1), Powered(2, b=1)),
    "method of an object": (Powered(2).__call__, Powered(3).__call__),
    "attribute of a function": (with_attribute(1), with_attribute(2)),
    "parameter's name": (lambda outputs, *, alpha: outputs, lambda outputs, *, beta: outputs),
    "kind of a parameter": (lambda outputs, factor=1: outputs, lambda outputs, *, factor=1: outputs),
    "class name": (class_of("x"), class_of("x", "Other")),
    "metaclass": (type("A", (), {}), abc.ABCMeta("A", (), {})),
    "base of a class": tuple(type("Derived", (class_of(code),), {}) for code in ("x", "2 * x")),
    "attribute of a class": tuple(type("A", (), {"depth": depth}) for depth in (1, 2)),
    "tensor of a class": tuple(type("A", (), {"scale": torch.tensor(scale)}) for scale in (1, 2)),
    "activation of a network": (class_of("torch.relu(x)")(), class_of("torch.tanh(x)")()),
    "lambda of an installed module": tuple(of_installed_module(code) for code in ("lambda x: x", "lambda x: 2 * x")),
    "tensor closed over": (closing(torch.tensor(1)), closing(torch.tensor(2))),
    "tensor as a default": (defaulting(torch.tensor(1)), defaulting(torch.tensor(2))),
    "tensor as an attribute": (with_attribute(torch.tensor(1)), with_attribute(torch.tensor(2))),
    "module closed over": tuple(through_module(user_module(factor)) for factor in (2, 3)),
    "module in a module": tuple(through_package(user_module(user_module(factor))) for factor in (2, 3)),
    "class name of a network": (class_of("x")(), class_of("x", "Other")()),
    "order of layers": (sequential("a", "b"), sequential("b", "a")),
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
    "generator of NumPy": (np.random.default_rng(0), np.random.default_rng(1)),
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
def test_different_objects_have_different_fingerprints(name):
    first, second = DIFFERENT[name]
    assert fingerprint(first) != fingerprint(second)
    assert fingerprint(first) == fingerprint(first)


IMAGES = torch.rand(2, 3, 4, 4, generator=torch.Generator().manual_seed(0))
SAME = {
    "number": (0.1, 0.1),
    "closure": (closing(0.1), closing(0.1)),
    "order of settings": ({"a": 1, "b": [2]}, {"b": [2], "a": 1}),
    "order of settings by number": ({1: "a", 2: "b"}, {2: "b", 1: "a"}),
    "order of keywords": (
        functools.partial(attacks.pgd, epsilon=0.1, steps=3),
        functools.partial(attacks.pgd, steps=3, epsilon=0.1),
    ),
    "order of attributes": (Powered(2, a=torch.sin, b=torch.exp), Powered(2, b=torch.exp, a=torch.sin)),
    "networks": (network(3), network(3)),
    "layout": (IMAGES, IMAGES.to(memory_format=torch.channels_last)),
    "strides": (IMAGES, IMAGES.mT.contiguous().mT),
    "view of more": (IMAGES, torch.cat([IMAGES, IMAGES])[2:]),
    "gradient": (IMAGES, IMAGES.clone().requires_grad_()),
    "layout of an array": (np.arange(6).reshape(2, 3), np.asfortranarray(np.arange(6).reshape(2, 3))),
    "object with a lock": (Callable(0.1), Callable(0.1)),
    "logger": (closing(logging.getLogger("a")), closing(logging.getLogger("a"))),
    "path": (Path("a"), Path("a")),
    "sharing": ([1.5, [2.5]], (lambda a: [a[0], [2.5]])([1.5])),
    "name of a function": (eval("lambda x: x"), eval("lambda x: x", {"__name__": "elsewhere"})),
    "docstring and comment": (documented("one"), documented("another")),
    "class made again": (class_of("x"), class_of("x")),
    "class of another module": (class_of("x"), in_module(class_of("x"), "elsewhere")),
    "variable of a module that is not used": (
        through_module(user_module(2)),
        through_module(user_module(2, unused=torch.ones(1))),
    ),
    "function of another file and line": (
        eval(compile("lambda x: 2 * x", "a.py", "eval")),
        eval(compile("\n\n\nlambda x: 2 * x", "b.py", "eval").replace(co_firstlineno=9)),
    ),
    **{
        f"copy of {name}": (value, copy.deepcopy(value))
        for name, value in {
            "object": Powered(2, log=[1, {"a": torch.ones(2)}]),
            "dataclass": Config(0.1),
            "slots": Slotted(0.1),
            "partial": functools.partial(closing(0.1), Config(0.2)),
            "network": network(),
            "ensemble": ds.Ensemble(lambda: nn.Linear(2, 2), members=2),
            "method": Slotted(0.1).scaled,
            "generator": random.Random(3),
        }.items()
    },
}


@pytest.mark.parametrize("name", SAME)
def test_equal_objects_have_equal_fingerprints(name):
    first, second = SAME[name]
    assert fingerprint(first) == fingerprint(second)


def test_networks_compiled_twice_are_the_same():
    first, second = (torch.compile(network(3), backend="eager") for _ in range(2))
    assert fingerprint(first) == fingerprint(second)


def test_globals_and_what_they_hold_count(monkeypatch):
    before = [fingerprint(function) for function in (by_global, by_namespace, through_another)]
    monkeypatch.setattr(sys.modules[__name__], "STRENGTH", 0.5)
    OPTIONS.strength = 0.5
    after = [fingerprint(function) for function in (by_global, by_namespace, through_another)]
    OPTIONS.strength = 0.01
    assert all(old != new for old, new in zip(before, after, strict=True))


def counting(start, factor):
    calls = start

    def function(x):
        nonlocal calls
        calls += 1
        return factor * x

    return function


def listing(entries, factor):
    def function(x):
        entries.append(x)
        return factor * x

    return function


def indexing(entries, factor):
    def function(x):
        entries["calls"][0] += 1
        return factor * x

    return function


def through_default(entries, factor):
    def function(x, calls=entries, factor_by_default=factor):
        calls.append(x)
        return factor_by_default * x

    return function


class Counter:
    """Counts its calls, in a method, in a list and in a tensor."""

    def __init__(self, calls, factor):
        self.calls, self.factor, self.log, self.mean = calls, factor, [calls], torch.tensor(float(calls))

    def count(self):
        self.calls += 1

    def __call__(self, x):
        self.count()
        self.log[0] = x
        self.mean.mul_(0.9).add_(0.1 * x)
        return self.factor * x

    def loss(self, x):
        self.calls = self.calls + 1
        return self.factor * x

    def set_factor(self, factor):
        self.factor = factor


class CountingNetwork(nn.Module):
    def __init__(self, calls, factor):
        super().__init__()
        self.factor = factor
        self.register_buffer("calls", torch.tensor(calls))

    def forward(self, x):
        self.calls += 1
        return self.factor * x


def loss_of(calls, factor):
    counter = Counter(0, factor)
    counter.calls = calls
    return counter.loss


COUNTING = {
    "nonlocal": counting,
    "list in a closure": lambda calls, factor: listing([0] * calls, factor),
    "dict in a closure": lambda calls, factor: indexing({"calls": [calls]}, factor),
    "default": lambda calls, factor: through_default([0] * calls, factor),
    "attributes": Counter,
    "bound method": loss_of,
    "buffer": CountingNetwork,
    "partial": lambda calls, factor: functools.partial(counting(calls, factor), 1),
    "nested": lambda calls, factor: closing(Counter(calls, factor)),
}


@pytest.mark.parametrize("name", COUNTING)
def test_values_that_calls_change_count(name):
    """A setting beside a counter is never hidden by it, and where a counter begins is a setting."""
    make = COUNTING[name]
    for options in ({}, {"skip_counters": True}):
        assert fingerprint(make(1, 2), **options) == fingerprint(make(1, 2), **options)
        assert fingerprint(make(1, 2), **options) != fingerprint(make(5, 2), **options), "a counter"
        assert fingerprint(make(1, 2), **options) != fingerprint(make(1, 3), **options), "a setting"


def test_differences_are_named_by_setting():
    settings = {"lr": 0.1, "objective": closing(2), "grid": {"a": [1]}}
    stored = json.loads(json.dumps(fingerprints(settings)))
    assert differing(stored, fingerprints(settings)) == []
    changed_settings = {"lr": 0.2, "objective": closing(3), "grid": {"a": [1]}, "seed": None}
    assert differing(stored, fingerprints(changed_settings)) == ["lr", "objective", "seed"]
    assert differing("damaged", fingerprints({"lr": 0.1})) == ["lr"]


class Counted(nn.Module):
    """Counts its objects and its calls in the class."""

    objects = calls = uses = 0
    depth = 1

    def __init__(self):
        super().__init__()
        Counted.objects += 1

    def forward(self, x):
        type(self).calls += 1
        self.__class__.uses = self.calls
        return x

    @classmethod
    def configure(cls, depth):
        cls.depth = depth


def test_a_class_may_count_its_objects(monkeypatch):
    for name, value in {"objects": 0, "depth": 1, "calls": 0, "uses": 0}.items():
        monkeypatch.setattr(Counted, name, value)
    without_counters = functools.partial(fingerprint, skip_counters=True)
    before = without_counters(Counted)
    Counted()(torch.ones(1))
    assert Counted.objects == Counted.calls == Counted.uses == 1
    assert without_counters(Counted) == before != fingerprint(Counted)
    Counted.configure(2)
    assert without_counters(Counted) != before, "a setting that another method assigns"


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_script_counts_by_its_graph_and_not_by_its_lines(tmp_path, monkeypatch):
    source = "import torch\nclass Net(torch.nn.Module):\n    def forward(self, x):\n        return {} * x\n"
    monkeypatch.syspath_prepend(tmp_path)
    prints = []
    for index, (padding, factor) in enumerate((("", 2), ("\n\n\n", 2), ("", 3))):
        (tmp_path / f"script{index}.py").write_text(padding + source.format(factor))
        module = importlib.import_module(f"script{index}")
        prints.append(fingerprint(torch.jit.trace(module.Net(), torch.ones(1))))
    assert prints[0] == prints[1] != prints[2]


def test_opaque_objects_may_be_identified_by_type():
    types_met = []
    opaque = functools.partial(fingerprint, opaque=types_met)
    assert opaque(closing(i for i in range(3))) == opaque(closing(i for i in range(4)))
    assert opaque(closing(i for i in range(3))) != opaque(closing(open))
    assert types_met == ["builtins.generator"] * 3


def test_a_module_that_is_imported_again_is_the_same(tmp_path, monkeypatch):
    (tmp_path / "imported_again.py").write_text("FACTOR = 2\ndef scaled(x):\n    return FACTOR * x\n")
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("imported_again")
    before = fingerprint(module.scaled)
    assert fingerprint(importlib.reload(module).scaled) == before
    module.FACTOR = 3
    assert fingerprint(module.scaled) != before


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_device_does_not_count():
    assert fingerprint(IMAGES.cuda()) == fingerprint(IMAGES)
    assert fingerprint(network().cuda()) == fingerprint(network())


def test_the_number_of_a_card_does_not_count():  # each of several processes has its own
    for kind in (str, torch.device):
        first, second, host = (fingerprint(closing(kind(name))) for name in ("cuda:0", "cuda:1", "cpu"))
        assert first == second != host


def test_shape_and_dtype_of_a_tensor_count_and_layout_does_not():
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
    model_without_pass = network()
    assert fingerprint(torch.compile(model_without_pass, backend="eager")) != fingerprint(
        torch.compile(network(1), backend="eager")
    )


def test_opaque_objects_are_refused():
    with pytest.raises(TypeError, match="must be taken of things that can be inspected; got builtins.generator"):
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
def test_fingerprints_are_equal_in_every_process():
    printed = set()
    for seed in ("1", "2", "3"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True
        )
        printed.add(done.stdout)
    assert len(printed) == 1


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


class EveryAttribute:
    """An object such as ``unittest.mock.Mock`` or ``pytest.mark``, which has any attribute that it is asked for."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        raise RuntimeError(f"asked for {name}")


def test_an_object_is_not_asked_for_attributes_that_its_class_does_not_have():
    assert fingerprint(EveryAttribute()) == fingerprint(EveryAttribute())


def test_the_digest_of_an_array_does_not_depend_on_its_layout():
    array = np.arange(24.0).reshape(4, 6)
    turned = array.T
    assert array_digest(turned) == array_digest(np.ascontiguousarray(turned))
    assert array_digest(array[::2]) == array_digest(array[::2].copy())
    assert array_digest(turned) != array_digest(array)
