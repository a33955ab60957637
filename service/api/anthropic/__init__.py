"""Anthropic's routes: messages and their token counts, translated to the engine's input."""
