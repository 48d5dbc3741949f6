"""What a saved adapter is: its tensors and their names, the hashes that seal it, the base it was made on, its card."""
