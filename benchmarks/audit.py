"""Time and peak memory of an audit of outputs on disk: a memory-mapped array that is read once, in slices.

Usage: python benchmarks/audit.py [--json FILE] [--sizes 20x100000x100 5x1000000x1000] [--folder DIR] [--distinct K]

With ``--distinct K`` only K members are written, and each is read as often as it takes to have M: what is read and
computed is the same, and fifty members of 10⁶ × 1,000 logits fit on a disk that has no room for 93 GiB. Where there is
a GPU, large audits are computed on it; CUDA_VISIBLE_DEVICES= keeps them on the host.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from provenance import command_line, library

import dissensus as ds


def write_outputs(folder: Path, members: int, examples: int, classes: int) -> None:
    """Half-precision logits of members that are somewhat right, a file each."""
    rng = np.random.default_rng(0)
    labels = rng.integers(classes, size=examples)
    np.save(folder / "targets.npy", labels)
    step = max(1, 2**24 // classes)
    for member in range(members):
        held = np.lib.format.open_memmap(folder / f"member-{member}.npy", "w+", np.float16, (examples, classes))
        for start in range(0, examples, step):
            rows = slice(start, min(start + step, examples))
            part = rng.standard_normal((rows.stop - rows.start, classes), dtype=np.float32)
            part[np.arange(len(part)), labels[rows]] += 4.0
            held[rows] = part
        held.flush()


def audited(folder: Path, members: int) -> dict[str, Any]:
    """One audit, in a process of its own so that its memory is its own."""
    before, peak, over = held_mib(), [0.0], threading.Event()

    def watch() -> None:
        while not over.wait(0.05):
            peak.append(held_mib())

    watching = threading.Thread(target=watch, daemon=True)
    watching.start()
    files = sorted(folder.glob("member-*.npy"))
    outputs = [np.load(files[i % len(files)], mmap_mode="r") for i in range(members)]
    started = time.perf_counter()
    result = ds.audit(outputs, np.load(folder / "targets.npy"), task="classification", kind="logits")
    seconds = time.perf_counter() - started
    over.set()
    watching.join()
    on = torch.cuda.get_device_name() if torch.cuda.is_initialized() else f"{torch.get_num_threads()} threads"
    return {"seconds": seconds, "on": on, "peak_mib": max(peak), "before_mib": before, "verdict": result.verdict}


def held_mib() -> float:
    """Memory that the process holds, without pages of mapped files, which the system takes back as it likes."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) / 2**10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--sizes", nargs="*", default=["20x100000x100", "5x1000000x1000"])
    parser.add_argument("--folder", type=Path, help="where outputs are written for the while")
    parser.add_argument("--distinct", type=int, help="members that are written; the others are these again")
    parser.add_argument("--members", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        print(json.dumps(audited(options.one, options.members)))
        return
    rows = []
    for size in options.sizes:
        members, examples, classes = map(int, size.split("x"))
        with tempfile.TemporaryDirectory(dir=options.folder) as name:
            distinct = min(members, options.distinct or members)
            write_outputs(Path(name), distinct, examples, classes)
            command = [sys.executable, __file__, "--one", name, "--members", str(members)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
        rows.append(
            {
                "members": members,
                "distinct": distinct,
                "examples": examples,
                "classes": classes,
                "gib_read": members * examples * classes * 2 / 2**30,
                **json.loads(done.stdout),
            }
        )
        print(rows[-1], flush=True)
    made = {
        "command": command_line(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "torch": torch.__version__,
        **library(),
    }
    if options.json:
        options.json.write_text(json.dumps({"made": made, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
