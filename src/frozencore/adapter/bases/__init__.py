"""The bases of a model: calibration, rank budgets, and saved bases."""
