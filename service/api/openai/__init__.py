"""OpenAI's routes: chat completions, completions, responses and models, each translated to what the engine takes."""
