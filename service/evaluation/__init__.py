"""Measuring: prompts, what the target says to them, how well a draft would have guessed it, and the whole loop on show."""
