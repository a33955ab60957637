"""`aider`: edits a file by the block of its answer and commits it, streamed and not; a second turn with the first restored;
turns of one conversation; whole files. Its model is tests/clients/scripts.json."""

import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

folder = Path(tempfile.mkdtemp(dir=Path.cwd()))
home, work = folder / "home", folder / "work"
home.mkdir()
work.mkdir()
environment = {
    "PATH": os.environ["PATH"],
    "HOME": str(home),
    # It would fetch lists of models from elsewhere.
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "PYTHONUTF8": "1",
}
EDITED, AGAIN, DONE = "seven twelve\n", "seven thirteen\n", "All is done."
numbers, sent = work / "numbers.txt", folder / "sent.txt"
QUIET = (
    "--yes-always --no-check-update --no-show-model-warnings --no-show-release-notes --analytics-disable --no-pretty "
    "--no-fancy-input --no-gitignore --no-detect-urls --map-tokens 0"
)


def git(*asked):
    return subprocess.run(
        ["git", *asked], cwd=work, env=environment, capture_output=True, text=True, timeout=60, check=True
    ).stdout


def aider(*said, typed=""):
    """What it prints."""
    model = ["--model", "openai/scripted", "--openai-api-base", f"{sys.argv[1]}/v1", "--openai-api-key", "none"]
    command = [str(Path(sys.executable).with_name("aider")), *QUIET.split(), *model, "--llm-history-file", str(sent)]
    done = subprocess.run(
        [*command, *said, "numbers.txt"],
        cwd=work,
        env=environment,
        input=typed,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, (done.stdout[-4000:], done.stderr[-4000:])
    return done.stdout


def start_anew():
    numbers.write_text("seven eleven\n", encoding="utf-8")
    git("commit", "-qam", "Numbers.")


git("init", "-q")
git("config", "user.name", "A")
git("config", "user.email", "a@localhost")
numbers.touch()
git("add", ".")
git("commit", "-qm", "A file.")
for stream in ("--stream", "--no-stream"):
    # One turn, and then a second whose conversation begins with what the first has left.
    start_anew()
    diff = ["--edit-format", "diff", stream]
    said = aider(*diff, "--message", "edit: The second number should be twelve.")
    assert numbers.read_text(encoding="utf-8") == EDITED, said
    sent.unlink()
    said = aider(*diff, "--restore-chat-history", "--message", "edit again: Thirteen, please.")
    assert numbers.read_text(encoding="utf-8") == AGAIN, said
    assert "ASSISTANT I change the second number." in sent.read_text(encoding="utf-8")
    (work / ".aider.chat.history.md").unlink()
    # The messages of the commits were asked for too.
    assert git("log", "-2", "--format=%s").split("\n")[:2] == [DONE, DONE]

# Turns of one conversation, the first of which edits nothing.
start_anew()
typed = "/ask What is in it?\nedit: The second number should be twelve.\nedit again: Thirteen, please.\n/exit\n"
said = aider("--edit-format", "diff", typed=typed)
assert DONE in said and numbers.read_text(encoding="utf-8") == AGAIN, said
(work / ".aider.chat.history.md").unlink()

# The whole file, which is how models that it does not know edit.
start_anew()
said = aider("--message", "whole: The second number should be twelve.")
assert numbers.read_text(encoding="utf-8") == EDITED, said
print(f"aider {version('aider-chat')}")
