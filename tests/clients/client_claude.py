"""Claude Code: reads a file by its own tool and answers behind the result; a conversation that has become too long is
compacted. Its model is tests/clients/scripts.json."""

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
claude = f"{programs}/claude"
environment = {
    "PATH": os.environ["PATH"],
    "HOME": str(home),
    "ANTHROPIC_BASE_URL": address,
    "ANTHROPIC_AUTH_TOKEN": "none",
    "ANTHROPIC_MODEL": "scripted",
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "DISABLE_AUTOUPDATER": "1",
}


def ask(*said):
    """The events of one turn."""
    done = subprocess.run(
        [claude, *said, "--allowedTools", "Read", "--output-format", "stream-json", "--verbose"],
        cwd=work,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, (done.stdout[-4000:], done.stderr[-4000:])
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def result(events):
    (last,) = [event for event in events if event["type"] == "result"]
    assert last["subtype"] == "success" and not last["is_error"], last
    assert last["result"] == "All is done.", last
    return last


(work / "numbers.txt").write_text("seven eleven\n" * 800, encoding="utf-8")
events = ask("-p", "What is in numbers.txt?")
assert result(events)["num_turns"] == 2
blocks = [block for event in events if event["type"] == "user" for block in event["message"]["content"]]
assert "seven eleven" in blocks[0]["content"] and not blocks[0].get("is_error"), blocks
replies = [event for event in events if event["type"] == "assistant"]
assert [block["type"] for reply in replies for block in reply["message"]["content"]] == ["tool_use", "text"]
assert all(reply["request_id"] for reply in replies), "the header request-id"
tokens = replies[0]["message"]["usage"]["input_tokens"]
assert tokens > 10_000, tokens

# Each turn reads the file anew, until the conversation does not fit.
compacted = []
for turn in range(5):
    with (work / "numbers.txt").open("a", encoding="utf-8") as file:
        file.write(f"{turn}\n")
    events = ask("-c", "-p", "Read it again.")
    result(events)
    compacted = [event for event in events if event.get("subtype") == "compact_boundary"]
    if compacted:
        break
assert compacted, "it never compacted"
version = subprocess.run(
    [claude, "--version"], capture_output=True, text=True, check=True, env=environment
).stdout.strip()
print(f"Claude Code {version}, a first prompt of {tokens} tokens, compacted after {turn + 2} turns")
