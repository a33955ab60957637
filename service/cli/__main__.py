"""`python -P -m service.cli` is `redraft` (-P: not the working folder's own `service/`)."""

from service.cli import main

main()
