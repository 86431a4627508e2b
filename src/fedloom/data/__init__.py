"""Data: where it comes from, how it is shared out among clients, and how uneven the shares are."""
