"""`aiperf` offline: acceptance, token counts and times of a short run on each of the two routes."""

import json
import os
import subprocess
import sys
from pathlib import Path

from served_times import FirstTokens

URL, COUNT, TOKENS = sys.argv[1], 6, 24
PROMPT = 1200
"""Tokens of a prompt: so many that what lies between tool and server is little of the time to the first token."""
MODEL = Path("home/models/smollm2-135m").absolute()
# In its own offline mode it takes no tokenizer from a folder; nothing answers at this address.
OFFLINE = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(Path("hf").absolute())}
AIPERF = Path(sys.executable).with_name("aiperf")

for kind in ("completions", "chat"):
    folder = Path(f"aiperf-{kind}").absolute()
    own = FirstTokens(URL)
    command = [
        *(AIPERF, "profile", "--model", "smollm2-135m", "--url", URL, "--endpoint-type", kind, "--streaming"),
        *("--tokenizer", MODEL, "--concurrency", "1", "--request-count", str(COUNT), "--ui", "none"),
        *("--isl", str(PROMPT), "--osl", str(TOKENS), "--extra-inputs", "ignore_eos:true", "--random-seed", "1"),
        *("--use-server-token-count", "--artifact-dir", folder),
    ]
    done = subprocess.run(
        list(map(str, command)), env=os.environ | OFFLINE, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    (file,) = folder.rglob("profile_export_aiperf.json")
    found = json.loads(file.read_text())
    histogram = {int(j): count for j, count in found["pooled_spec_decode_acceptance_histogram"].items()}
    steps, accepted = (found[name]["avg"] for name in ("total_spec_decode_steps", "total_accepted_draft_tokens"))
    assert sum(histogram.values()) == steps > 0, (histogram, steps)
    assert sum(j * count for j, count in histogram.items()) == accepted <= found["total_draft_tokens"]["avg"], histogram
    assert found["completed_request_count"]["avg"] == COUNT
    # The tool's own count of tokens agrees with the server's.
    assert found["usage_completion_tokens"]["min"] == found["usage_completion_tokens"]["max"] == TOKENS
    print(kind, "accepted tokens, by steps:", histogram)
    own.check(found["time_to_first_token"]["avg"] / 1000, COUNT)
