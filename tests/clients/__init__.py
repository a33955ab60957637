"""Real clients against a real server on the bundled model: `python -m tests.clients`.

Each client has an environment of its own, made by uv from its line of requirements.txt. None of them is a dependency of the
project.
"""
