"""The core install alone: every module is imported and every command works, or says which extra is missing.

Everything runs in one process of its own in which no package can be imported but the core, what the core needs, and the
command line's.
"""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch

import dissensus as ds
from dissensus.nets import cnn

HIDE = """
import importlib.metadata, re, sys

def canonical(name):
    return re.sub(r"[-_.]+", "-", name).lower()

def needed(names):
    found, left = set(), list(names)
    while left:
        name = canonical(left.pop())
        if name in found:
            continue
        try:
            wanted = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        found.add(name)
        left += [re.match(r"[\\w.-]+", line)[0] for line in wanted if "extra ==" not in line]
    return found

class Only:  # another finder, which finds nothing beyond some distributions and what these need
    def __init__(self, finder, kept):
        self.finder, kept = finder, {*needed(kept), "dissensus"}
        of = importlib.metadata.packages_distributions()
        self.hidden = {name for name, owners in of.items() if not {canonical(owner) for owner in owners} & kept}

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in self.hidden else self.finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self.finder, name)

def only(*kept):
    sys.meta_path[:] = [Only(finder, kept) for finder in sys.meta_path]

CORE = ["torch", "numpy", "safetensors", "jaxtyping"]
"""
RUN = """
import json, sys
from typer.testing import CliRunner
from dissensus.cli import app

told = {}
for words in json.loads(sys.argv[1]):
    result = CliRunner().invoke(app, words.split())
    broken = result.exception is not None and not isinstance(result.exception, SystemExit)
    told[words] = [result.exit_code, " ".join(result.stderr.split()), repr(result.exception) if broken else ""]
print(json.dumps(told))
"""
ROBUST = (
    "robust --ensemble ensemble --network cnn --option widths=[2,2] --option batch_norm=false --no-standardise "
    "--epsilon 0.1 --suite quick"
)
FEW = "--set grid={method=['single'],seed=[0]}"
COMMANDS = {
    "--version": "",
    "data list": "",
    "data get digits": "pip install 'dissensus[data]'",
    "data check": "",
    "study list": "",
    "study show collusion/figure-2": "",
    "study run collusion/figure-9 --scale smoke": "",
    "study run masksembles/figure-1 --scale smoke": "",
    f"study run masksembles/figure-2 --scale smoke {FEW}": "",
    "study run collusion/figure-2 --scale smoke --set data=['made-table']": "pip install 'dissensus[hpo]'",
    "study run collusion/table-1 --scale smoke": "pip install 'dissensus[data]'",
    (
        "study run audit/table-1 --scale smoke --set data=['made-table'] --set optimisation.epochs=1"
    ): "pip install 'dissensus[sklearn]'",
    "study list masksembles": "",
    "study report": "pip install 'dissensus[report]'",
    "audit in.npz --task classification --kind logits --json a.json": "",
    "audit in.npz --task classification --kind logits --page a.html": "pip install 'dissensus[report]'",
    "audit a.parquet b.parquet --targets y.npy --task classification --kind logits": "pip install pyarrow",
    "ood in.npz --outside far=in.npz --repeats 5 --json o.json": "",
    "ood in.npz --outside far=in.npz --repeats 5 --figure o.png": "pip install 'dissensus[report]'",
    "ood in.npz --outside far=in.npz --gallery o.png --pictures far=x.npy": "pip install 'dissensus[report]'",
    "report in.npz --kind logits": "pip install 'dissensus[report]'",
    f"{ROBUST} --data made-images --examples 4": "",
    f"{ROBUST} --data made-images --page r.html": "pip install 'dissensus[report]'",
    f"{ROBUST} --data digits": "pip install 'dissensus[data]'",
    "tune in.npz": "pip install 'dissensus[report]'",
    "convert ensemble converted": "",
    "masks --network resnet20": "",
    "masks --network resnet20 --figure m.png": "pip install 'dissensus[report]'",
    "demo --fast": "pip install 'dissensus[data]'",
}
"""Every command, and what it says where it cannot work."""


def python(script, *arguments, cwd):
    env = {**os.environ, "PYTHONPATH": str(Path(ds.__file__).parents[1]), "DISSENSUS_DATA": str(cwd / "data")}
    results_of_commands = {"cwd": cwd, "env": env, "capture_output": True, "text": True}
    return subprocess.run([sys.executable, "-c", script, *arguments], check=False, **results_of_commands)


@pytest.fixture(scope="module")
def results_of_commands(tmp_path_factory):
    folder = tmp_path_factory.mktemp("core")
    torch.manual_seed(0)
    np.savez(folder / "in.npz", outputs=torch.randn(3, 40, 4).numpy(), targets=torch.randint(4, (40,)).numpy())
    for name in ("a.parquet", "b.parquet", "y.npy"):
        (folder / name).write_bytes(b"PAR1")
    np.save(folder / "y.npy", np.zeros(40, int))
    ds.Ensemble(lambda: cnn(3, 10, 8, (2, 2), batch_norm=False), 2).save(folder / "ensemble")
    script = f"{HIDE}\nonly(*CORE, 'typer', 'rich')\n{RUN}"
    done = python(script, json.dumps(list(COMMANDS)), cwd=folder)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_works_or_names_the_extra(command, results_of_commands):
    code, output, broken = results_of_commands[command]
    assert not broken, broken
    assert COMMANDS[command] in output
    assert (code == 0) == (not COMMANDS[command]), output


def test_every_command_is_among_those_above():
    from typer.main import get_command

    from dissensus.cli import app

    def names(command, before=""):
        inner = getattr(command, "commands", None)
        return (
            [before]
            if inner is None
            else [n for key, subcommand in inner.items() for n in names(subcommand, f"{before} {key}")]
        )

    missing = [
        name for name in map(str.strip, names(get_command(app))) if not any(w.startswith(name) for w in COMMANDS)
    ]
    assert missing == []


@pytest.mark.slow
def test_every_module_can_be_imported(tmp_path):
    root = Path(ds.__file__).parent
    files = [file.relative_to(root.parent).with_suffix("").parts for file in root.rglob("*.py")]
    triton = {
        ("train", "triton_kernels"),
        ("objectives", "triton_pairs"),
        ("execution", "triton_layers"),
    }  # which torch brings where there is CUDA
    with_extras = ("cli", "__main__", "sklearn")  # each of which names its extra, see below
    names = [".".join(parts) for parts in files if parts[1] not in with_extras and parts[1:] not in triton]
    assert len(names) > 100
    script = HIDE + textwrap.dedent("""
        only(*CORE)
        import importlib
        for name in sys.argv[1:]:
            importlib.import_module(name)
    """)
    done = python(script, *(name.removesuffix(".__init__") for name in names), cwd=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_estimators_name_their_extra(tmp_path):
    done = python(f"{HIDE}\nonly(*CORE)\nimport dissensus.sklearn", cwd=tmp_path)
    assert done.returncode == 1
    assert "pip install 'dissensus[sklearn]'" in done.stderr.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_the_command_line_names_its_extra(missing, tmp_path):
    present = "rich" if missing == "typer" else "click"
    script = f"{HIDE}\nonly(*CORE, {present!r})\nimport runpy\n"
    done = python(script + "runpy.run_module('dissensus', run_name='__main__')", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.strip().count("\n") == 0, done.stderr
    assert "pip install 'dissensus[cli]'" in done.stderr


IMPORTS = """
import sys

heavy = "matplotlib scipy sklearn pandas sympy torch._dynamo torch._inductor torch.onnx torchvision networkx triton"

def refuse_heavy(when):
    loaded = set(heavy.split()) & set(sys.modules) - before
    assert not loaded, f"{when}: {sorted(loaded)}"

import torch
before = set(sys.modules)
import dissensus as ds
refuse_heavy("at the import")
from functools import partial
ensemble = ds.Ensemble(partial(ds.nets.cnn, 1, 3, 4), 2)
data = torch.randn(8, 1, 4, 4), torch.randint(3, (8,))
ds.fit(ensemble, data, partial(ds.objectives.independent, loss="cross_entropy"), epochs=1, batch_size=4)
ensemble.predict(data)
refuse_heavy("in a training")
"""


def test_neither_the_import_nor_a_small_training_loads_what_takes_long_to_import():
    """What torch itself imports does not count."""
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
