"""The training loop: when to train, whether a candidate is better, when to roll it back, and what starts, ends and switches."""
