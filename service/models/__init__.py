"""Getting a pair of models: where they come from, what they are, and whether they belong together."""
