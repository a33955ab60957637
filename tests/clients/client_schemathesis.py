"""`schemathesis`: requests made from the OpenAPI document, and every answer checked against it.

Arguments: the server's address, and how many requests to make up for each operation. Every operation has a process of its own,
two at a time: one for all of them takes gigabytes with thousands of requests of each.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

COUNTING = "POST /v1/messages/count_tokens"
"""Of this operation schemathesis 4.32.5 makes up no invalid requests but those of its coverage phase: it looks for an array of
what no block of content is, and finds none. The body is that of /v1/messages without what is said of the answer."""
SEED = "3"
HOOKS = str(Path(__file__).with_name("schemathesis_hooks.py"))
ENDLESS = "GET /events"
"""Its answer is a stream that ends with the server."""
METHODS = {"get", "post", "put", "patch", "delete"}


def run(address: str, name: str, phases: str, *options: str) -> int:
    """The status of schemathesis; its output is printed where it is not 0."""
    command = [str(Path(sys.executable).with_name("schemathesis")), "run", f"{address}/openapi.json"]
    # With a database hypothesis 6.170 weighs every request against the best so far: hours for 5,000 of POST /v1/completions.
    command += ["--generation-database", "none"]
    command += ["--include-name", name, "--checks", "all", "--phases", phases, "--seed", SEED, "--no-color", *options]
    started = time.monotonic()
    hooks = {**os.environ, "SCHEMATHESIS_HOOKS": HOOKS}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=hooks)
    if done.returncode:
        print(done.stdout, done.stderr, sep="\n")
    print(f"{name}: status {done.returncode}, {time.monotonic() - started:.0f} s", flush=True)
    return done.returncode


def check(address: str, name: str, examples: str) -> int:
    """Status 0 where every answer of the operation of this name was as documented."""
    if name != COUNTING:
        return run(address, name, "examples,coverage,fuzzing", "--max-examples", examples)
    invalid = run(address, name, "examples,coverage")
    return invalid or run(address, name, "fuzzing", "--mode", "positive", "--max-examples", examples)


def main(address: str, examples: str) -> int:
    """Status 0 where every answer was as documented."""
    with urllib.request.urlopen(f"{address}/openapi.json") as answer:
        paths: dict[str, dict[str, object]] = json.load(answer)["paths"]
    names = [f"{method.upper()} {path}" for path, ways in paths.items() for method in ways if method in METHODS]
    with ThreadPoolExecutor(2) as two:
        statuses = list(two.map(lambda name: check(address, name, examples), [n for n in names if n != ENDLESS]))
    # A process that a signal ended has a negative status.
    return int(any(statuses))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2]))
