"""The bases of a model: calibration, rank budgets, refreshing, and saved bases."""
