"""Ensembles under ``torch.export``, which runs their code on tensors without values."""

import torch

from dissensus import checks


def is_exporting() -> bool:
    """Whether ``torch.export`` is tracing; torch 2.6 does not tell.

    Before torch 2.13 Dynamo takes PyTorch's own answer for True in whatever it compiles, so its flag is read there.
    """
    if torch.compiler.is_dynamo_compiling():
        return bool(getattr(torch.compiler, "_is_exporting_flag", False))
    asked = getattr(torch.compiler, "is_exporting", None)
    return asked is not None and asked()


def refuse_training(training: bool) -> None:
    """Refuse to trace members in training mode, whose dropout and statistics a program could not hold."""
    if training:
        fix = "Use ensemble.eval() first, or dissensus.export.program, which does."
        checks.refuse("ensemble", "be in evaluation mode for torch.export", "one in training mode", fix)
