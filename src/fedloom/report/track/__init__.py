"""Experiment trackers: they receive a copy of the metrics in a run's folder."""
