"""Campaigns: many runs from one specification, resumable; shared values are computed once."""
