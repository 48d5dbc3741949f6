"""Scoring: choice by log-likelihood, exact match of generated answers, and held-out loss."""
