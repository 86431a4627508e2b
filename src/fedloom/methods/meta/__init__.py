"""Federated meta-learning and its baselines: a common initial model that each client adapts."""
