"""Differences between the supported databases."""
