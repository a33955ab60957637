"""Training, adapters, health and metrics, and the error shape of every route and of unknown ones."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from urllib.parse import quote

import httpx
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from service.api.compatible import client_tag
from service.core import (
    AdapterRef,
    AdapterRefused,
    GainsState,
    PracticeState,
    Progress,
    RunState,
    Selection,
    StoreError,
    Verdict,
)
from tests.support.echo_engine import OWNED, EchoEngine, EchoServer, InMemoryOperator, make_run
from tests.support.scraped import scraped
from tests.support.waiting import until


@pytest.fixture
def server() -> EchoServer:
    return EchoServer()


@pytest.fixture
def http(server: EchoServer) -> Iterator[httpx.Client]:
    with server.served() as address, httpx.Client(base_url=address, timeout=60) as client:
        yield client


def assert_shape(response: httpx.Response, status: int, code: str, field: str | None = None) -> None:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert list(response.json()) == ["error"]
    assert sorted(error) == ["code", "message", "param", "type"]
    assert (error["code"], error["param"]) == (code, field)


def test_training_is_requested_once_and_followed(http: httpx.Client, server: EchoServer) -> None:
    key = {"Idempotency-Key": "monday"}
    first = http.post("/train", headers=key)
    assert first.status_code == 202
    assert first.headers["location"] == "/train/1"
    assert http.post("/train", headers=key).json() == first.json()
    assert_shape(http.post("/train"), 409, "conflict")
    assert_shape(http.post("/train", headers={"Idempotency-Key": "tuesday"}), 409, "conflict")
    server.operator.known_runs[0] = make_run(1, progress=Progress(3, 12, 0.5, 1.25, 900.0, 4.5, "on battery"))
    shown = http.get(first.headers["location"]).json()
    assert shown["state"] == "training"
    assert shown["progress"] == {
        "step": 3,
        "steps": 12,
        "loss": 0.5,
        "grad_norm": 1.25,
        "tokens_per_second": 900.0,
        "seconds_left": 4.5,
        "paused": "on battery",
        "writing": False,
    }


@pytest.mark.parametrize(
    ("method", "path", "name"),
    [
        ("GET", "/runs?limit=3&limit=4", "limit"),
        ("GET", "/runs?before=x&before=9", "before"),
        ("GET", "/history?hours=2&hours=3", "hours"),
        ("GET", "/cases?limit=2&limit=3", "limit"),
        ("POST", "/train?practice_minutes=2&practice_minutes=3", "practice_minutes"),
        ("POST", "/adapters/rollback?expected=2&expected=3", "expected"),
    ],
)
def test_a_query_parameter_that_is_given_twice_is_refused(
    http: httpx.Client, method: str, path: str, name: str
) -> None:
    assert_shape(http.request(method, path, headers=OWNED), 400, "bad_request", name)


def test_unknown_query_parameters_of_what_only_reads_are_ignored(http: httpx.Client) -> None:
    assert http.get("/runs?cache=1&cache=2").status_code == 200


def test_practice_is_asked_for_by_its_minutes(http: httpx.Client, server: EchoServer) -> None:
    for wrong in ("0", "-1", "1441", "x", "nan"):
        answer = http.post(f"/train?practice_minutes={wrong}")
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "practice_minutes", wrong
    run = http.post("/train?practice_minutes=2.5").json()
    assert run["trigger"] == "practice"
    server.operator.known_runs[0] = make_run(1, progress=Progress(2, 9, writing=True))
    assert http.get("/train/1").json()["progress"]["writing"] is True


def test_what_the_next_run_waits_for(http: httpx.Client) -> None:
    learning = http.get("/learning").json()
    assert learning["waits"] == "12 of 400 failure cases" and learning["level"] == 0.0068
    assert learning["against_base"] == {"golden set": [-0.004, -0.012, 0.005], "sql": [0.06, 0.03, 0.09]}


def test_gains_are_figures_or_a_reason(http: httpx.Client, server: EchoServer) -> None:
    found = http.get("/gains").json()
    assert (found["adapter"], found["reason"]) == (3, None)
    measured = found["measured"]
    assert (measured["before"], measured["after"], measured["speed_gain"]) == (2.44, 2.59, [0.06, 0.03, 0.08])
    assert measured["summary"].startswith("2.44 → 2.59 tokens a call, +6.1 % (+4.0 % to +8.0 %), on 214 answers")
    reason = "no training run has been judged yet"
    server.operator.gains_state = GainsState(0, None, None, reason)
    assert http.get("/gains").json() == {"adapter": 0, "measured": None, "measured_at": None, "reason": reason}


def test_practice_is_turned_on_and_off(http: httpx.Client, server: EchoServer) -> None:
    assert http.get("/practice").json() == {"on": False, "fixed": None, "waits": None}
    for on in (True, True, False, True):
        answer = http.put("/practice", json={"on": on})
        assert (answer.status_code, answer.json()["on"]) == (200, on)
    for wrong in (1, "true", None, [True]):
        assert_shape(http.put("/practice", json={"on": wrong}), 400, "bad_request", "on")
    assert_shape(http.put("/practice", json={}), 400, "bad_request", "on")
    assert_shape(http.put("/practice", json={"on": False, "now": True}), 400, "bad_request", "now")
    assert_shape(http.put("/practice"), 415, "unsupported_media_type")
    twice = http.put("/practice", content='{"on": true, "on": false}', headers={"content-type": "application/json"})
    assert_shape(twice, 400, "bad_request", "on")
    assert_shape(http.put("/practice?on=false", json={"on": False}), 400, "bad_request", "on")
    assert http.get("/practice").json()["on"] is True
    server.operator.practice_state = PracticeState(True, "training.practice is set", "requests are being answered")
    assert_shape(http.put("/practice", json={"on": False}), 409, "conflict")
    fixed = {"on": True, "fixed": "training.practice is set", "waits": "requests are being answered"}
    assert http.get("/practice").json() == fixed


def test_figures_that_are_not_finite_are_sent_as_null(http: httpx.Client, server: EchoServer) -> None:
    verdict = Verdict(False, "worse", 30, 2_000, math.nan, -math.inf, 0.5, {"sql": (math.nan, 0.0, 1.0)})
    run = make_run(1, RunState.REJECTED, Progress(1, 2, math.nan, math.inf))
    server.operator.known_runs.append(replace(run, verdict=verdict))
    shown = http.get("/train/1").json()
    assert (shown["progress"]["loss"], shown["progress"]["grad_norm"]) == (None, None)
    assert (shown["verdict"]["gain"], shown["verdict"]["low90"], shown["verdict"]["high90"]) == (None, None, 0.5)
    assert shown["verdict"]["domains"] == {"sql": [None, 0.0, 1.0]}


@pytest.mark.parametrize("number", ["0", "-1", "x", "1.5", str(2**63), "9" * 5_000])
def test_a_run_number_that_cannot_be_is_named(http: httpx.Client, number: str) -> None:
    assert_shape(http.get(f"/train/{number}"), 400, "bad_request", "id")


def test_numbers_in_paths_and_queries_have_no_spaces_and_underscores(http: httpx.Client) -> None:
    tried = set[str]()
    for path, ways in http.get("/openapi.json").json()["paths"].items():
        parameters = [(method, each) for method, way in ways.items() for each in way.get("parameters", [])]
        for method, parameter in parameters:
            kinds = {kind.get("type") for kind in parameter["schema"].get("anyOf", [parameter["schema"]])}
            if parameter["in"] == "header" or not kinds & {"integer", "number"}:
                continue
            name = parameter["name"]
            tried.add(name)
            for wrong in ("\r1", "1_0", "1 "):
                url = path.replace(f"{{{name}}}", quote(wrong))
                query = {name: wrong} if parameter["in"] == "query" else None
                answer = http.request(method, url, params=query, headers=OWNED)
                assert_shape(answer, 400, "bad_request", name)
    assert tried == {"id", "limit", "before", "hours", "practice_minutes", "expected"}


def test_an_unknown_run_is_not_found(http: httpx.Client) -> None:
    assert_shape(http.get("/train/7"), 404, "not_found")


def test_runs_are_paged_from_the_newest_on(http: httpx.Client, server: EchoServer) -> None:
    server.operator.known_runs += [make_run(number, RunState.REJECTED) for number in range(1, 26)]

    def page(**query: int) -> list[int]:
        return [run["id"] for run in http.get("/runs", params=query).json()["runs"]]

    assert page() == list(range(25, 5, -1))
    assert page(before=6) == [5, 4, 3, 2, 1]
    assert page(limit=2) == [25, 24] and page(limit=2, before=24) == [23, 22]
    assert page(limit=100, before=1) == []
    assert (
        http.get("/runs/7").json()
        == http.get("/train/7").json()
        == http.get("/runs?limit=1&before=8").json()["runs"][0]
    )
    for field, wrong in (("limit", "0"), ("limit", "101"), ("limit", "x"), ("before", "0"), ("before", str(2**63))):
        assert_shape(http.get("/runs", params={field: wrong}), 400, "bad_request", field)


def test_a_run_is_ended_once(http: httpx.Client, server: EchoServer) -> None:
    server.operator.known_runs.append(make_run(1))
    ended = http.delete("/runs/1")
    assert ended.status_code == 200
    assert (ended.json()["state"], ended.json()["error"]) == ("ended", "ended by an operator")
    assert ended.json() == http.get("/runs/1").json()
    assert_shape(http.delete("/runs/1"), 409, "conflict")
    assert_shape(http.delete("/runs/2"), 404, "not_found")
    assert_shape(http.get("/runs/2"), 404, "not_found")
    assert_shape(http.delete("/runs/0"), 400, "bad_request", "id")
    assert_shape(http.request("DELETE", "/runs/1", json={"force": True}), 400, "bad_request", "body")
    assert_shape(http.delete("/runs/1?force=1"), 400, "bad_request", "force")


SECRET = "a text of somebody's"


def test_requests_under_way_are_shown_without_their_text_and_ended() -> None:
    """Its client has what there is of the answer, in the words of the route that it came by."""
    server = EchoServer(engine=EchoEngine(pause=0.05))
    long = SECRET * 50
    chat = {"messages": [{"role": "user", "content": long}]}
    asked = {"/generate": {"prompt": long}, "/v1/completions": {"prompt": long}, "/v1/chat/completions": chat}
    with (
        server.served() as address,
        httpx.Client(base_url=address, headers=OWNED, timeout=60) as http,
        ThreadPoolExecutor(3) as pool,
    ):
        assert http.get("/requests").json() == {"requests": []}
        answers = {path: pool.submit(http.post, path, json=body) for path, body in asked.items()}
        until(lambda: len(server.engine.requests()) == 3 and all(t.sent > 3 for t in server.engine.tickets))
        shown = http.get("/requests")
        assert SECRET not in shown.text and "somebody" not in shown.text
        found = {each["route"]: each for each in shown.json()["requests"]}
        assert found.keys() == asked.keys()
        one = found["/generate"]
        assert sorted(one) == [
            "adapter", "id", "prompt_tokens", "route", "running_seconds", "state", "tokens", "waiting_seconds"
        ]  # fmt: skip
        assert (one["state"], one["prompt_tokens"], one["adapter"]) == ("running", len(long) + 2, 3) and one[
            "tokens"
        ] > 3
        ended = {path: http.delete(f"/requests/{prefix}{found[path]['id']}") for path, prefix in PREFIXES.items()}
        assert {answer.status_code for answer in ended.values()} == {202}
        assert [answer.json()["id"] for answer in ended.values()] == [found[path]["id"] for path in PREFIXES]
        whole = {path: answer.result(60).json() for path, answer in answers.items()}
        assert whole["/generate"]["finish_reason"] == "cancelled" and whole["/generate"]["id"] == one["id"]
        # OpenAI's word for an answer that is not whole.
        assert whole["/v1/completions"]["choices"][0]["finish_reason"] == "length"
        assert whole["/v1/chat/completions"]["choices"][0]["finish_reason"] == "length"
        texts = [
            whole["/generate"]["text"],
            whole["/v1/completions"]["choices"][0]["text"],
            whole["/v1/chat/completions"]["choices"][0]["message"]["content"],
        ]
        assert all(3 < len(text) < len(long) and long.startswith(text) for text in texts)
        assert http.get("/requests").json() == {"requests": []}
        gone = http.delete(f"/requests/{one['id']}")
        assert_shape(gone, 404, "not_found")
        assert_shape(http.delete("/requests/" + "x" * 200), 400, "bad_request", "id")
        assert_shape(http.request("DELETE", f"/requests/{one['id']}", json={"a": 1}), 400, "bad_request", "body")
    assert server.value('redraft:request_success_total{finished_reason="abort"}') == 3


PREFIXES = {"/generate": "", "/v1/completions": "cmpl-", "/v1/chat/completions": "chatcmpl-"}
"""Of the ids in their answers."""


@pytest.mark.parametrize("key", [b"", b"a b", b"x" * 129, b"\xe9"])
def test_an_idempotency_key_is_bounded(http: httpx.Client, key: bytes) -> None:
    assert_shape(http.post("/train", headers={b"Idempotency-Key": key}), 400, "bad_request", "Idempotency-Key")


def test_routes_without_a_body_refuse_one(http: httpx.Client) -> None:
    for route in ("/train", "/adapters/rollback", "/adapters/2/activate"):
        assert_shape(http.post(route, json={"force": True}), 400, "bad_request", "body")
        assert_shape(http.post(f"{route}?force=1"), 400, "bad_request", "force")
        assert_shape(http.post(route, content=b"x" * 30_000), 413, "body_too_large")
    assert http.post("/train", json={}).status_code == 202


def test_adapters_are_listed_activated_and_rolled_back(http: httpx.Client) -> None:
    listed = http.get("/adapters").json()
    assert listed["active"] == 3
    assert [(ref["id"], ref["state"]) for ref in listed["adapters"]] == [(3, "active"), (2, "retired")]
    assert "folder" not in listed["adapters"][0]
    assert http.post("/adapters/2/activate").json()["active"] == 2
    assert http.post("/adapters/0/activate").json() == {"active": 0, "adapter": None}
    assert_shape(http.post("/adapters/9/activate"), 404, "not_found")
    assert_shape(http.post("/adapters/-1/activate"), 400, "bad_request", "id")
    assert_shape(http.post("/adapters/rollback?expected=2"), 409, "conflict")
    for wrong in ("-1", "x", "", "3&expected=3"):
        assert_shape(http.post(f"/adapters/rollback?expected={wrong}"), 400, "bad_request", "expected")
    assert http.post("/adapters/rollback?expected=3").json() == {"active": 0, "adapter": None}
    assert_shape(http.post("/adapters/rollback"), 409, "conflict")


def test_what_is_erased_is_said_field_by_field(http: httpx.Client, server: EchoServer) -> None:
    def erase(**body: object) -> httpx.Response:
        return http.request("DELETE", "/generations", json=body, headers=OWNED)

    assert erase(client="ada").json() == {"generations": 2, "adapters": [3], "revoked": []}
    assert erase(everything=True, retire_adapters=True).json() == {"generations": 2, "adapters": [3], "revoked": [3]}
    long = "ada@" + 200 * "x"
    erase(ids=["chatcmpl-ab", "cmpl-cd", "resp_ef", "msg_01", "23"], client=long, domain="sql")
    erase(before="2026-01-01T09:00:00+09:00")
    assert server.operator.erased == [
        (Selection(client="ada"), False),
        (Selection(everything=True), True),
        (Selection(ids=frozenset({"ab", "cd", "ef", "01", "23"}), client=client_tag(long), domain="sql"), False),
        (Selection(before=datetime(2026, 1, 1, tzinfo=UTC)), False),
    ]
    server.operator.erased.clear()
    for field, wrong in (
        ("ids", {"ids": []}),
        ("ids", {"ids": "ab"}),
        ("ids.0", {"ids": [""]}),
        ("ids", {"ids": ["a"] * 1001}),
        ("client", {"client": ""}),
        ("domain", {"domain": 3}),
        ("before", {"before": "2026-01-01T00:00:00"}),
        ("before", {"before": "yesterday"}),
        ("before", {"before": 1767225600}),
        ("before", {"before": "1767225600"}),
        ("everything", {"everything": 1}),
        ("retire_adapters", {"client": "ada", "retire_adapters": "yes"}),
        ("clients", {"clients": "ada"}),
        (None, {}),
        (None, {"client": "ada", "everything": True}),
        (None, {"retire_adapters": True}),
    ):
        assert_shape(erase(**wrong), 400, "bad_request", field)
    assert_shape(http.delete("/generations", headers=OWNED), 415, "unsupported_media_type")
    assert_shape(http.delete("/generations?client=ada", headers=OWNED), 400, "bad_request", "client")
    twice = {"content": b'{"client": "ada", "client": "bob"}', "headers": OWNED | {"content-type": "application/json"}}
    assert_shape(http.request("DELETE", "/generations", **twice), 400, "bad_request", "client")  # pyright: ignore[reportArgumentType]
    assert server.operator.erased == []


class RefusingOperator(InMemoryOperator):
    def activate(self, adapter_id: int) -> AdapterRef | None:
        raise AdapterRefused("the adapter belongs to another draft")

    def rollback(self, expected: int | None = None) -> AdapterRef | None:
        raise StoreError("select * from adapters where folder = '/secret'")


def test_a_refused_adapter_is_a_conflict_and_internal_errors_are_not_disclosed() -> None:
    with EchoServer(operator=RefusingOperator()).served() as address:
        assert_shape(httpx.post(f"{address}/adapters/2/activate"), 409, "adapter_refused")
        trouble = httpx.post(f"{address}/adapters/rollback")
        assert_shape(trouble, 500, "store_error")
        assert "secret" not in trouble.text


class SlowOperator(InMemoryOperator):
    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()

    def activate(self, adapter_id: int) -> AdapterRef | None:
        self.go.wait(60)
        return None


def test_a_slow_operator_does_not_block_other_requests() -> None:
    operator = SlowOperator()
    with (
        EchoServer(operator=operator).served() as address,
        httpx.Client(base_url=address, timeout=60.0, limits=httpx.Limits(max_connections=None)) as http,
    ):
        callers = [threading.Thread(target=http.post, args=("/adapters/2/activate",), daemon=True) for _ in range(50)]
        for caller in callers:
            caller.start()
        try:
            time.sleep(0.3)
            assert http.get("/health/live").status_code == 200
            assert http.post("/generate", json={"prompt": "ab"}).json()["text"] == "ab"
            assert http.get("/metrics").status_code == 200
            assert all(caller.is_alive() for caller in callers), "answered while all of them waited"
        finally:
            operator.go.set()
            for caller in callers:
                caller.join(60)
        assert not any(caller.is_alive() for caller in callers)


def test_health_distinguishes_alive_from_ready(http: httpx.Client, server: EchoServer) -> None:
    assert http.get("/health/live").json() == {"status": "alive"}
    ready = http.get("/health/ready")
    assert ready.status_code == http.get("/health").status_code == 200
    assert (ready.json()["status"], ready.json()["adapter"]) == ("ready", 3)
    server.engine.dead = "no progress for 61 s"
    unready = http.get("/health/ready")
    assert_shape(unready, 503, "unavailable")
    assert_shape(http.get("/health"), 503, "unavailable")
    assert unready.json()["error"]["message"] == "no progress for 61 s"
    assert http.get("/health/live").status_code == 200
    assert_shape(http.post("/generate", json={"prompt": "a"}), 503, "unavailable")


class RaisingEngine(EchoEngine):
    def status(self) -> object:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise AssertionError("asked")


def test_the_live_probe_never_asks_the_engine() -> None:
    with EchoServer(engine=RaisingEngine()).served() as address:
        assert httpx.get(f"{address}/health/live").status_code == 200
        assert_shape(httpx.get(f"{address}/health/ready"), 500, "internal_error")


def test_metrics_are_scraped_in_the_format_asked_for(http: httpx.Client, server: EchoServer) -> None:
    server.metrics.watch_engine(server.engine.status)
    plain = http.get("/metrics")
    assert plain.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert scraped(plain.text)["redraft:adapter_active"] == 3
    asked = "application/openmetrics-text;version=1.0.0;q=0.6,text/plain;version=0.0.4;q=0.4"
    opened = http.get("/metrics", headers={"accept": asked})
    assert opened.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    assert opened.text.endswith("# EOF\n")
    names = {family.name for family in text_string_to_metric_families(opened.text)}
    assert "redraft:spec_decode_num_drafts" in names
    for odd in ("application/openmetrics-text;version=x", "text/plain;version=x", "*/*", ",;,", ""):
        assert http.get("/metrics", headers={"accept": odd}).status_code == 200


def test_unknown_routes_and_methods_have_the_same_shape(http: httpx.Client) -> None:
    for path in ("/page", "/generate/", "/docs", "/adapters/", "/adapters/2/delete", "/..%2f..%2fetc/passwd", "/%ff"):
        assert_shape(http.get(path), 404, "not_found")
    for method, path in (("GET", "/generate"), ("PUT", "/train"), ("DELETE", "/adapters"), ("POST", "/health/live")):
        refused = http.request(method, path)
        assert_shape(refused, 405, "method_not_allowed")
        assert refused.headers["allow"]


def test_the_schema_names_every_route_and_the_error_shape(http: httpx.Client) -> None:
    schema = http.get("/openapi.json").json()
    assert sorted(schema["paths"]) == [
        "/adapters",
        "/adapters/rollback",
        "/adapters/{id}/activate",
        "/adapters/{id}/files",
        "/cases",
        "/events",
        "/gains",
        "/generate",
        "/generations",
        "/health/live",
        "/health/ready",
        "/history",
        "/learning",
        "/metrics",
        "/practice",
        "/requests",
        "/requests/{id}",
        "/runs",
        "/runs/{id}",
        "/session",
        "/train",
        "/train/{id}",
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/models",
        "/v1/models/{id}",
        "/v1/responses",
        "/v1/responses/{id}",
    ]
    for path, operations in schema["paths"].items():
        for operation in operations.values():
            assert "422" not in operation["responses"]
            shape = operation["responses"]["4XX"]["content"]["application/json"]["schema"]
            name = "AnthropicErrorAnswer" if path.startswith("/v1/messages") else "ErrorAnswer"
            assert shape == {"$ref": f"#/components/schemas/{name}"}
    fields = schema["components"]["schemas"]["GenerateRequest"]
    assert fields["additionalProperties"] is True
    assert schema["components"]["schemas"]["EraseRequest"]["additionalProperties"] is False
    assert "prompt" in fields["properties"]
