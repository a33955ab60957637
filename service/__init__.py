"""Redraft: speculative decoding on MLX whose draft model keeps learning from the traffic it serves.

Two pieces of work are done at import in this package, before anything can import mlx: MLX's environment variables are set
(see service.mlx_environment), and on Linux the fast BLAS is loaded (see service.blas). Every entry point and the training child
pass through here.
"""

from service.blas import load_fast_blas
from service.mlx_environment import set_mlx_environment

set_mlx_environment()
FAST_BLAS = load_fast_blas()
"""Path of the BLAS that was put in front of MLX's own, or None."""
