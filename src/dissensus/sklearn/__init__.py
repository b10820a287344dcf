"""Estimators with scikit-learn's interface. They need the extra: ``pip install 'dissensus[sklearn]'``."""

try:
    from sklearn.utils.validation import validate_data  # noqa: F401  # which 1.6 has brought
except ImportError as reason:
    raise ImportError("dissensus.sklearn needs scikit-learn 1.6 or newer: pip install 'dissensus[sklearn]'") from reason

from dissensus.sklearn.estimators import EnsembleClassifier, EnsembleRegressor, Uncertainty
from dissensus.sklearn.search import EnsembleSearchCV

__all__ = ["EnsembleClassifier", "EnsembleRegressor", "EnsembleSearchCV", "Uncertainty"]
