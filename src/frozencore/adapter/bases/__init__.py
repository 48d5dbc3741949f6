"""Bases on a model: a calibration pass, a rank budget, refreshing, and bases that are taken from elsewhere."""
