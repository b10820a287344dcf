"""`dissensus masks`: what a Masksembles ensemble made from one network costs."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from dissensus.cli.screen import (
    FIGURES,
    check_drawn,
    console,
    fail,
    in_options,
    print_place,
    said,
    table,
    write_file,
)

OPTIONS = {"count": "--count", "budget": "--budget", "cost": "--cost", "image_size": "--size"}
"""Options by the arguments of the library that they become."""


def masks(
    network: Annotated[str, typer.Option(help="A network of the studies, such as resnet18.")] = "resnet18",
    count: Annotated[int, typer.Option(help="N, the number of masks.")] = 4,
    budget: Annotated[
        list[float] | None, typer.Option(help="Cost of the ensemble, as a multiple of one network's; repeatable.")
    ] = None,
    cost: Annotated[Literal["parameters", "multiply_adds"], typer.Option(help="What is counted.")] = "parameters",
    size: Annotated[int, typer.Option(min=1, help="Height and width of the images.")] = 32,
    figure: Annotated[Path | None, typer.Option(help="Write a figure: .png, .pdf or .svg.")] = None,
) -> None:
    """Show which masks fit a budget: the scale S, the width of members, and how much members have in common."""
    import torch

    from dissensus.masks import plan
    from dissensus.pages.parts import counted
    from dissensus.studies.datasets import StudyData
    from dissensus.studies.registry import NETWORKS, maker

    budgets = budget or [1.0, 2.0]
    if network not in NETWORKS:
        fail(f"--network must be one of {', '.join(NETWORKS)}; got {network!r}")
    check_drawn("--figure", figure, FIGURES)
    x = torch.zeros(1, 3, size, size)
    images = x, torch.zeros(1, dtype=torch.int64)
    try:
        single = maker(network, StudyData("images", images, images, 10), {})()
        plans = [plan(single, count, times, cost=cost, x=x) for times in budgets]
    except ValueError as reason:
        fail(in_options(said(reason), OPTIONS))
    cost_name = cost.replace("_", "-")
    for times, rows in zip(budgets, plans, strict=True):
        header = ("S", "overlap", "member's channels", "all channels", f"member's {cost_name}")
        cells = [
            [f"{row.scale:g}", f"{row.iou:.3f}", *(f"{100 * v:.0f} %" for v in (row.ones, row.width, row.member))]
            for row in rows
        ]
        console.print(
            table(f"{network}, {counted(count, 'mask')}, {times:g}× the {cost_name} of one network", header, cells)
        )
    console.print(
        "[dim]S: the scale that masks are made with; overlap: channels that two members share, of those that either "
        "has; per cent: of what one network without masks has.[/dim]",
        highlight=False,
    )
    if figure is not None:
        from dissensus.pages import figures, style

        try:
            drawing = figures.mask_budgets(budgets, plans, cost_name)
        except ImportError as reason:
            fail(said(reason))
        write_file(figure, lambda file: style.save(drawing, file))
        print_place("The figure is in", figure)
