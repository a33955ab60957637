"""Redraft: speculative decoding on MLX whose draft model keeps learning from the traffic it serves.

The one piece of work done at import in this package: on Linux the fast BLAS is loaded before anything can import mlx
(see service.blas). Every entry point and the training child pass through here.
"""

from service.blas import load_fast_blas

FAST_BLAS = load_fast_blas()
"""Path of the BLAS that was put in front of MLX's own, or None."""
