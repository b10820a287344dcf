"""The house: imports point one way, and the front door is light."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import dissensus

SOURCE = Path(dissensus.__file__).parent
FLOORS = [
    "startup",
    "axes",
    "checks",
    "calls",
    "arrays",
    "batch",
    "dense",
    "arguments",
    "randomness",
    "fingerprint",
    "storage",
    "output_files",
    "training_rows",
    "pooling",
    "losses",
    "output_kinds",
    "diversity",
    "regression_scores",
    "scores",
    "metrics",
    "objectives",
    "adapters",
    "nets",
    "architecture",
    "dropout",
    "execution",
    "masks",
    "pages",
    "auditing",
    "ensemble",
    "trunk",
    "export",
    "data",
    "attacks",
    "train",
    "conformal",
    "predictive",
    "reporting",
    "sklearn",
    "studies",
    "cli",
    "__main__",
]
"""Each room may use rooms before it in this list, and its own."""
CORE = {"torch", "numpy", "safetensors", "jaxtyping"}


def imports_of(path):
    """Every name a file imports, wherever in the file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are written in full"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def room_of(name):
    parts = name.split(".")
    return parts[1] if parts[0] == "dissensus" and len(parts) > 1 and parts[1] in FLOORS else None


def test_imports_point_one_way_between_rooms():
    for path in SOURCE.rglob("*.py"):
        relative = path.relative_to(SOURCE)
        if relative.parts == ("__init__.py",):
            continue
        room = relative.parts[0].removesuffix(".py")
        assert room in FLOORS, f"{relative} is a room without a floor: add it to FLOORS"
        for name in imports_of(path):
            imported_room = room_of(name)
            assert imported_room is None or FLOORS.index(imported_room) <= FLOORS.index(room), (
                f"{relative} imports {name} from above"
            )


def test_only_the_command_line_prints():
    for path in SOURCE.rglob("*.py"):
        calls = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call)]
        printing = [c for c in calls if isinstance(c.func, ast.Name) and c.func.id == "print"]
        assert not printing or path.relative_to(SOURCE).parts[0] == "cli", f"{path.relative_to(SOURCE)} prints"


def test_import_needs_the_core_dependencies_only():
    script = """
import json, sys
import torch, numpy, safetensors.torch
before = set(sys.modules)
import dissensus
print(json.dumps(sorted({name.split(".")[0] for name in set(sys.modules) - before})))
"""
    loaded = set(json.loads(subprocess.check_output([sys.executable, "-c", script], text=True)))
    allowed = CORE | {"dissensus", "wadler_lindig"} | set(sys.stdlib_module_names)  # wadler_lindig: jaxtyping's own
    assert loaded <= allowed, f"import dissensus also loads {sorted(loaded - allowed)}"


def test_no_module_imports_itself_in_a_circle():
    names = {
        path: ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")
        for path in SOURCE.rglob("*.py")
    }
    doors = {
        name: {n.removeprefix("dissensus.") for n in imports_of(path) if n.startswith("dissensus.")}
        & set(names.values()) - {name}
        for path, name in names.items()
    }
    remaining = dict(doors)
    while remaining:
        free = [name for name, imports in remaining.items() if not imports & set(remaining)]
        assert free, f"these import each other in a circle: {sorted(remaining)}"
        for name in free:
            del remaining[name]
