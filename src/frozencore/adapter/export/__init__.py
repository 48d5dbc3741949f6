"""Leaving: an exact LoRA, plain weights, and what serving engines ask of either."""
