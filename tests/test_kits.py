"""Alert rules and dashboard: they name metrics and labels that exist, alerts are raised and end, and every panel has data."""

import json
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from service.core import RunState, Source
from service.metrics import METRICS, MODEL_LABEL, OLDER, PREFIX
from tests.support.tiny_server import generate, in_process_server, prompts, write_pair

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
COMPOSE = CONFIGS / "compose"
SERVICES: dict[str, Any] = yaml.safe_load((COMPOSE / "compose.yaml").read_text())
RULES_FILE = CONFIGS / "prometheus" / "alerts.yaml"
RULES_TEST = RULES_FILE.with_name("alerts.test.yaml")
DASHBOARD_FILE = CONFIGS / "grafana" / "redraft.json"
DASHBOARD: dict[str, Any] = json.loads(DASHBOARD_FILE.read_text())
ALERTS: list[dict[str, Any]] = [
    rule for group in yaml.safe_load(RULES_FILE.read_text())["groups"] for rule in group["rules"]
]
PANELS: list[dict[str, Any]] = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
VARIABLES: dict[str, dict[str, Any]] = {item["name"]: item for item in DASHBOARD["templating"]["list"]}
ANNOTATIONS = [item for item in DASHBOARD["annotations"]["list"] if "target" in item]

LABELS: dict[str, set[str]] = {
    shown: {MODEL_LABEL, "instance", "job", *item.labels, *(["le"] if ending == "_bucket" else [])}
    for item in METRICS
    for ending in (("_bucket", "_sum", "_count") if item.kind == "histogram" else ("",))
    for shown in [PREFIX + item.name + ending]
}
"""Every name that a server's scrape has, with the labels of its series."""
VALUES = {"state": set(RunState), "source": set(Source), "adapter": {OLDER}}

SELECTOR = re.compile(r"(\bredraft:\w+|\bup\b)(?:\{([^}]*)\})?")
MATCHER = re.compile(r'(\w+)\s*(?:=~|!~|!=|=)\s*"([^"]*)"')
GROUPED = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right) ?\(([^)]*)\)")

NO_PROMETHEUS = "no Prometheus here: install Debian's package prometheus, or put prometheus and promtool on the PATH"
needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason=NO_PROMETHEUS)
needs_prometheus = pytest.mark.skipif(shutil.which("prometheus") is None, reason=NO_PROMETHEUS)


def queries() -> list[tuple[str, str, str]]:
    """All expressions: whose, the expression, and the text that shows its labels."""
    alerts = [(rule["alert"], rule["expr"], json.dumps(rule["annotations"])) for rule in ALERTS]
    shown = [
        (f"{panel['title']} {target['refId']}", target["expr"], target["legendFormat"])
        for panel in PANELS
        for target in panel["targets"]
    ]
    marks = [(mark["name"], mark["target"]["expr"], mark["textFormat"]) for mark in ANNOTATIONS]
    lists: list[tuple[str, str, str]] = []
    for name in ("model_name", "instance"):
        listed = re.fullmatch(r"label_values\((.+), (\w+)\)", VARIABLES[name]["definition"])
        assert listed is not None and VARIABLES[name]["query"]["query"] == listed[0]
        lists.append((f"${name}", listed[1], f"{{{{{listed[2]}}}}}"))
    return alerts + shown + marks + lists


@pytest.mark.parametrize(("whose", "expression", "text"), queries(), ids=[whose for whose, *_ in queries()])
def test_metrics_and_labels_of_an_expression_exist(whose: str, expression: str, text: str) -> None:
    selectors = SELECTOR.findall(expression)
    assert selectors, "it measures nothing of Redraft's"
    all_labels = {"instance", "job"}
    for name, matchers in selectors:
        labels = {"instance", "job"} if name == "up" else LABELS[name]
        all_labels |= labels
        for label, wanted in MATCHER.findall(matchers):
            assert label in labels, f"{name} has no label {label}"
            if label in VALUES:
                assert set(wanted.split("|")) <= VALUES[label], wanted
            assert not wanted.startswith("$") or wanted[1:] in VARIABLES
    named = {label.strip() for group in GROUPED.findall(expression) for label in group.split(",")} - {""}
    assert named <= all_labels
    shown = set(re.findall(r"\{\{\s*(?:\$labels\.)?(\w+)\s*\}\}", text))
    assert shown <= all_labels
    # An aggregation loses every label that it does not name.
    if re.search(r"\b(?:sum|max|min)\b", expression):
        assert shown <= {
            label.strip() for group in re.findall(r"\bby \(([^)]*)\)", expression) for label in group.split(",")
        }


def test_every_alert_says_what_is_wrong_and_what_it_means() -> None:
    names = [rule["alert"] for rule in ALERTS]
    assert len(set(names)) == len(names) >= 8
    for rule in ALERTS:
        assert re.fullmatch(r"[1-9]\d*m", rule["for"]), rule["alert"]
        assert rule["labels"]["severity"] in {"warning", "critical"}
        assert rule["annotations"].keys() == {"summary", "description"}
        assert "{{ $labels.instance }}" in rule["annotations"]["summary"]


def test_every_alert_is_tested_for_being_raised_and_for_its_end() -> None:
    tests = yaml.safe_load(RULES_TEST.read_text())
    assert tests["rule_files"] == [RULES_FILE.name]
    for rule in ALERTS:
        for each in tests["tests"]:
            states = [bool(at.get("exp_alerts")) for at in each["alert_rule_test"] if at["alertname"] == rule["alert"]]
            if states:
                assert True in states and states[-1] is False, rule["alert"]
                break
        else:
            pytest.fail(f"{rule['alert']} has no test")


def test_every_alert_is_in_the_documentation() -> None:
    text = (CONFIGS.parent / "docs" / "operations.md").read_text()
    rows = re.findall(r"^\| `(Redraft\w+)` \| .* \| (\d+) min \|$", text, re.MULTILINE)
    assert rows == [(rule["alert"], rule["for"].removesuffix("m")) for rule in ALERTS]


def test_every_panel_says_what_it_shows() -> None:
    assert DASHBOARD["schemaVersion"] >= 41 and DASHBOARD["uid"] == "redraft"
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    cells: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        own = {(at["x"] + i, at["y"] + j) for i in range(at["w"]) for j in range(at["h"])}
        assert not own & cells, f"{panel['title']} covers another"
        cells |= own
    for panel in PANELS:
        assert panel["title"] and panel["description"].endswith("."), panel["id"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        for each in (panel, *panel["targets"]):
            assert each["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        for target in panel["targets"]:
            for name, matchers in SELECTOR.findall(target["expr"]):
                assert {"model_name", "instance"} <= {label for label, _ in MATCHER.findall(matchers)}, (
                    f"{panel['title']}: {name} is not of the chosen servers alone"
                )
    assert VARIABLES.keys() == {"datasource", "model_name", "instance"}
    assert {mark["name"] for mark in ANNOTATIONS} == {"Promoted", "Rolled back"}


def test_the_services_mount_rules_and_dashboard_where_they_are_read() -> None:
    mounted: dict[str, dict[str, Path]] = {}
    for service in ("prometheus", "grafana"):
        pairs = [volume.split(":") for volume in SERVICES["services"][service]["volumes"]]
        mounted[service] = {words[1]: (COMPOSE / words[0]).resolve() for words in pairs if words[0].startswith(".")}
    config = yaml.safe_load(SERVICES["configs"]["prometheus"]["content"])
    assert [mounted["prometheus"][path] for path in config["rule_files"]] == [RULES_FILE]
    (job,) = config["scrape_configs"]
    for rule in ALERTS:
        assert set(re.findall(r'job="(\w+)"', rule["expr"])) <= {job["job_name"]}
    provided = [
        path
        for target, path in mounted["grafana"].items()
        if Path(target).parent.name == "dashboards" and path.suffix == ".yaml"
    ]
    (provider,) = yaml.safe_load(provided[0].read_text())["providers"]
    assert provider["type"] == "file"
    assert mounted["grafana"][f"{provider['options']['path']}/{DASHBOARD_FILE.name}"] == DASHBOARD_FILE


def promtool(*words: str | Path) -> None:
    done = subprocess.run(["promtool", *words], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_prometheus_accepts_the_rules() -> None:
    promtool("check", "rules", "--lint-fatal", RULES_FILE)


@needs_promtool
def test_alerts_are_raised_and_end() -> None:
    promtool("test", "rules", RULES_TEST)


@needs_promtool
def test_prometheus_accepts_the_configuration_of_the_services(tmp_path: Path) -> None:
    text = SERVICES["configs"]["prometheus"]["content"]
    shutil.copy(RULES_FILE, tmp_path)
    config = tmp_path / "prometheus.yaml"
    config.write_text(re.sub(r"\$\{.*?\}", "key", text).replace("/etc/prometheus/", f"{tmp_path}/"))
    promtool("check", "config", config)


@contextmanager
def prometheus(folder: Path, scraped: str) -> Generator[Callable[..., Any]]:
    """A Prometheus that scrapes `scraped` (HOST:PORT) and evaluates the rules every second. Yields a function that GETs a path
    of its API and returns the answer's data."""
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(RULES_FILE)],
        "scrape_configs": [{"job_name": "redraft", "static_configs": [{"targets": [scraped]}]}],
    }
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        address = "{}:{}".format(*bound.getsockname())
    command = [
        "prometheus",
        f"--config.file={folder / 'prometheus.yaml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={address}",
    ]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        with httpx.Client(base_url=f"http://{address}/api/v1/", trust_env=False, timeout=10.0) as client:

            def get(path: str, **params: str) -> Any:
                assert process.poll() is None, (folder / "prometheus.log").read_text()
                answer = client.get(path, params=params)
                assert answer.status_code == 200, (params, answer.text)
                return answer.json()["data"]

            yield get
    finally:
        process.terminate()
        process.wait(30)


def until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while True:
        try:
            if condition():
                return
        except httpx.TransportError:
            pass  # it does not listen yet
        assert time.monotonic() < end, "it takes too long"
        time.sleep(0.2)


def filled(expression: str, chosen: Sequence[tuple[str, str]]) -> str:
    """The expression as Grafana sends it for these values of variables."""
    for name, value in (*chosen, ("__rate_interval", "10s")):
        expression = expression.replace(f"${name}", value)
    assert "$" not in expression
    return expression


@pytest.mark.nightly
@needs_prometheus
def test_prometheus_has_data_for_every_panel_and_evaluates_every_alert(tmp_path: Path) -> None:
    server = in_process_server(tmp_path, write_pair(tmp_path))
    target = f"127.0.0.1:{server.port}"
    server.start()
    try:
        with prometheus(tmp_path, target) as get:

            def value(expression: str) -> float:
                result = get("query", query=expression)["result"]
                return float(result[0]["value"][1]) if result else 0.0

            until(lambda: value('up{job="redraft"}') == 1)
            for line in prompts(6):
                generate(server, line.prompt)
            until(lambda: value("increase(redraft:generation_tokens_total[10s])") > 0)
            until(lambda: value("count_over_time(redraft:engine_ready[10s])") >= 4)

            (model,) = get(f"label/{MODEL_LABEL}/values")
            for chosen in ([("model_name", ".*"), ("instance", ".*")], [("model_name", model), ("instance", target)]):
                for whose, expression, _ in queries():
                    if whose in {mark["name"] for mark in ANNOTATIONS}:
                        get("query", query=filled(expression, chosen))
                        assert get("series", **{"match[]": filled(SELECTOR.findall(expression)[0][0], chosen)})
                    elif whose not in {rule["alert"] for rule in ALERTS}:
                        assert get("query", query=filled(expression, chosen))["result"], (whose, expression)

            for rule in ALERTS:
                for name, matchers in SELECTOR.findall(rule["expr"]):
                    assert get("series", **{"match[]": f"{name}{{{matchers}}}"}), (rule["alert"], name, matchers)

            def states() -> dict[str, tuple[str, str]]:
                (group,) = get("rules")["groups"]
                return {rule["name"]: (rule["health"], rule["state"]) for rule in group["rules"]}

            until(lambda: all(health != "unknown" for health, _ in states().values()))
            assert states() == {rule["alert"]: ("ok", "inactive") for rule in ALERTS}
            server.stop()
            until(lambda: states()["RedraftDown"] == ("ok", "pending"))
    finally:
        server.stop()
