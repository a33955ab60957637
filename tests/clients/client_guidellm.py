"""`guidellm` offline: a synchronous run on each of the two routes, with the tokenizer of the served model's folder."""

import json
import os
import subprocess
import sys
from pathlib import Path

from served_times import FirstTokens, check_speculation

URL, COUNT, TOKENS = sys.argv[1], 5, 24
MODEL = Path("home/models/smollm2-135m").absolute()
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(Path("hf").absolute())}
GUIDELLM = Path(sys.executable).with_name("guidellm")

for route in ("/v1/completions", "/v1/chat/completions"):
    folder = Path(f"guidellm{route.replace('/', '-')}")
    folder.mkdir()
    own = FirstTokens(URL)
    command = [
        GUIDELLM,
        "run",
        "--backend",
        json.dumps({"kind": "openai_http", "target": URL, "model": "smollm2-135m", "request_format": route}),
        "--profile",
        "kind=synchronous",
        "--constraint",
        f"kind=max_requests,count={COUNT}",
        "--data",
        f"kind=synthetic_text,prompt_tokens=1200,output_tokens={TOKENS}",
        "--tokenizer",
        json.dumps({"kind": "huggingface_auto", "model": str(MODEL)}),
        "--output",
        json.dumps({"kind": "json", "path": str(folder / "benchmarks.json")}),
        "--disable-console",
    ]
    done = subprocess.run(command, env=os.environ | OFFLINE, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    (benchmark,) = json.loads((folder / "benchmarks.json").read_text())["benchmarks"]
    requests = benchmark["requests"]["successful"]
    assert len(requests) == COUNT and not benchmark["requests"]["errored"], benchmark["requests"]["errored"]
    # Its own counts, of the usage that every chunk carries.
    assert [request["output_tokens"] for request in requests] == [TOKENS] * COUNT
    own.check(sum(request["time_to_first_token_ms"] for request in requests) / COUNT / 1000, COUNT)
    found = [metrics for request in requests if (metrics := request["response_metrics"])]
    for metrics in found:
        check_speculation(metrics["speculative_decoding"])
    print(route, "answers with figures of speculation:", len(found))
