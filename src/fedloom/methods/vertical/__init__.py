"""Parties that hold different columns of the same people; one has the labels."""
