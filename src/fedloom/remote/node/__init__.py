"""A node of an organisation: its service, policy and store."""
