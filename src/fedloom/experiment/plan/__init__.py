"""From a config to a `RunPlan`: data, networks, parties."""
