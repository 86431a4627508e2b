"""fedloom's methods on Flower's SuperLink and SuperNodes. See docs/flower.md.

A Flower app names `fedloom.remote.flower.server:app` and `fedloom.remote.flower.client:app`; it
holds no code of its own.
"""
