"""The grid search as a study file."""
