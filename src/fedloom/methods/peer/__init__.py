"""Methods without a server: every peer has a model of its own and speaks to its neighbours."""
