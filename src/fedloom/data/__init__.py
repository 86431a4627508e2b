"""Data: sources, partitions, vertical federations, and statistics of their classes."""
