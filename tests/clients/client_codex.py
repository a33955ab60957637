"""Codex: reads a file by a command of its own making, and answers behind the result. Its model is
tests/clients/scripts.json."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

programs, address = sys.argv[1:]
folder = Path(tempfile.mkdtemp(dir=Path.cwd()))
home, work = folder / "home", folder / "work"
home.mkdir()
work.mkdir()
(work / "numbers.txt").write_text("seven eleven\n", encoding="utf-8")
(home / "config.toml").write_text(
    'model = "scripted"\nmodel_provider = "redraft"\n'
    f'[model_providers.redraft]\nname = "Redraft"\nbase_url = "{address}/v1"\nwire_api = "responses"\n',
    encoding="utf-8",
)
codex = f"{programs}/codex"
# Its own sandbox does not start inside a container; the one command that it runs is in scripts.json.
asked = [codex, "exec", "--skip-git-repo-check", "--json", "--dangerously-bypass-approvals-and-sandbox"]
done = subprocess.run(
    [*asked, "What is in numbers.txt?"],
    cwd=work,
    env={**os.environ, "CODEX_HOME": str(home)},
    stdin=subprocess.DEVNULL,
    capture_output=True,
    text=True,
    timeout=200,
    check=False,
)
assert done.returncode == 0, (done.stdout[-4000:], done.stderr[-4000:])
events = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
items = [event["item"] for event in events if event["type"] == "item.completed"]
(ran,) = [item for item in items if item["type"] == "command_execution"]
assert (ran["exit_code"], ran["aggregated_output"]) == (0, "seven eleven\n"), ran
assert (work / "copied.txt").read_text(encoding="utf-8") == "seven eleven\n"
assert [item["text"] for item in items if item["type"] == "agent_message"] == ["All is done."], items
(usage,) = [event["usage"] for event in events if event["type"] == "turn.completed"]
assert usage["input_tokens"] > 10_000, usage
version = subprocess.run([codex, "--version"], capture_output=True, text=True, check=True).stdout.strip()
print(f"{version}, {usage['input_tokens']} prompt tokens in 2 requests")
