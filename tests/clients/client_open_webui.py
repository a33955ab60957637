"""Open WebUI, without its page: what the page asks of it is asked over HTTP. Chats that are saved, with Open WebUI's own tools
and requests for titles, tags and questions to follow; its route for other programs; its other tasks. Its model is
tests/clients/scripts.json."""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import uuid
from importlib.metadata import version
from pathlib import Path

SAID, MODEL = "All is done.", "gpt-4o-mini"
folder = Path(tempfile.mkdtemp(dir=Path.cwd()))
with socket.create_server(("127.0.0.1", 0)) as free:
    port = free.getsockname()[1]
environment = {
    "PATH": os.environ["PATH"],
    "HOME": str(folder),
    "DATA_DIR": str(folder / "data"),
    "WEBUI_SECRET_KEY": "none",
    "WEBUI_AUTH": "false",
    "OPENAI_API_BASE_URL": f"{sys.argv[1]}/v1",
    "OPENAI_API_KEY": "none",
    "ENABLE_OLLAMA_API": "false",
    "ENABLE_AUTOCOMPLETE_GENERATION": "true",
    # Nothing is fetched, and nothing is computed in the process itself.
    "OFFLINE_MODE": "true",
    "HF_HUB_OFFLINE": "1",
    "ENABLE_VERSION_UPDATE_CHECK": "false",
    "BYPASS_EMBEDDING_AND_RETRIEVAL": "true",
    "RAG_EMBEDDING_ENGINE": "openai",
    "AUDIO_STT_ENGINE": "openai",
}
headers = {"content-type": "application/json"}


def ask(path, body=None):
    """The text of an answer."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.read().decode()
    except urllib.error.HTTPError as error:
        raise AssertionError(f"{path}: {error.code} {error.read().decode()}") from error


def wait_for(what, seconds):
    """What it returns, once that is something."""
    until = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < until and serving.poll() is None, log.read_text(encoding="utf-8")[-4000:]
        time.sleep(0.2)
    return found


def version_served():
    try:
        return json.loads(ask("/api/version"))["version"]
    except OSError:
        return None


def turn(history, text, chat=None, parent=None):
    """A turn of a saved chat, as the page asks for it. parent: the message that it follows. Returns the ids of the chat and of
    the two new messages."""
    user, answer = str(uuid.uuid4()), str(uuid.uuid4())
    said = {"id": user, "parentId": parent, "childrenIds": [answer], "role": "user", "content": text, "models": [MODEL]}
    asked = {
        "stream": True,
        "model": MODEL,
        "messages": [*history, {"role": "user", "content": text}],
        "params": {"temperature": 0.5, "top_k": 40, "max_tokens": 200, "stop": ["<end>"], "frequency_penalty": 0},
        "files": [],
        "filter_ids": [],
        "tool_ids": [],
        "tool_servers": [],
        "features": {"voice": False, "image_generation": False, "code_interpreter": False, "web_search": False},
        "variables": {"{{USER_NAME}}": "A", "{{CURRENT_DATE}}": "2026-11-29"},
        "session_id": str(uuid.uuid4()),
        "id": answer,
        "parent_id": parent,
        "user_message": said,
        "background_tasks": {"title_generation": True, "tags_generation": True, "follow_up_generation": True},
        "stream_options": {"include_usage": True},
        **({"chat_id": chat} if chat else {}),
    }
    return json.loads(ask("/api/chat/completions", asked))["chat_id"], user, answer


def saved(chat):
    return json.loads(ask(f"/api/v1/chats/{chat}"))


def message_of(chat, identity):
    return saved(chat)["chat"]["history"]["messages"].get(identity) or {}


def answered(chat, identity):
    """A saved message, once it is whole."""
    wait_for(lambda: message_of(chat, identity).get("done"), 60)
    return message_of(chat, identity)


def serve_by(api):
    """Which of the server's routes Open WebUI asks."""
    configuration = {
        "ENABLE_OPENAI_API": True,
        "OPENAI_API_BASE_URLS": [f"{sys.argv[1]}/v1"],
        "OPENAI_API_KEYS": ["none"],
        "OPENAI_API_CONFIGS": {"0": {"enable": True, **({"api_type": "responses"} if api == "responses" else {})}},
    }
    ask("/openai/config/update", configuration)
    assert MODEL in [model["id"] for model in json.loads(ask("/api/models?refresh=true"))["data"]]


def check_chat():
    """Two turns of a saved chat; in each the model calls one of Open WebUI's tools and answers behind its result."""
    chat, _, answer = turn([], "What time is it?")
    first = answered(chat, answer)
    past = {"role": "assistant", "content": first["content"], "output": first["output"]}
    second = answered(*turn([{"role": "user", "content": "What time is it?"}, past], "And now?", chat, answer)[::2])
    for message in (first, second):
        called, result, said = message["output"]
        assert (called["name"], result["call_id"]) == ("get_current_timestamp", called["call_id"]), message
        assert "current_iso" in json.dumps(result["output"]) and said["content"][0]["text"] == SAID, message
        # Of two requests with prompts of more than five thousand tokens, each counted once.
        used = message["usage"]
        assert 2 * used["prompt_tokens"] - 200 < used["input_tokens"] < 2 * used["prompt_tokens"], message
    # What is asked for behind an answer.
    wait_for(lambda: saved(chat)["title"] == "The time of day", 60)
    wait_for(lambda: saved(chat)["meta"].get("tags") == ["clocks"], 60)
    wait_for(lambda: message_of(chat, answer).get("followUps") == ["And then?"], 60)


log = folder / "log"
program = str(Path(sys.executable).with_name("open-webui"))
with log.open("w", encoding="utf-8") as written:
    serving = subprocess.Popen(
        [program, "serve", "--host", "127.0.0.1", "--port", str(port)],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=written,
        stderr=written,
    )
try:
    wait_for(version_served, 200)
    token = json.loads(ask("/api/v1/auths/signin", {"email": "", "password": ""}))["token"]
    headers["authorization"] = f"Bearer {token}"
    for api in ("responses", "chat"):
        serve_by(api)
        check_chat()

    # Its route for other programs.
    plain = {"model": MODEL, "messages": [{"role": "user", "content": "What is 2 + 2?"}]}
    whole = json.loads(ask("/api/chat/completions", plain))
    assert whole["choices"][0]["message"]["content"] == SAID, whole
    streamed = ask("/api/chat/completions", {**plain, "stream": True})
    chunks = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
    deltas = [choice["delta"] for chunk in chunks for choice in chunk.get("choices", [])]
    assert "".join(delta.get("content") or "" for delta in deltas) == SAID, streamed

    # Its other tasks.
    more = {
        **plain,
        "prompt": "What is",
        "type": "retrieval",
        "responses": ["Four.", "4"],
        "chat_id": str(uuid.uuid4()),
    }
    for task in ("title", "tags", "follow_up", "queries", "image_prompt", "emoji", "auto", "moa"):
        done = json.loads(ask(f"/api/v1/tasks/{task}/completions", more))["choices"][0]["message"]["content"]
        assert done == SAID or json.loads(done)["title"] == "The time of day", (task, done)
finally:
    serving.terminate()
    serving.wait(30)
print(f"Open WebUI {version('open-webui')}")
