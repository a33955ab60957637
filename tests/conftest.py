"""What several rooms' tests share: tiny real models, and the naive decoder that everything is held against."""

import service  # noqa: F401  (loads the fast BLAS before anything imports mlx)
