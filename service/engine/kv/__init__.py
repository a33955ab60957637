"""The KV cache of a batch whose rows have different lengths."""
