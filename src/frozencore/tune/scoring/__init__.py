"""Scoring: choice log-likelihood, greedy exact match, held-out loss."""

from __future__ import annotations
