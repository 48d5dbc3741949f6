"""A saved adapter or basis: its tensors, its seal, its card, reading and writing it."""
