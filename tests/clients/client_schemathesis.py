"""`schemathesis`: requests made from the OpenAPI document, and every answer checked against it.

Arguments: the server's address, and how many requests to make up for each operation. Two processes make half of them each, with
seeds of their own.
"""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

COUNTING = "^/v1/messages/count_tokens$"
"""Of this operation schemathesis 4.32.5 makes up no invalid requests but those of its coverage phase: it looks for an array of
what no block of content is, and finds none. The body is that of /v1/messages without what is said of the answer."""
SEED = "3"
"""With 1 schemathesis 4.32.5 takes a body of /v1/responses for invalid whose tools are all of types that the document names."""
ENDLESS = "^/events$"
"""Its answer is a stream that ends with the server."""


def run(address: str, phases: str, *options: str) -> int:
    """The status of schemathesis; its output is printed."""
    command = [str(Path(sys.executable).with_name("schemathesis")), "run", f"{address}/openapi.json"]
    command += ["--checks", "all", "--phases", phases, "--no-color", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    print(done.stdout, done.stderr, sep="\n", flush=True)
    return done.returncode


def main(address: str, examples: int) -> int:
    """Status 0 where every answer was as documented."""
    half, whole = str((examples + 1) // 2), str(examples)
    others, counting = ("--exclude-path-regex", f"{COUNTING}|{ENDLESS}"), ("--include-path-regex", COUNTING)
    runs = [
        ("examples,coverage,fuzzing", *others, "--max-examples", half, "--seed", SEED),
        ("fuzzing", *others, "--max-examples", half, "--seed", "2"),
        ("examples,coverage", *counting, "--seed", "1"),
        ("fuzzing", *counting, "--mode", "positive", "--max-examples", whole, "--seed", "1"),
    ]
    with ThreadPoolExecutor(2) as two:
        return max(two.map(lambda options: run(address, *options), runs))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
