"""What several rooms' tests share: tiny real models, and the naive decoder that everything is held against."""

import os

import service  # noqa: F401  (loads the fast BLAS before anything imports mlx)

# Settings of whoever runs the tests are not the tests'.
for name in [name for name in os.environ if name.startswith("REDRAFT_") and name != "REDRAFT_BLAS"]:
    del os.environ[name]
