"""Hyperparameter search: grids, random search or Optuna's TPE."""
