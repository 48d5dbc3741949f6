"""Rows: their sources, their forms, and their tokens in batches."""
