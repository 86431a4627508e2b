"""The two ways in which parties share data, and what a run makes of each."""
