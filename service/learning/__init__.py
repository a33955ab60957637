"""Improving the draft from what was logged: data, loss, LoRA training, off-policy scores. Runs in a child process."""
