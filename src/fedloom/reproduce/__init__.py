"""Reproduce published tables and figures, each from one TOML file, and sweeps of settings."""
