"""In which of several ways the operations of a pass run: remembered by operation and shape."""


class Ways(dict[str, str]):
    """Ways by operation and shape, as the first pass of each has measured them.

    Ways round differently, so a training that may be interrupted keeps them
    (`dissensus.execution.choice.Choices.keep_in`).
    """

    by_rule = False
    """Whether a rule decides instead of a clock, so that equal trainings are equal to the bit."""
