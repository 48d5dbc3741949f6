"""Moments, bases and their linear algebra, in the paper's letters, as pure functions of tensors."""
