# All checks, as CI runs them.
check: lint types arrows wheel test

# Format and style.
lint:
    uv run ruff format --check .
    uv run ruff check .

# Types of service/ and tests/.
types:
    uv run basedpyright

# Imports point down (docs/structure.md).
arrows:
    uv run lint-imports

# The wheel builds.
wheel:
    uv build --quiet --wheel --out-dir "$(mktemp -d)"

# Real clients (openai, anthropic, ...) and schemathesis, each in an environment of its own: `just clients openai`. `--all`: frameworks,
# and what comes from npm (Codex, Claude Code, the AI SDK), too.
clients *names:
    uv run python -m tests.clients {{names}}

# The page in a real Chromium (Debian: apt install chromium).
page:
    uv run pytest -n 0 -m nightly tests/page

# Write docs/reference.md from the code, and today's tests into docs/promises.md.
docs:
    uv run python -m tests.support.reference
    uv run python -m tests.support.promises

# The tests of every day: `just test tests/engine -k lossless`.
test *args:
    uv run pytest {{args}}

# What takes minutes: every family at full length, kills, full-size experiments. Run it before an issue closes.
nightly *args:
    uv run pytest -m nightly --timeout 3600 -o faulthandler_timeout=11100 {{args}}

# The tests that hold what docs/promises.md promises, at full length; writes that page: `just promises`, `just promises daily`
# (the tests of every day alone), `just promises 6 20` (these, and no page).
promises *which:
    uv run python -m tests.promises {{which}}

# One-line changes, each of which must fail a named test (tests/mutants.toml): `just mutants` or `just mutants NAME ...`.
mutants *names:
    uv run python -m tests.mutants {{names}}

# What measures speed; alone on a quiet machine.
bench *args:
    uv run pytest -m bench -n 0 -s {{args}}

# Format and mend what can be mended by itself.
fix:
    uv run ruff format .
    uv run ruff check --fix .
