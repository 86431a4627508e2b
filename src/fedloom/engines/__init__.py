"""Engines run the parties of a method page; all give the same numbers.

An engine holds the parties and runs their methods. It knows nothing of rounds, ledgers or what a reply should
look like: that is the federation's business.
"""

from fedloom.core.engine import Account, Delivery, Engine, Failure, Lost
from fedloom.engines.batched import BatchedEngine
from fedloom.engines.isolated import IsolatedEngine
from fedloom.engines.local import LocalEngine
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
    "WorkersEngine",
]
