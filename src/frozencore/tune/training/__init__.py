"""Training: one recipe for every method, the Trainer, its checkpoints, and its interruption."""
