"""Methods with a server that averages weights."""
