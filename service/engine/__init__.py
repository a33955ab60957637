"""Making tokens: the accept rules, the batch, the draft, and the one thread that owns every MLX object."""
