"""Repeat published tables and figures, each from one TOML file, and compare them with
the papers.
"""
