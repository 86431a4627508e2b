"""What keeps a message from telling too much: clipping, noise, and what can be proved about them."""
