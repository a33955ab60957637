"""The page's files and routes: what they may load, what they say of hostile text, and streams that are bounded and end."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from html.parser import HTMLParser
from importlib.resources import files
from typing import Any

import httpx
import pytest

from service.api import Doors, Feed, build_startup_api
from service.api.page import feed as feed_module
from service.api.page import routes as page_routes
from service.core import (
    AdapterRecord,
    AdapterState,
    DepthCounts,
    Disagreement,
    EngineStatus,
    History,
    Judgement,
    Overloaded,
    PracticeState,
    Progress,
    Round,
    RunState,
    StoreError,
    TrafficPoint,
    TrainingRun,
    Verdict,
)
from service.metrics import Metrics
from tests.support.echo_engine import OWNED, Codepoints, EchoServer, OpenHouse, make_run

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>\u202egnp\u0007\u2028"
NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
STATIC = {item.name: item.read_text(encoding="utf-8") for item in (files("service.api.page") / "static").iterdir()}
TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}


@pytest.fixture
def server() -> EchoServer:
    return EchoServer()


@pytest.fixture
def http(server: EchoServer) -> Iterator[httpx.Client]:
    with server.served() as address, httpx.Client(base_url=address, timeout=20) as client:
        yield client


def assert_guarded(answer: httpx.Response) -> None:
    assert answer.headers["content-security-policy"] == (
        "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'self'"
    )
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"


def test_the_page_and_its_files_are_served_with_a_policy(http: httpx.Client) -> None:
    for path, name in [("/", "index.html"), *((f"/page/{name}", name) for name in STATIC)]:
        answer = http.get(path)
        assert (answer.status_code, answer.text) == (200, STATIC[name])
        assert answer.headers["content-type"].split(";")[0] == TYPES[name.rpartition(".")[2]]
        assert_guarded(answer)
    assert {"index.html", "page.js", "charts.js", "page.css"} <= set(STATIC)


@pytest.mark.parametrize(
    "path", ["/page/", "/page/nothing.js", "/page/..%2ffiles.py", "/page/%2e%2e/files.py", "/index.html"]
)
@pytest.mark.promise(28)
def test_no_other_file_is_served(http: httpx.Client, path: str) -> None:
    answer = http.get(path)
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "not_found"


class Markup(HTMLParser):
    """Collects elements and what they refer to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.refers: list[str] = []
        self.ids: list[str] = []
        self.labelled: list[str] = []
        self.attributes: set[str] = set()
        self.inline = 0
        self._script = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.attributes |= set(found)
        self.refers += [found[name] for name in ("src", "href", "action") if name in found]
        self.ids += [found["id"]] if "id" in found else []
        self.labelled += [found[name] for name in ("for", "aria-labelledby") if name in found]
        self._script = tag in {"script", "style"}

    def handle_endtag(self, tag: str) -> None:
        self._script = False

    def handle_data(self, data: str) -> None:
        self.inline += self._script and bool(data.strip())


def test_the_page_loads_its_own_files_alone_and_runs_nothing_inside_itself() -> None:
    page = Markup(STATIC["index.html"])
    loaded = [reference for reference in page.refers if not reference.startswith("#")]
    assert sorted(loaded) == ["metrics", "page/icon.svg", "page/page.css", "page/page.js"]
    assert not page.inline and "style" not in page.attributes
    assert not [name for name in page.attributes if name.startswith("on")]
    assert len(page.ids) == len(set(page.ids)) and set(page.labelled) <= set(page.ids)
    imported = {name for text in STATIC.values() for name in re.findall(r"from '\./([\w.]+)'", text)}
    assert imported == {name for name in STATIC if name.endswith(".js")} - {"page.js"}
    assert set(re.findall(r"\w+://[\w./]*", "".join(STATIC.values()))) == {"http://www.w3.org/2000/svg"}


def test_scripts_name_elements_that_exist_and_make_no_html() -> None:
    scripts = "".join(text for name, text in STATIC.items() if name.endswith(".js"))
    ids = set(Markup(STATIC["index.html"]).ids)
    named = set(re.findall(r"(?:byId|setId|legend)\('([\w-]+)'", scripts))
    assert len(named) > 50 and named <= ids, named - ids
    for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function(", "DOMParser"):
        assert way not in scripts, way
    for place in ("localStorage", "sessionStorage", "indexedDB", "document.cookie", "caches."):
        assert place not in scripts, place


def test_while_models_load_the_page_is_there_and_says_the_stage() -> None:
    api = build_startup_api(stage=lambda: "loading", metrics=Metrics(3), doors=Doors(OpenHouse(), ["server"]))

    async def get(path: str) -> httpx.Response:
        transport = httpx.ASGITransport(api)
        async with httpx.AsyncClient(transport=transport, base_url="http://server", headers=OWNED) as client:
            return await client.get(path)

    assert asyncio.run(get("/")).text == STATIC["index.html"]
    assert asyncio.run(get("/page/page.js")).status_code == 200
    for path in ("/events", "/history", "/cases"):
        refused = asyncio.run(get(path))
        assert refused.status_code == 503
        assert refused.json()["error"]["message"] == "the server is starting: loading"


# ------------------------------------------------------------------------------------------------- history and cases


def test_history_is_shown_field_by_field(http: httpx.Client, server: EchoServer) -> None:
    won = Judgement(NOW, Verdict(True, "faster", 40, 900, 0.2, 0.1, float("nan"), {HOSTILE: (0.1, 0.0, 0.2)}))
    server.overview.known = History(
        NOW - timedelta(hours=1),
        NOW,
        (TrafficPoint(NOW, 3, 20, 400, 100, 300, 200),),
        (DepthCounts(3, (100, 80), (90, 20)),),
        (AdapterRecord(3, 0, 4, AdapterState.ACTIVE, NOW, won, None),),
    )
    answer = http.get("/history?hours=1")
    assert_guarded(answer)
    shown = answer.json()
    at = "2026-03-01T12:00:00Z"
    assert shown["end"] == at
    assert shown["points"] == [
        {"at": at, "adapter": 3, "generations": 20, "tokens": 400, "rounds": 100, "drafted": 300, "accepted": 200}
    ]
    assert shown["depths"] == [{"adapter": 3, "drafted": [100, 80], "accepted": [90, 20]}]
    (adapter,) = shown["adapters"]
    assert (adapter["id"], adapter["state"], adapter["watch"]) == (3, "active", None)
    verdict = adapter["gate"]["verdict"]
    assert (verdict["gain"], verdict["low90"], verdict["high90"]) == (0.2, 0.1, None)
    assert verdict["domains"] == {HOSTILE: [0.1, 0.0, 0.2]}


def test_a_history_is_read_once_for_all_who_ask_in_two_seconds(
    http: httpx.Client, server: EchoServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    history = server.overview.history
    server.overview.history = lambda hours: (read.append(hours), history(hours))[1]
    for hours in (24, 24, 24, 1, 1):
        assert http.get(f"/history?hours={hours}").status_code == 200
    assert read == [24, 1]
    monkeypatch.setattr(page_routes, "FRESH_SECONDS", 0.0)
    http.get("/history?hours=1")
    assert read == [24, 1, 1]


@pytest.mark.parametrize("query", ["hours=0", "hours=8785", "hours=x", "hours=1.5"])
def test_the_time_that_is_shown_is_bounded(http: httpx.Client, query: str) -> None:
    answer = http.get(f"/history?{query}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "hours")


def case(**changed: Any) -> Disagreement:
    tokens = tuple(map(ord, "before "))
    return replace(Disagreement("g", 3, "sql", "ada", 3, tokens, ord("x"), ord("y"), 0.01, 0.9, NOW), **changed)


def test_hostile_texts_of_cases_are_json_strings_and_never_a_page(http: httpx.Client, server: EchoServer) -> None:
    server.overview.cases = [case(domain=HOSTILE, client=HOSTILE, context=tuple(map(ord, HOSTILE)), adapter=None)]
    answer = http.get("/cases", headers=OWNED)
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["cache-control"] == "no-store"
    assert_guarded(answer)
    (shown,) = answer.json()["cases"]
    assert (shown["domain"], shown["client"], shown["context"]) == (HOSTILE, HOSTILE, HOSTILE)
    assert (shown["drafted"], shown["target"], shown["adapter"]) == ("x", "y", None)


class OneByteTokens(Codepoints):
    def token_bytes(self, token: int) -> bytes:
        return bytes([token])


def test_a_context_that_begins_inside_a_character_is_text() -> None:
    server = EchoServer(encoder=OneByteTokens())
    server.overview.cases = [case(context=(0xA9, *"é!".encode()), drafted=0xC3)]
    with server.served() as address:
        (shown,) = httpx.get(f"{address}/cases", headers=OWNED).json()["cases"]
    assert (shown["context"], shown["drafted"]) == ("é!", "\ufffd")


def test_no_more_cases_come_than_asked_for(http: httpx.Client, server: EchoServer) -> None:
    server.overview.cases = [case(position=i) for i in range(50)]
    assert [len(http.get(f"/cases?limit={n}", headers=OWNED).json()["cases"]) for n in (1, 20, 100)] == [1, 20, 50]
    assert http.get("/cases?limit=101", headers=OWNED).status_code == 400


def test_the_newest_cases_come_by_the_page(http: httpx.Client, server: EchoServer) -> None:
    server.overview.cases = [case(position=i, tie=i == 3, case=i + 1) for i in range(5)]

    def places(query: str) -> list[tuple[int, bool]]:
        shown = http.get(f"/cases?{query}", headers=OWNED).json()["cases"]
        return [(each["position"], each["tie"]) for each in shown]

    assert places("order=newest&limit=3") == [(4, False), (3, True), (2, False)]
    assert places("order=newest&limit=3&before=3") == [(1, False), (0, False)]
    assert places("order=worst&limit=2") == places("limit=2") == [(0, False), (1, False)]
    for query, name in (("order=best", "order"), ("before=0", "before"), ("order=newest&order=worst", "order")):
        refused = http.get(f"/cases?{query}", headers=OWNED)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)


def test_a_request_may_do_without_a_draft(http: httpx.Client, server: EchoServer) -> None:
    for count in (0, 5, None):
        body = {"prompt": "ab", **({} if count is None else {"num_draft_tokens": count})}
        assert http.post("/generate", json=body).status_code == 200
        assert server.engine.tickets[-1].prompt.num_draft_tokens == count
    assert http.post("/generate", json={"prompt": "ab", "num_draft_tokens": 65}).status_code == 400


# ------------------------------------------------------------------------------------------------------------ events


@contextmanager
def listening(http: httpx.Client) -> Generator[Iterator[dict[str, Any]]]:
    """The snapshots of a stream."""
    with http.stream("GET", "/events") as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"].split(";")[0] == "text/event-stream"
        assert_guarded(answer)
        yield (json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: "))


def test_a_snapshot_comes_at_once_and_after_every_change(http: httpx.Client, server: EchoServer) -> None:
    server.overview.run = make_run(7, RunState.TRAINING, Progress(3, 12, float("nan"), 1.5, 900.0, 4.5))
    with listening(http) as snapshots:
        first = next(snapshots)
        assert (first["model"], first["ready"], first["adapter"], first["waiting"]) == ("echo", True, 3, 0)
        assert first["memory"]["active"] == 0
        assert (first["run"]["id"], first["run"]["progress"]["step"], first["run"]["progress"]["loss"]) == (7, 3, None)
        assert first["totals"]["generation_tokens_total"] == 0
        assert first["practice"] == {"on": False, "fixed": None, "waits": None}
        changed_at = time.monotonic()
        server.metrics.observe([Round(3, 0, 4, 2, 3)], 0.01)
        counts = next(snapshots)["totals"]
        assert time.monotonic() - changed_at < 2.0
        assert [counts[f"spec_decode_num_{name}_tokens_total"] for name in ("draft", "accepted")] == [4, 2]
        assert (counts["generation_tokens_total"], counts["rounds_total"]) == (3, 1)


def test_a_snapshot_comes_when_practice_is_turned_on(http: httpx.Client) -> None:
    with listening(http) as snapshots:
        assert next(snapshots)["practice"]["on"] is False
        assert http.put("/practice", json={"on": True}).status_code == 200
        assert next(snapshots)["practice"]["on"] is True


def test_totals_are_of_counters_without_labels(server: EchoServer) -> None:
    before = server.metrics.totals()
    server.metrics.observe([Round(3, 0, 4, 2, 3)], 0.01)
    assert {name for name, value in server.metrics.totals().items() if value != before[name]} == {
        "generation_tokens_total",
        "rounds_total",
        *(f"spec_decode_num_{name}_total" for name in ("drafts", "draft_tokens", "accepted_tokens", "tested_tokens")),
    }


def test_nothing_is_sent_while_nothing_changes(http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "SECONDS", 0.02)
    monkeypatch.setattr(feed_module, "SILENCE", 0.3)
    with http.stream("GET", "/events") as answer:
        lines = (line for line in answer.iter_lines() if line)
        assert [next(lines).split(":")[0] for _ in range(2)] == ["event", "data"]
        sent_at = time.monotonic()
        assert next(lines) == ": keep-alive"
        assert 0.2 < time.monotonic() - sent_at < 5.0


def test_no_more_pages_listen_than_may_and_one_that_leaves_makes_room(
    http: httpx.Client, server: EchoServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed_module, "LISTENERS", 2)
    monkeypatch.setattr(feed_module, "SECONDS", 0.05)
    with listening(http) as one:
        next(one)
        with listening(http) as two:
            next(two)
            refused = http.get("/events")
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
            assert refused.json()["error"]["code"] == "overloaded"
            assert http.get("/health/ready").status_code == 200
        end = time.monotonic() + 10.0
        while server.feed.listeners > 1:
            assert time.monotonic() < end, "its place is not given back"
            time.sleep(0.01)
        with listening(http) as two:
            next(two)


def test_streams_end_when_the_server_does_and_none_begins(http: httpx.Client, server: EchoServer) -> None:
    with listening(http) as snapshots:
        next(snapshots)
        ended_at = time.monotonic()
        server.feed.end()
        assert list(snapshots) == []
        assert time.monotonic() - ended_at < 2.5
    assert http.get("/events").status_code == 503


class Numbered:
    """An engine's status that differs each time."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self) -> EngineStatus:
        self.asked += 1
        return EngineStatus(True, "serving", self.asked, 0, 0.0, 0, 0)


def no_run() -> TrainingRun | None:
    return None


def no_practice() -> PracticeState:
    return PracticeState(False)


def always() -> bool:
    return True


def test_a_slow_listener_gets_the_newest_snapshot_and_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "SECONDS", 0.02)
    status = Numbered()
    feed = Feed("model", status, Metrics(3), no_run, no_practice)

    async def both() -> tuple[list[int], list[int]]:
        quick, slow = feed.listen(always).body_iterator, feed.listen(always).body_iterator
        late = [await rows(slow)]
        seen = [await rows(quick) for _ in range(30)]
        return seen, [*late, await rows(slow)]

    seen, late = asyncio.run(both())
    assert seen == sorted(set(seen)) and len(seen) == 30
    # What came meanwhile was dropped, not gathered.
    assert late[1] >= seen[-1]


def test_listeners_share_a_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "SECONDS", 0.05)
    status = Numbered()
    feed = Feed("model", status, Metrics(3), no_run, no_practice)

    async def listen() -> None:
        frames = feed.listen(always).body_iterator
        for _ in range(10):
            await rows(frames)

    async def together() -> None:
        await asyncio.gather(*(listen() for _ in range(6)))

    asyncio.run(together())
    assert 10 <= status.asked < 30, "each of the six made its own"


async def rows(frames: Any) -> int:
    """Requests that run, by the next snapshot."""
    frame = (await anext(frames)).decode()
    return json.loads(frame.partition("data: ")[2])["rows"]


def test_a_database_that_is_away_leaves_the_engine_s_figures(server: EchoServer) -> None:
    def away() -> TrainingRun | None:
        raise StoreError("the database is away")

    feed = Feed("model", server.engine.status, Metrics(3), away, no_practice)

    async def first() -> dict[str, Any]:
        async for frame in feed.listen(always).body_iterator:
            return json.loads(bytes(frame).partition(b"data: ")[2])  # pyright: ignore[reportArgumentType]
        raise AssertionError("nothing was sent")

    snapshot = asyncio.run(first())
    assert (snapshot["ready"], snapshot["run"]) == (True, None)


def test_a_listener_too_many_is_refused_before_it_takes_a_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "LISTENERS", 0)
    feed = Feed("model", Numbered(), Metrics(3), no_run, no_practice)
    with pytest.raises(Overloaded):
        feed.listen(always)
    assert feed.listeners == 0
