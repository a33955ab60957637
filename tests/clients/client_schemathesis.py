"""`schemathesis`: requests made from the OpenAPI document, and every answer checked against it.

Arguments: the server's address, and how many requests to make up for each operation.
"""

import subprocess
import sys
from pathlib import Path

command = [
    str(Path(sys.executable).with_name("schemathesis")),
    "run",
    f"{sys.argv[1]}/openapi.json",
    "--max-examples",
    sys.argv[2],
    "--checks",
    "all",
    "--phases",
    "examples,coverage,fuzzing",
    "--no-color",
    "--seed",
    "1",
]
done = subprocess.run(command, check=False)
sys.exit(done.returncode)
