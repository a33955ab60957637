"""`redraft`: one command for serving, operating, measuring and showing."""

from __future__ import annotations

import sys

from service.cli.console import fail
from service.cli.root import app
from service.core import RedraftError


def main() -> None:
    """Entry point: every known error and every OSError becomes one sentence and exit status 1."""
    try:
        app()
    except (RedraftError, OSError) as error:
        fail(str(error))
        sys.exit(1)
