"""The horizontal and the vertical setting."""
