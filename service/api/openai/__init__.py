"""OpenAI's routes: chat completions, completions, responses and models, translated to the engine's input."""
