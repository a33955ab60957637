"""The log of generations: rows, texts for runs, failure cases, quarantine, samples."""
