"""Many runs at once, in processes or on a Ray cluster."""
