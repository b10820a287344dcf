"""Seconds that stand for measured ones: the choice of a backend then depends neither on the machine nor on its load."""

from dissensus.execution import choice

SECONDS = {"batched": 1.0, "vmap": 2.0, "streams": 2.5, "loop": 3.0}
"""Of backends; those that are not named are slower than all others."""
SLOWER = 4.0
MEASURED = {"interleaved": choice.interleaved, "_replays": choice._replays}
"""What goes by a clock."""


def interleaved(timed, candidates, passes):
    """Run candidates once, since their passes may fail."""
    ran = [name for name in candidates if timed(name, 0) is not None]
    return {name: [SECONDS.get(name, SLOWER)] for name in ran}


def _replays(trial, candidates, refused):
    ran = MEASURED["_replays"](trial, candidates, refused)
    return {name: 1e3 * SECONDS.get(name, SLOWER) for name in ran}


def fix(setattr):
    """Let no clock choose backends."""
    setattr(choice, "interleaved", interleaved)
    setattr(choice, "_replays", _replays)


def measure(setattr):
    """Let backends be measured, as users have it."""
    for name, function in MEASURED.items():
        setattr(choice, name, function)
