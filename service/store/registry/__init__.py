"""Training runs and adapters: their states, verdicts and lineage."""
