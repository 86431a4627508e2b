"""A node of an organization: its service, policy and store."""
