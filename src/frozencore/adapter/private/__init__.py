"""Private training: what a trained core says about any one row is bounded by a budget (epsilon, delta)."""
