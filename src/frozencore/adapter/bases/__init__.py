"""The bases of a model: calibration, and saved bases."""
