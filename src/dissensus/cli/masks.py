"""``dissensus masks``: what an ensemble from one network costs."""

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.markup import escape

from dissensus.cli.screen import FIGURES, check_drawn, console, fail, keep, table


def masks(
    network: Annotated[str, typer.Option(help="A network of the studies, such as resnet18.")] = "resnet18",
    count: Annotated[int, typer.Option(help="N, the number of masks.")] = 4,
    budget: Annotated[
        list[float] | None, typer.Option(help="Times the single network's cost; may be repeated.")
    ] = None,
    cost: Annotated[Literal["parameters", "multiply_adds"], typer.Option(help="What is counted.")] = "parameters",
    size: Annotated[int, typer.Option(min=1, help="Height and width of the pictures.")] = 32,
    figure: Annotated[Path | None, typer.Option(help="Write a figure: .png, .pdf or .svg.")] = None,
) -> None:
    """Which masks fit a budget: M and S, and how much members then have in common."""
    import torch

    from dissensus import masks as of
    from dissensus.studies.datasets import StudyData
    from dissensus.studies.registry import NETWORKS, maker

    budgets = budget or [1.0, 2.0]
    if network not in NETWORKS:
        fail(f"there is no network {network!r}; there are {', '.join(NETWORKS)}")
    check_drawn("--figure", figure, FIGURES)
    x = torch.zeros(1, 3, size, size)
    pair = x, torch.zeros(1, dtype=torch.int64)
    try:
        single = maker(network, StudyData("pictures", pair, pair, 10), {})()
        plans = [of.plan(single, count, each, cost=cost, x=x) for each in budgets]
    except ValueError as reason:
        fail(str(reason))
    words = cost.replace("_", "-")
    for each, rows in zip(budgets, plans, strict=True):
        header = ("S", "overlap", "member's channels", "all channels", f"member's {words}")
        cells = [
            [f"{row.scale:g}", f"{row.iou:.3f}", *(f"{100 * v:.0f} %" for v in (row.ones, row.width, row.member))]
            for row in rows
        ]
        console.print(table(f"{network}, {count} masks, {each:g} times the {words} of one network", header, cells))
    if figure is not None:
        from dissensus.pages import figures

        try:
            drawn = figures.budgets(budgets, plans, words)
        except ImportError as reason:
            fail(str(reason))
        keep(figure, lambda file: figures.save(drawn, file))
        console.print(f"The figure is in {escape(str(figure))}", soft_wrap=True)
