"""Models: names to folders, loading a target and its draft, and checks that they are compatible."""
