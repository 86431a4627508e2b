"""The same methods on Flower's SuperLink and SuperNodes, for those who already run them. See docs/flower.md.

A Flower app names `fedloom.remote.flower.server:app` and `fedloom.remote.flower.client:app`; it holds no code of
its own.
"""
