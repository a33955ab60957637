"""Token generation: the accept rules, the batch, the draft, and the thread that owns every MLX object."""
