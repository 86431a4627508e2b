"""Engines run the parties of a method page; all yield the same numbers.

An engine holds the parties and runs their methods. Rounds and the ledger belong to the federation.
"""

from fedloom.core.engine import Account, Delivery, Engine, Failure, Lost
from fedloom.engines.batched import BatchedEngine
from fedloom.engines.local import IsolatedEngine, LocalEngine, ObservedEngine
from fedloom.engines.workers import WorkersEngine

__all__ = [
    "Account",
    "BatchedEngine",
    "Delivery",
    "Engine",
    "Failure",
    "IsolatedEngine",
    "LocalEngine",
    "Lost",
    "ObservedEngine",
    "WorkersEngine",
]
