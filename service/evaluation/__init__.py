"""Measurements: prompts, the target's answers, how well a draft predicts these, the whole loop, and benchmarks."""
