"""All commands of `benchmarks/chaos.py`."""

from collections.abc import Callable, Iterable

from attempts import disk, gpu, identity, kills, mistakes, paths, tamper, writers
from attempts.cases import Case, Settings

COMMANDS: dict[str, Callable[[Settings], Iterable[Case]]] = {
    "kills": kills.kills,
    "kills-sweep": kills.kills_sweep,
    "kills-study": kills.kills_study,
    "loads": kills.loads,
    "leftovers": kills.leftovers,
    "writers": writers.writers,
    "tamper": tamper.tamper,
    "disk": disk.disk,
    "identity": identity.identity,
    "specs": mistakes.specs,
    "sets": mistakes.sets,
    "commands": mistakes.commands,
    "paths": paths.paths,
    "gpu-memory": gpu.gpu_memory,
    "gpu-error": gpu.gpu_error,
    "gpu-two": gpu.gpu_two,
}
"""Commands by name: each lists its cases."""
GPU_COMMANDS = ("gpu-memory", "gpu-error", "gpu-two")
"""Commands that need a GPU."""
