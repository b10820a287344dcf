"""Models that a command line names: ``package.module:function``, or a folder of a saved ensemble."""

import importlib
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from dissensus.cli.screen import fail, said


def named_object(option: str, text: str) -> Any:
    """What ``module:name`` names; the working folder is searched first. Nothing is imported unless it is named."""
    module, colon, name = text.partition(":")
    if not module or not colon or not name:
        fail(f"{option} must be MODULE:FUNCTION, such as networks:build; got {text}")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as reason:
        fix = "" if reason.name != module.partition(".")[0] else " in this folder or among the installed packages"
        fail(f"{option} {text}: {reason}{fix}")
    except ImportError as reason:
        fail(f"{option} {text}: {reason}")
    except Exception as reason:
        _fail_inside(option, text, f"importing {module} failed", reason)
    for part in name.split("."):
        if not hasattr(found, part):
            from dissensus import checks

            known = [key for key in vars(found) if not key.startswith("_")]
            fail(f"{option} {text}: the module {module} has no {name}. {checks.nearest(part, known)}".rstrip())
        found = getattr(found, part)
    return found


def named_function(option: str, text: str) -> Callable[..., Any]:
    """The function that ``module:function`` names."""
    function = named_object(option, text)
    if not callable(function):
        fail(f"{option} {text}: {text.partition(':')[2]} is no function")
    return function


def load_model(option: str, text: str | None, device: Any = None) -> Any:
    """The model that a function returns: an Ensemble, a module, a callable, a list of those, or an estimator.

    A module that is named itself is taken as it is.
    """
    from torch import nn

    if text is None:
        fail(f"give {option} MODULE:FUNCTION")
    found = named_object(option, text)
    model = found
    if not isinstance(found, nn.Module):
        if not callable(found):
            fail(f"{option} {text}: {text.partition(':')[2]} is no function")
        try:
            model = found()
        except Exception as reason:
            hint = " It is called without arguments." if isinstance(reason, TypeError) else ""
            _fail_inside(option, text, "calling it failed", reason, hint)
    parts = model if isinstance(model, list | tuple) and model else [model]
    if isinstance(model, type) or not all(callable(part) or hasattr(part, "predict") for part in parts):
        wanted = "it must return an Ensemble, a module or a callable x -> [M, B, ...]"
        fail(f"{option} {text}: {wanted}; got {'None' if model is None else type(model).__name__}")
    for part in parts:
        if isinstance(part, nn.Module):
            part.eval()
            if device is not None:
                part.to(device)
    return model


def _fail_inside(option: str, text: str, what: str, reason: Exception, hint: str = "") -> NoReturn:
    """Say where code of the user failed, in one line."""
    frames = traceback.extract_tb(reason.__traceback__)
    last = frames[-1] if frames else None
    where = f" ({last.filename}, line {last.lineno})" if last is not None and last.filename != __file__ else ""
    first = (said(reason).strip().splitlines() or [""])[0]
    fail(f"{option} {text}: {what}: {type(reason).__name__}: {first}{where}.{hint}")


def load_saved(folder: Path, trust: Sequence[str] = ()) -> Any:
    """The ensemble in a folder, where its architecture is stored beside its weights.

    ``trust`` names packages whose functions that architecture may call.
    """
    from dissensus.ensemble import Ensemble

    if trust and "" not in sys.path:
        sys.path.insert(0, "")
    return Ensemble.load(folder, trust=trust).eval()
