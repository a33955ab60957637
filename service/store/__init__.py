"""Generations, failure cases, runs and adapters in SQL; adapter folders on disk."""
