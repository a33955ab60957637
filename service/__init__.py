"""Redraft: speculative decoding on MLX whose draft model keeps learning from the traffic it serves.

Three things are done when this package is imported, before anything can import mlx or mlx-lm: MLX's environment variables are
set (see service.mlx_environment), importing mlx-lm is kept from changing the limit of open files (see service.open_files), and
on Linux the fast BLAS is loaded (see service.blas). Every entry point and the training child pass through here.
"""

from service.blas import load_fast_blas
from service.mlx_environment import set_mlx_environment
from service.open_files import keep_open_files_limit

set_mlx_environment()
keep_open_files_limit()
FAST_BLAS = load_fast_blas()
"""Path of the BLAS that was put in front of MLX's own, or None."""
