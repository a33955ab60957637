"""Makes each client's environment and runs its script: `python -m tests.clients [--all] [--examples N] [NAME ...]`.

Without names: the clients of requirements.txt, and with `--all` those of frameworks.txt, npm.txt and measuring.txt too.
"""

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
from service.models.catalog import resolve
from tests.clients import check_lm_eval
from tests.clients.scripted_model import write_scripted
from tests.support.echo_engine import LIMITS, EchoServer
from tests.support.tiny_server import in_process_server, write_pair

FOLDER = Path(__file__).parent
SECONDS = 600
"""Of a client's script, and of each step that makes its environment."""
EXAMPLES = 100
"""Requests that schemathesis makes up for each operation; it has two seconds for each."""
SETTINGS: dict[str, dict[str, object]] = {
    "training": {"enabled": False},
    "server": {"model_aliases": ["gpt-4o-mini", "claude-opus-4-8"]},
}
UNBOUNDED = replace(LIMITS, max_body_bytes=2**26, max_tokens=2**31, max_context=2**32)
"""Whatever the document allows is then served: no document can know how long a prompt may be."""
SCHEMATHESIS = "schemathesis"
"""It asks thousands of times: an engine that repeats its prompt answers it."""
FRAMEWORKS, NPM = "frameworks.txt", "npm.txt"
"""Clients that a scripted model answers: it calls their tools, and its context holds the prompts of coding agents."""
MEASURING = "measuring.txt"
"""Tools that people measure servers with, some of which take gigabytes to install: a tiny random pair answers them."""
CHECKS: dict[str, Callable[[Path], None]] = {"lm_eval": check_lm_eval.check}
"""What is compared, with what this project can compute, of what a client has left in the folder it ran in."""
CONTEXT = 32_768
"""Tokens of the scripted model's context, which holds the prompts of coding agents."""


def environments(file: str = "requirements.txt") -> dict[str, list[str]]:
    """What each client of this file needs, by its name."""
    lines = (FOLDER / file).read_text(encoding="utf-8").splitlines()
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
def scripted(folder: Path) -> Generator[str]:
    """A server on a model that follows the scripts of scripts.json. Yields its address."""
    scripts = json.loads((FOLDER / "scripts.json").read_text(encoding="utf-8"))
    template = (FOLDER / "tools.jinja").read_text(encoding="utf-8").rpartition("{%- if add_generation_prompt")[0]
    target = write_scripted(resolve("smollm2-135m", folder / "home"), scripts, template, folder / "scripted", CONTEXT)
    settings = {**SETTINGS, "models": {"target": str(target), "draft": "none"}}
    server = LocalServer(folder / "scripted-state", settings, folder / "home")
    try:
        server.start()
        yield server.url
    finally:
        server.stop()


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


def python_script(name: str, packages: Sequence[str], folder: Path) -> list[str]:
    """The command of a client that comes from PyPI, in an environment of its own."""
    uv = shutil.which("uv")
    assert uv is not None, "uv is not installed"
    environment = folder / name
    wanted = [package.removeprefix("python") for package in packages if package.startswith("python<")]
    packages = [package for package in packages if not package.startswith("python<")]
    chosen = ["--python", wanted[0]] if wanted else []
    subprocess.run([uv, "venv", "--quiet", *chosen, str(environment)], check=True, timeout=SECONDS)
    python = environment / ("Scripts" if sys.platform == "win32" else "bin") / "python"
    # Elsewhere, or this project's own versions would bind the client's.
    overrides = FOLDER / f"overrides_{name}.txt"
    given = ["--override", str(overrides)] if overrides.exists() else []
    install = [uv, "pip", "install", "--quiet", "--python", str(python), *given, *packages]
    subprocess.run(install, cwd=folder, check=True, timeout=SECONDS)
    return [str(python), str(FOLDER / f"client_{name}.py")]


def node_script(name: str, packages: Sequence[str], folder: Path) -> list[str]:
    """The command of a client that comes from npm: a script of Node's, or of Python's that is told where its programs are."""
    npm, node = shutil.which("npm"), shutil.which("node")
    assert npm is not None and node is not None, "Node.js is not installed"
    environment = folder / name
    environment.mkdir()
    (environment / "package.json").write_text("{}", encoding="utf-8")
    subprocess.run([npm, "install", "--silent", *packages], cwd=environment, check=True, timeout=SECONDS)
    script = FOLDER / f"client_{name}.mjs"
    if script.exists():
        # Packages are looked for from where the script is.
        return [node, str(shutil.copy(script, environment))]
    return [sys.executable, str(FOLDER / f"client_{name}.py"), str(environment / "node_modules" / ".bin")]


def run(name: str, script: Sequence[str], arguments: Sequence[str], folder: Path, seconds: float = SECONDS) -> bool:
    """Whether the client's script went through within so many seconds; the end of its output is shown, all of it where it did
    not."""
    started = time.monotonic()
    done = subprocess.run(
        [*script, *arguments], cwd=folder, capture_output=True, text=True, timeout=seconds, check=False
    )
    if done.returncode:
        print(done.stdout[-20_000:], done.stderr[-8_000:], sep="\n")
    elif name in CHECKS:
        CHECKS[name](folder)
    said = done.stdout.strip().splitlines()[-1:] if not done.returncode else []
    outcome = "failed" if done.returncode else "passed"
    print(f"{name}: {outcome} ({time.monotonic() - started:.0f} s)", *said, sep="; ", flush=True)
    return done.returncode == 0


def main(names: Sequence[str], examples: int = EXAMPLES, *, everything: bool = False) -> int:
    """Status 1 where a client failed. names: of the clients; none: those of requirements.txt, or of every file. examples: see
    EXAMPLES."""

    def chosen(file: str, *, usual: bool) -> dict[str, list[str]]:
        return {
            name: packages for name, packages in environments(file).items() if name in names or (usual and not names)
        }

    wanted = chosen("requirements.txt", usual=True)
    frameworks, programs = chosen(FRAMEWORKS, usual=everything), chosen(NPM, usual=everything)
    measuring = chosen(MEASURING, usual=everything)
    real, results = [name for name in wanted if name != SCHEMATHESIS], list[bool]()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        if real:
            with served(folder) as addresses:
                for name in real:
                    results.append(run(name, python_script(name, wanted[name], folder), addresses, folder))
        if frameworks or programs:
            with scripted(folder) as address:
                for name, packages in frameworks.items():
                    results.append(run(name, python_script(name, packages, folder), [address], folder))
                for name, packages in programs.items():
                    results.append(run(name, node_script(name, packages, folder), [address], folder))
        for name, packages in measuring.items():
            own = folder / f"{name}-run"
            with tiny(own) as addresses:
                results.append(run(name, python_script(name, packages, own), addresses, own))
        if SCHEMATHESIS in wanted:
            # It leaves answers unread, of which asyncio warns each time.
            logging.getLogger("asyncio").setLevel(logging.ERROR)
            with EchoServer(limits=UNBOUNDED).served() as address:
                script = python_script(SCHEMATHESIS, wanted[SCHEMATHESIS], folder)
                results.append(run(SCHEMATHESIS, script, [address, str(examples)], folder, SECONDS + 2 * examples))
    return 0 if all(results) else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.clients")
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--all", action="store_true", help="clients of the other files, too")
    parser.add_argument("--examples", type=int, default=EXAMPLES)
    parsed = parser.parse_args()
    if (
        unknown := set(parsed.names)
        - environments().keys()
        - environments(FRAMEWORKS).keys()
        - environments(NPM).keys()
        - environments(MEASURING).keys()
    ):
        parser.error(f"no such client: {', '.join(sorted(unknown))}")
    sys.exit(main(parsed.names, parsed.examples, everything=parsed.all))
