"""Models: resolving names to folders, loading a target and its draft, and checking that they are compatible."""
