"""`schemathesis`: requests made from the OpenAPI document, and every answer checked against it.

How many for each operation: REDRAFT_EXAMPLES, 30 where it is not set.
"""

import os
import subprocess
import sys
from pathlib import Path

command = [
    str(Path(sys.executable).with_name("schemathesis")),
    "run",
    f"{sys.argv[1]}/openapi.json",
    "--max-examples",
    os.environ.get("REDRAFT_EXAMPLES", "30"),
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
