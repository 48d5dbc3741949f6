"""Collect the moments of a model's layers over calibration batches, and build their bases."""
