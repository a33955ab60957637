"""The files for kinds of machines and service managers: they load, start a server that exists, and let it stop in order."""

import configparser
import json
import plistlib
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from service.cli.root import app
from service.models.draft_choice import family_draft
from service.settings import Settings, load_settings

ROOT = Path(__file__).resolve().parent.parent
CONFIGS = ROOT / "configs"
MACHINES = ("laptop", "server", "nvidia")
UNIT = CONFIGS / "systemd" / "redraft.service"
COMPOSE: dict[str, Any] = yaml.safe_load((CONFIGS / "compose" / "compose.yaml").read_text())
ENDING_SECONDS = 25.0
"""What a server takes behind its drain time, at most: 5 s for connections, 10 s for the recorder, and the database."""


def drain_seconds() -> float:
    """The longest drain time of the files that service managers start servers with."""
    return max(load_settings(CONFIGS / f"{name}.toml").server.drain_seconds for name in MACHINES)


def served_with(words: list[str]) -> dict[str, Any]:
    """The options of a command line of `redraft serve`, as the command takes them. Fails for one that it refuses."""
    assert Path(words[0]).name == "redraft" and words[1] == "serve", words
    command: Any = typer.main.get_command(app)
    return command.commands["serve"].make_context("serve", words[2:]).params


def seconds(text: str) -> float:
    found = re.fullmatch(r"(\d+)(s|m)?", text)
    assert found is not None, text
    return float(found[1]) * (60 if found[2] == "m" else 1)


@pytest.mark.parametrize("name", MACHINES)
def test_settings_for_a_kind_of_machine_load(name: str) -> None:
    settings = load_settings(CONFIGS / f"{name}.toml")
    assert settings != Settings()
    assert settings.server.host == "127.0.0.1", "what listens beyond the machine says so by itself"
    found = family_draft(settings.models.target)
    assert found is not None
    assert settings.models.draft in {None, found[1].repositories[0]}


def test_every_file_of_settings_is_tested() -> None:
    assert {path.stem for path in CONFIGS.glob("*.toml")} == {*MACHINES, "default"}


def unit() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # pyright: ignore[reportAttributeAccessIssue]
    parser.read(UNIT)
    return parser


def test_the_systemd_unit_starts_and_stops_a_server() -> None:
    service = unit()["Service"]
    assert str(served_with(shlex.split(service["ExecStart"]))["config"]).endswith("redraft.toml")
    assert service["Restart"] == "on-failure"
    assert seconds(service["TimeoutStopSec"]) >= drain_seconds() + ENDING_SECONDS
    assert service["User"] not in {"", "root"}
    assert (service["NoNewPrivileges"], service["ProtectSystem"], service["ProtectHome"]) == ("yes", "strict", "yes")
    written = re.findall(r"^Environment=\w+=(\S+)$", UNIT.read_text(), re.MULTILINE)
    assert len(written) == 3
    allowed = (f"/var/lib/{service['StateDirectory']}", f"/var/cache/{service['CacheDirectory']}")
    assert all(folder.startswith(allowed) for folder in written), "it can write nowhere else"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    copy = tmp_path / UNIT.name
    # verify wants the program to be there.
    copy.write_text(UNIT.read_text().replace("ExecStart=/opt/redraft/bin/redraft", f"ExecStart={sys.executable}"))
    verified = subprocess.run(
        ["systemd-analyze", "verify", copy], capture_output=True, text=True, check=False, timeout=60
    )
    assert (verified.returncode, verified.stdout, verified.stderr) == (0, "", "")
    words = ["systemd-analyze", "security", "--offline=true", "--threshold=20", "--no-pager", UNIT]
    rated = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    assert rated.returncode == 0, f"its exposure level is above 2.0: {rated.stdout[-200:]}{rated.stderr}"


def test_launchd_starts_and_stops_a_server() -> None:
    text = (CONFIGS / "launchd" / "redraft.plist").read_text()
    plist = plistlib.loads(text.replace("@HOME@", "/nowhere").encode())
    assert served_with(plist["ProgramArguments"])["config"] == Path("/nowhere/redraft/redraft.toml")
    assert plist["KeepAlive"] == {"SuccessfulExit": False}
    assert plist["ExitTimeOut"] >= drain_seconds() + ENDING_SECONDS
    assert plist["Umask"] == 0o077
    assert "@HOME@" in text and f"gui/$(id -u)/{plist['Label']}" in text


def image(dockerfile: str) -> tuple[dict[str, str], list[str], int]:
    """Environment, command and exposed port of the last stage."""
    text = (ROOT / dockerfile).read_text().replace("\\\n", " ")
    stage = re.split(r"^FROM .*$", text, flags=re.MULTILINE)[-1]
    lines = dict(re.findall(r"^(CMD|EXPOSE) (.*)$", stage, re.MULTILINE))
    pairs = [word for line in re.findall(r"^ENV (.*)$", stage, re.MULTILINE) for word in shlex.split(line)]
    environment = dict(pair.split("=", 1) for pair in pairs)
    return environment, json.loads(lines["CMD"]), int(lines["EXPOSE"])


SECRET = "secret-of-16-characters"


def settings_of(environment: dict[str, str], words: list[str], patch: pytest.MonkeyPatch) -> Settings:
    """What a server goes by that is started with these variables and this command line."""
    for name, value in environment.items():
        if name.startswith("REDRAFT_"):
            patch.setenv(name, value)
    given = served_with(words)
    flags = {f"server.{name}": given[name] for name in ("host", "port") if given[name] is not None}
    return load_settings(None, flags)


@pytest.mark.parametrize("dockerfile", ["Dockerfile", "Dockerfile.dev"])
def test_an_image_listens_where_it_exposes(dockerfile: str, monkeypatch: pytest.MonkeyPatch) -> None:
    environment, words, port = image(dockerfile)
    settings = settings_of(environment, words[words.index("redraft") :], monkeypatch)
    assert (settings.server.host, settings.server.port) == ("0.0.0.0", port)
    assert str(settings.home) == "/data"


def test_the_image_that_serves_runs_as_nobody_special_with_what_it_needs() -> None:
    text = (ROOT / "Dockerfile").read_text()
    # Kubernetes' runAsNonRoot takes numbers alone.
    (number,) = re.findall(r"^USER ([1-9]\d*):\d+$", text, re.MULTILINE)
    assert f"--uid {number} " in text
    for source in re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.MULTILINE):
        for name in source.split():
            assert (ROOT / name).exists(), name


@pytest.mark.parametrize("dockerfile", ["Dockerfile", "Dockerfile.dev"])
def test_images_are_built_from_pinned_versions(dockerfile: str) -> None:
    text = (ROOT / dockerfile).read_text()
    bases = re.findall(r"^FROM (\S+)", text, re.MULTILINE)
    assert bases and all(re.fullmatch(r"[a-z/]+:\d+\.\d+\.\d+(-[a-z]+)+", base) for base in bases), bases
    installed = re.findall(r"pip install .*", text)
    assert installed and all(re.search(r" uv==\d+\.\d+\.\d+$", line) for line in installed), installed


def test_services_are_whole_and_published_on_this_machine_alone() -> None:
    services: dict[str, dict[str, Any]] = COMPOSE["services"]
    assert services.keys() == {"postgres", "redraft", "prometheus", "grafana"}
    for name, service in services.items():
        assert ("image" in service) != ("build" in service)
        if "image" in service:
            assert re.fullmatch(r"[a-z/]+:v?\d+\.\d+(\.\d+)?(-[a-z]+)?", service["image"]), "pinned by its version"
        assert service["restart"] in {"on-failure", "unless-stopped"}
        for port in service.get("ports", []):
            assert re.fullmatch(r"127\.0\.0\.1:\d+:\d+", port), (name, port)
        for volume in service["volumes"]:
            source = volume.partition(":")[0]
            if source.startswith("."):
                assert (CONFIGS / "compose" / source).is_file(), source
            else:
                assert source in COMPOSE["volumes"]
        for other in service.get("depends_on", []):
            assert other in services
    build = services["redraft"]["build"]
    assert (CONFIGS / "compose" / build["context"] / build["dockerfile"]).resolve() == ROOT / "Dockerfile"


def test_a_server_of_the_services_uses_postgresql_and_is_found_by_prometheus(monkeypatch: pytest.MonkeyPatch) -> None:
    environment, words, port = image("Dockerfile")
    service = COMPOSE["services"]["redraft"]
    given = {
        name: re.sub(r"\$\{(\w+):([-?])([^}]*)\}", lambda m: m[3] if m[2] == "-" else SECRET, value)
        for name, value in service["environment"].items()
    }
    settings = settings_of(environment | given, words, monkeypatch)
    assert settings.database_url == f"postgresql://redraft:{SECRET}@postgres/redraft"
    assert service["ports"] == [f"127.0.0.1:{port}:{port}"]
    assert family_draft(settings.models.target) is not None
    assert seconds(service["stop_grace_period"]) >= settings.server.drain_seconds + ENDING_SECONDS
    assert f"http://127.0.0.1:{port}/health/ready" in service["healthcheck"]["test"][-1]
    compile(service["healthcheck"]["test"][-1], "healthcheck", "exec")

    prometheus = yaml.safe_load(COMPOSE["configs"]["prometheus"]["content"])
    (job,) = prometheus["scrape_configs"]
    assert job["authorization"]["credentials"] == service["environment"]["REDRAFT_SERVER__OPERATOR_KEY"]
    ((host, scraped),) = [target.split(":") for each in job["static_configs"] for target in each["targets"]]
    assert int(scraped) == port and host in COMPOSE["services"]
    (source,) = yaml.safe_load((CONFIGS / "compose" / "grafana.yaml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"


def test_what_has_to_be_chosen_is_in_the_example() -> None:
    example = (CONFIGS / "compose" / "example.env").read_text()
    text = (CONFIGS / "compose" / "compose.yaml").read_text()
    assert set(re.findall(r"^(\w+)=$", example, re.MULTILINE)) == set(re.findall(r"\$\{(\w+):\?", text))
    assert set(re.findall(r"^# (\w+)=", example, re.MULTILINE)) == set(re.findall(r"\$\{(\w+):-", text))
