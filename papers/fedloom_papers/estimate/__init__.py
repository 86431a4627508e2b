"""Estimates of the time that a run takes."""
