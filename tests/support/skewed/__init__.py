"""A folder for a PYTHONPATH; see sitecustomize.py."""
