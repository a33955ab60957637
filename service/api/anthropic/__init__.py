"""Anthropic's routes: messages and their token counts, translated to what the engine takes."""
