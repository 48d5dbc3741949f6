"""The campaign: many runs from one specification, resumable, with what they share computed once."""
