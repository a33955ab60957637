"""What was generated: rows, the texts that runs learn from, failure cases, quarantine, samples."""
