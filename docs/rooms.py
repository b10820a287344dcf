"""Draw the rooms of the package and the imports between them, as they are in the source.

Usage: python docs/rooms.py
"""

import ast
from pathlib import Path
from typing import Any

from pictures import as_file

from dissensus.pages import style

SOURCE = Path(__file__).parent.parent / "src" / "dissensus"
FLOORS = [
    ("the command line", ["cli"]),
    ("studies, reports, tables", ["studies", "reporting", "sklearn"]),
    ("training, attacks, predictions", ["train", "attacks", "predictive", "conformal"]),
    ("what is trained, and on what", ["export", "ensemble", "trunk", "data"]),
    ("verdicts and pages", ["auditing", "output_kinds", "pages"]),
    ("how members run", ["masks", "execution", "dropout", "architecture", "nets", "adapters"]),
    ("pure functions of outputs", ["objectives", "metrics", "scores", "diversity", "losses", "pooling"]),
    ("what functions take", ["calls", "arrays", "batch", "dense", "arguments"]),
    ("the ground", ["startup", "axes", "checks", "randomness", "fingerprint", "storage", "training_rows"]),
]
"""From the top to the ground. Imports go down, or along a floor; ``tests/test_house.py`` has the full order."""


def imports(room: str) -> set[str]:
    """The other rooms that the files of a room import."""
    folder = SOURCE / room
    files = folder.rglob("*.py") if folder.is_dir() else [folder.with_suffix(".py")]
    names: set[str] = set()
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
            elif isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
    parts = [name.split(".") for name in names if name.startswith("dissensus.")]
    return {part[1] for part in parts} - {room}


def lines(room: str) -> int:
    """Lines of a room's files that are not empty."""
    folder = SOURCE / room
    files = folder.rglob("*.py") if folder.is_dir() else [folder.with_suffix(".py")]
    return sum(1 for file in files for text in file.read_text().splitlines() if text.strip())


@style.figure_style()
def draw() -> Any:
    """The picture."""
    figure = style.blank_figure(11, 8.2)
    axes = figure.subplots()
    places: dict[str, tuple[float, float]] = {}
    for floor, (_, rooms) in enumerate(reversed(FLOORS)):
        for i, room in enumerate(rooms):
            places[room] = ((i + 0.5) * 10 / len(rooms) + 0.12 * (-1) ** floor, floor)
    for room, (x, y) in places.items():
        for other in imports(room) & set(places) - set(FLOORS[-1][1]):  # every room uses the ground
            to_x, to_y = places[other]
            bend = {"connectionstyle": "arc3,rad=0.25"} if to_y == y else {}
            axes.annotate(
                "",
                xy=(to_x, to_y + (0.21 if to_y < y else 0)),
                xytext=(x, y - (0.21 if to_y < y else 0)),
                arrowprops={"arrowstyle": "-|>", "color": "#0f766e", "alpha": 0.28, "lw": 0.9, **bend},
                zorder=1,
            )
    for room, (x, y) in places.items():
        box = {"boxstyle": "round,pad=0.45", "fc": "#ecfdf5", "ec": "#0f766e", "lw": 1.2}
        axes.text(
            x,
            y,
            f"{room}\n{lines(room):,} lines",
            ha="center",
            va="center",
            fontsize=10.5,
            bbox=box,
            zorder=3,
            color=style.DARK_INK,
        )
    for floor, (title, _) in enumerate(reversed(FLOORS)):
        axes.text(-3.3, floor, title, va="center", fontsize=10.5, alpha=0.8, style="italic")
        axes.axhline(floor - 0.5, color="#cbd5e1", lw=0.6, zorder=0)
    axes.set_xlim(-3.4, 10.3)
    axes.set_ylim(-0.55, len(FLOORS) - 0.45)
    axes.axis("off")
    return figure


if __name__ == "__main__":
    description = "Rooms of the package on their floors, and the imports between them"
    (Path(__file__).parent / "assets" / "rooms.svg").write_bytes(as_file([draw()], description))
