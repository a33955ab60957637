"""Makes each client's environment and runs its script: `python -m tests.clients [--examples N] [NAME ...]`."""

from __future__ import annotations

import argparse
import json
import logging
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from service.evaluation.server_process import LocalServer
from tests.clients import check_lm_eval
from tests.support.echo_engine import LIMITS, EchoServer
from tests.support.tiny_server import in_process_server, write_pair

FOLDER = Path(__file__).parent
SECONDS = 300
"""Of a client's script, and of each step that makes its environment."""
EXAMPLES = 250
"""Requests that schemathesis makes up for each operation; it has two seconds for each."""
SETTINGS: dict[str, dict[str, object]] = {
    "training": {"enabled": False},
    "server": {"model_aliases": ["gpt-4o-mini", "claude-opus-4-8"]},
}
UNBOUNDED = replace(LIMITS, max_body_bytes=2**26, max_tokens=2**31, max_context=2**32)
"""Whatever the document allows is then served: no document can know how long a prompt may be."""
SCHEMATHESIS = "schemathesis"
"""It asks thousands of times: an engine that repeats its prompt answers it."""


DAILY, NIGHTLY = FOLDER / "requirements.txt", FOLDER / "nightly.txt"
"""The clients of every day, and those that take minutes or gigabytes to install."""
CHECKS: dict[str, Callable[[Path], None]] = {"lm_eval": check_lm_eval.check}
"""What is compared, with what this project can compute, of what a client has left in the folder it ran in."""


def environments(file: Path) -> dict[str, list[str]]:
    """What each client of a file needs, by its name."""
    lines = file.read_text(encoding="utf-8").splitlines()
    pairs = [line.split(":", 1) for line in lines if line and not line.startswith("#")]
    return {name: packages.split() for name, packages in pairs}


def with_tools(target: Path, folder: Path) -> Path:
    """The bundled target with a chat template that knows tools, in a folder of its own."""
    folder.mkdir()
    for file in target.iterdir():
        (folder / file.name).symlink_to(file)
    config = folder / "tokenizer_config.json"
    settings = json.loads(config.read_text(encoding="utf-8"))
    settings["chat_template"] = (FOLDER / "tools.jinja").read_text(encoding="utf-8")
    config.unlink()
    config.write_text(json.dumps(settings), encoding="utf-8")
    return folder


@contextmanager
def served(folder: Path) -> Generator[tuple[str, str]]:
    """Two servers: the bundled pair, and the same with a chat template that knows tools. Yields their addresses."""
    plain = LocalServer(folder / "plain", SETTINGS, folder / "home")
    models = folder / "home" / "models"
    try:
        plain.start()
        target, draft = with_tools(models / "smollm2-135m", folder / "target"), models / "smollm2-135m-draft"
        pair = {"models": {"target": str(target), "draft": str(draft)}}
        tools = LocalServer(folder / "tools", {**SETTINGS, **pair}, folder / "home")
        try:
            tools.start()
            yield plain.url, tools.url
        finally:
            tools.stop()
    finally:
        plain.stop()


@contextmanager
def tiny(folder: Path) -> Generator[tuple[str, str]]:
    """A server on a tiny random pair, whose target a client finds where the bundled one would be. Yields its address, twice."""
    target, draft = write_pair(folder / "pair")
    models = folder / "home" / "models"
    models.mkdir(parents=True)
    (models / "smollm2-135m").symlink_to(target)
    server = in_process_server(folder / "server", (target, draft), engine={"max_rows": 4, "max_waiting": 8})
    server.start()
    try:
        yield server.url, server.url
    finally:
        server.stop()


def run(name: str, packages: list[str], arguments: Sequence[str], folder: Path, seconds: float = SECONDS) -> bool:
    """Whether the client's script went through within so many seconds; its output is shown where it did not."""
    uv = shutil.which("uv")
    assert uv is not None, "uv is not installed"
    started = time.monotonic()
    environment = folder / name
    subprocess.run([uv, "venv", "--quiet", str(environment)], check=True, timeout=SECONDS)
    python = environment / ("Scripts" if sys.platform == "win32" else "bin") / "python"
    install = [uv, "pip", "install", "--quiet", "--python", str(python), *packages]
    # Measuring tools need other versions than those that this project's own file binds.
    subprocess.run(install, cwd=folder if name in environments(NIGHTLY) else None, check=True, timeout=SECONDS)
    script = [str(python), str(FOLDER / f"client_{name}.py"), *arguments]
    done = subprocess.run(script, cwd=folder, capture_output=True, text=True, timeout=seconds, check=False)
    if done.returncode:
        print(done.stdout[-20_000:], done.stderr[-8_000:], sep="\n")
    elif name in CHECKS:
        CHECKS[name](folder)
    print(f"{name}: {'failed' if done.returncode else 'passed'} ({time.monotonic() - started:.0f} s)", flush=True)
    return done.returncode == 0


def main(names: Sequence[str], examples: int = EXAMPLES) -> int:
    """Status 1 where a client failed. names: of the clients; none: all of every day. examples: see EXAMPLES."""
    known = environments(DAILY) | (environments(NIGHTLY) if names else {})
    wanted = {name: packages for name, packages in known.items() if not names or name in names}
    measuring = [name for name in wanted if name in environments(NIGHTLY)]
    real = [name for name in wanted if name != SCHEMATHESIS and name not in measuring]
    results = list[bool]()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        if real:
            with served(folder) as addresses:
                results += [run(name, wanted[name], addresses, folder) for name in real]
        for name in measuring:
            with tiny(folder / f"{name}-run") as addresses:
                results.append(run(name, wanted[name], addresses, folder / f"{name}-run"))
        if SCHEMATHESIS in wanted:
            # It leaves answers unread, of which asyncio warns each time.
            logging.getLogger("asyncio").setLevel(logging.ERROR)
            with EchoServer(limits=UNBOUNDED).served() as address:
                arguments = [address, str(examples)]
                results.append(run(SCHEMATHESIS, wanted[SCHEMATHESIS], arguments, folder, SECONDS + 2 * examples))
    return 0 if all(results) else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.clients")
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--examples", type=int, default=EXAMPLES)
    parsed = parser.parse_args()
    if unknown := set(parsed.names) - environments(DAILY).keys() - environments(NIGHTLY).keys():
        parser.error(f"no such client: {', '.join(sorted(unknown))}")
    sys.exit(main(parsed.names, parsed.examples))
