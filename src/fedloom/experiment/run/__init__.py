"""Runs a plan: rounds, evaluation, records, checkpoints, results."""
