"""Federated meta-learning, and what it is compared with: a model to start from, that each client adapts."""
