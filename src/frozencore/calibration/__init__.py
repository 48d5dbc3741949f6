"""Collect and store the moments of a model's layers over calibration batches."""
