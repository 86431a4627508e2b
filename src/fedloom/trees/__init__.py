"""Histogram trees that are the same, bit for bit, however their rows are split over owners. NumPy,
and no messages.

An owner computes integers that are added; a coordinator computes everything else from the sums.
"""
