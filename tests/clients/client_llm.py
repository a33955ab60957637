"""`llm`, on the command line, with a model of its own file of OpenAI-compatible models."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

with tempfile.TemporaryDirectory() as folder:
    Path(folder, "extra-openai-models.yaml").write_text(
        f"- model_id: redraft\n  model_name: smollm2-135m\n  api_base: {sys.argv[1]}/v1\n", encoding="utf-8"
    )
    environment = {**os.environ, "LLM_USER_PATH": folder, "OPENAI_API_KEY": "none"}
    for stream in ([], ["--no-stream"]):
        command = [sys.executable, "-m", "llm", "-m", "redraft", "-o", "max_tokens", "40", *stream, "What is 2 + 2?"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0 and "4" in done.stdout, (done.stdout, done.stderr)
