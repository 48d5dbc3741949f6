"""Train many tenants at once: each trains its own core on its own rows, with a shared P and Q."""
