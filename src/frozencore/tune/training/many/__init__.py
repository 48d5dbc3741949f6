"""Many tenants at once: each trains a core of its own, on its own rows, between the P and Q that they share."""
