"""The one place that states the version."""

__version__ = "0.2.0.dev0"
