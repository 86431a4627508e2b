"""Distillation: clients with hidden models and a server that sees their answers on public data."""
