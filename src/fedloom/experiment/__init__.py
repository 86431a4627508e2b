"""Experiments: the only part that logs, saves, evaluates, touches disk and knows devices."""
