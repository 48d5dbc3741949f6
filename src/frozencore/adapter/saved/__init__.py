"""A saved adapter or basis: its tensors and their checksum, its card, reading and writing it."""
