"""The command line."""

from fedloom.cli.app import main

__all__ = ["main"]
