"""Trains adapters of the draft on logged generations and scores them, in a child process (`job`).

`scoring/` predicts from the log how an adapter would have drafted; `make/` creates a new draft for a target.
"""
