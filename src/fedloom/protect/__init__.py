"""Privacy and compression of messages: clipping, noise, differential privacy, codings, and
label-inference attacks.
"""
