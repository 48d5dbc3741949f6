"""Advice on bases, ranks and targets before anything is trained."""
