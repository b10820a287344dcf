"""Estimators with scikit-learn's interface. They need the extra: ``pip install 'dissensus[sklearn]'``."""

from dissensus.sklearn.estimators import EnsembleClassifier, EnsembleRegressor
from dissensus.sklearn.search import EnsembleSearchCV

__all__ = ["EnsembleClassifier", "EnsembleRegressor", "EnsembleSearchCV"]
