"""What an organisation runs beside its own data: a node, its policy, its store."""
