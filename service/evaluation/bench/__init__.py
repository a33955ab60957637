"""Benchmarks that people can run again: `redraft bench`. Contenders take turns; figures are medians and ratios of turns."""
