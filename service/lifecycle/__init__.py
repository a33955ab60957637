"""Deciding: when to train, whether a candidate is better, when to take it back. Numbers and rows in, verdicts and rows
out."""
