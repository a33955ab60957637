# All checks, as CI runs them.
check: lint types arrows test

lint:
    uv run ruff format --check .
    uv run ruff check .

types:
    uv run basedpyright

arrows:
    uv run lint-imports

test *args:
    uv run pytest {{args}}

# What measures speed is not part of the normal run.
bench *args:
    uv run pytest -m bench {{args}}

fix:
    uv run ruff format .
    uv run ruff check --fix .
