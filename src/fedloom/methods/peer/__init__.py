"""Methods without a server: every peer has its own model and exchanges messages with its
neighbours.
"""
