"""Training: one recipe for every method, the Trainer, its checkpoints, and its interruption."""

STEPS_VERSION = {"version of the steps": 2}
"""Part of a checkpoint's identity and of a record. It changes with the order of rows or the schedule, because a resumed
training must go on with those it began with, and a campaign compares runs of one kind."""
