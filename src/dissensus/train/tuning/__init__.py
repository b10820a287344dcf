"""How much diversity: a search for the best hyperparameters, with the audit as a conscience."""

from dissensus.train.tuning.records import Candidate, Spent
from dissensus.train.tuning.result import Tuned
from dissensus.train.tuning.space import Range
from dissensus.train.tuning.tuning import tune

__all__ = ["Candidate", "Range", "Spent", "Tuned", "tune"]
