"""One recipe for every method: the Trainer, its checkpoints, and how it ends when it is told to."""
