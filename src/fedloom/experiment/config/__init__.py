"""The schema of a run: typed, frozen sections."""
