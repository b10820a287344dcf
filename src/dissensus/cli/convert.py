"""`dissensus convert`: folders of earlier releases in the present format."""

from pathlib import Path
from typing import Annotated

import typer

from dissensus.cli.models import named_function
from dissensus.cli.screen import check_folder, fail, in_options, print_place, said

OPTIONS = {"build": "--build", "new": "NEW", "old": "OLD"}
"""Options by the arguments of the library that they become."""


def convert(
    old: Annotated[Path, typer.Argument(help="Folder of a saved ensemble or sweep, or of checkpoints of a fit.")],
    new: Annotated[Path, typer.Argument(help="Folder to write.")],
    build: Annotated[
        str | None,
        typer.Option(
            help="The function that returns a member, as MODULE:FUNCTION; modules of this folder are found. "
            "Checkpoints need it."
        ),
    ] = None,
    output: Annotated[
        str | None,
        typer.Option(help="The part of what a member returns that is its output, such as logits. For checkpoints."),
    ] = None,
) -> None:
    """Convert what an earlier release saved to the present format.

    Ensembles and sweeps keep their weights and records. From checkpoints the newest weights are saved as an ensemble.
    """
    from dissensus.train.conversion import convert as converted

    check_folder("NEW", new)
    try:
        result = converted(old, new, None if build is None else named_function("--build", build), output)
    except (ValueError, TypeError, OSError) as reason:
        fail(in_options(said(reason), OPTIONS))
    print_place("Read", result.source)
    print_place(f"The {result.kind} is in", result.path)
