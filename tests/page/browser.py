"""Checks of the page in a real Chromium: `browser.py CHROMIUM REAL ECHO LOCKED KEY TOKEN TOKEN`, the three servers' addresses,
a key of the third, and the tokens of the first two, which have no key.

REAL: a server on a tiny pair with two adapters, the newest active. ECHO: one whose engine repeats its prompt and whose rows are
hostile. LOCKED: one that asks for a key, KEY is an operator's. Prints `ok NAME` or `failed NAME: why` for every check.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
import urllib.request
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, Request, Response, Route, expect, sync_playwright

FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking")
HOSTILE = "<script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">\u202egnp.exe\u0007"
SHOWN = HOSTILE.replace("\u202e", "⟨U+202E⟩").replace("\u0007", "⟨U+0007⟩")
PHONE = {"viewport": {"width": 360, "height": 740}, "is_mobile": True, "has_touch": True}
CHECKS: list[Callable[[Browser, str, str], None]] = []
LOCKED: list[str] = []
TOKENS: dict[str, str] = {}
"""By the address of a server."""


def check(function: Callable[[Browser, str, str], None]) -> Callable[[Browser, str, str], None]:
    CHECKS.append(function)
    return function


def fetch(url: str, body: object = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


@contextmanager
def opened(browser: Browser, address: str, **context: object) -> Generator[Page]:
    """The page at an address, opened by the link with the token. Fails on errors in its console, and on requests to other
    hosts."""
    inside = browser.new_context(**context)
    page = inside.new_page()
    wrong: list[str] = []
    page.on("console", lambda message: wrong.append(message.text) if message.type in {"error", "warning"} else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))

    def watch(request: Request) -> None:
        if not request.url.startswith(f"{address}/"):
            wrong.append(f"asked {request.url}")

    page.on("request", watch)
    page.goto(f"{address}/#token={TOKENS[address]}")
    expect(page.locator("#state")).to_have_text("Serving", timeout=20_000)
    yield page
    inside.close()
    assert not wrong, wrong


def loaded(page: Page) -> None:
    expect(page.locator("#adapters-box")).to_be_visible(timeout=20_000)


@check
def first_paint_within_a_second(browser: Browser, real: str, echo: str) -> None:
    times: list[float] = []
    for _ in range(3):
        with opened(browser, real) as page:
            entry = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? 9e9"
            page.wait_for_function(f"{entry} < 9e9")
            times.append(page.evaluate(entry))
    print("first paint, ms:", [round(one) for one in times])
    assert min(times) < 1000, times


@check
def a_generation_shows_within_two_seconds_and_history_after_a_reload(browser: Browser, real: str, echo: str) -> None:
    with opened(browser, real) as page:
        loaded(page)
        before = page.locator("#requests-note").inner_text()
        fetch(f"{real}/generate", {"prompt": "live", "max_tokens": 12})
        answered_at = time.monotonic()
        expect(page.locator("#requests-note")).not_to_have_text(before, timeout=10_000)
        took = time.monotonic() - answered_at
        print("shown after, s:", round(took, 2))
        assert took < 2.0, took
        expect(page.locator("#history-charts")).to_be_visible(timeout=20_000)
        page.reload()
        expect(page.locator("#history-charts")).to_be_visible(timeout=20_000)
        assert page.locator("#acceptance-chart circle").count() > 0
        assert "Acceptance rate over time" in (page.locator("#acceptance-chart").get_attribute("aria-label") or "")


@check
def gains_are_shown_with_their_interval_or_the_reason(browser: Browser, real: str, echo: str) -> None:
    with opened(browser, echo) as page:
        line, note = page.locator("#gain-line"), page.locator("#gain-note")
        expect(line).to_contain_text("Your draft: 2.44 → 2.59 tokens a call, +6.1 %", timeout=20_000)
        expect(note).to_contain_text("61.0 → 64.7 tokens per second")
    with opened(browser, real) as page:
        expect(page.locator("#gain-line")).to_contain_text("Nothing gained yet: ", timeout=20_000)


@check
def answers_are_coloured_as_they_arrive(browser: Browser, real: str, echo: str) -> None:
    with opened(browser, echo) as page:
        page.fill("#prompt", "abcdefghijklmnopqrstuvwxyz" * 4)
        page.click("#generate")
        expect(page.locator("#answer mark").first).to_be_visible()
        assert len(page.locator("#answer").inner_text()) < 26 * 4, "it came in one piece"
        expect(page.locator("#try-result")).to_contain_text("tokens/s", timeout=20_000)
        assert page.locator("#answer").inner_text() == "abcdefghijklmnopqrstuvwxyz" * 4
        # Every second token is drafted there.
        assert page.locator("#answer mark").count() == 52
        page.fill("#prompt", "x" * 900)
        page.click("#generate")
        page.click("#stop")
        expect(page.locator("#try-result")).to_have_text("Stopped.")


@check
def a_race_is_between_equal_answers(browser: Browser, real: str, echo: str) -> None:
    with opened(browser, real) as page:
        page.fill("#prompt", "a race of two")
        page.fill("#most", "24")
        bodies: list[dict[str, object]] = []
        page.on(
            "request",
            lambda request: bodies.append(json.loads(request.post_data or "{}")) if request.method == "POST" else None,
        )
        page.click("#race")
        expect(page.locator("#try-result")).to_contain_text("times as fast", timeout=60_000)
        assert page.locator("#try-result").inner_text().startswith("Identical: all "), page.locator(
            "#try-result"
        ).inner_text()
        assert page.locator("#answer").inner_text() == page.locator("#plain").inner_text()
        assert page.locator("#plain mark").count() == 0
        assert "tokens/s" in page.locator("#plain-figures").inner_text()
        assert [(body["temperature"], body["store"], body.get("num_draft_tokens")) for body in bodies] == [
            (0, False, None),
            (0, False, 0),
        ]


@check
def hostile_text_stays_text(browser: Browser, real: str, echo: str) -> None:
    with opened(browser, echo) as page:
        expect(page.locator("#cases-list li")).to_have_count(1, timeout=20_000)
        assert page.locator("#cases-list .context").inner_text() == SHOWN
        note = page.locator("#cases-list .note").inner_text()
        assert f"domain {SHOWN}" in note and f"client {SHOWN}" in note
        expect(page.locator("#adapters-table")).to_contain_text(SHOWN)
        expect(page.locator("#run-note")).to_contain_text(SHOWN)
        page.fill("#prompt", HOSTILE)
        page.click("#generate")
        expect(page.locator("#try-result")).to_contain_text("tokens/s", timeout=20_000)
        assert page.locator("#answer").inner_text() == SHOWN
        assert page.title() == "Redraft"
        assert page.locator("main img").count() == 0 and page.locator("main script").count() == 0
        assert page.evaluate("document.body.innerText.search(/[\\u202e\\u0007]/)") == -1


@check
def no_horizontal_scroll_on_a_phone(browser: Browser, real: str, echo: str) -> None:
    for address in (real, echo):
        with opened(browser, address, **PHONE) as page:
            loaded(page)
            width = page.evaluate("[document.documentElement.scrollWidth, window.innerWidth]")
            assert width[0] <= width[1] == 360, width
            wide = page.evaluate(
                "[...document.querySelectorAll('svg')]"
                ".filter((svg) => svg.getBoundingClientRect().right > 361).map((svg) => svg.id)"
            )
            assert wide == []


@check
def axe_finds_nothing_in_either_scheme(browser: Browser, real: str, echo: str) -> None:
    for address in (real, echo):
        for context in ({"color_scheme": "light"}, {"color_scheme": "dark"}, {**PHONE, "color_scheme": "dark"}):
            with opened(browser, address, **context) as page:
                loaded(page)
                page.locator("summary").click()
                found = Axe().run(page)
                assert found.violations_count == 0, found.generate_report()


@check
def dark_is_dark(browser: Browser, real: str, echo: str) -> None:
    def light(page: Page) -> int:
        color = page.evaluate("getComputedStyle(document.body).backgroundColor")
        return sum(int(part) for part in color.removeprefix("rgb(").removesuffix(")").split(","))

    with opened(browser, echo, color_scheme="light") as page:
        assert light(page) > 600
    with opened(browser, echo, color_scheme="dark") as page:
        assert light(page) < 150


@check
def nothing_moves(browser: Browser, real: str, echo: str) -> None:
    with opened(browser, echo, reduced_motion="reduce") as page:
        loaded(page)
        assert page.evaluate("document.getAnimations().length") == 0


@check
def the_keyboard_reaches_and_triggers_everything(browser: Browser, real: str, echo: str) -> None:
    with opened(browser, echo) as page:
        loaded(page)
        wanted = set(
            page.evaluate(
                "[...document.querySelectorAll('a, button, input, select, textarea, summary, [tabindex=\"0\"]')]"
                ".filter((node) => !node.disabled && node.checkVisibility())"
                ".map((node, index) => node.dataset.key = String(index))"
            )
        )
        reached: set[str] = set()
        for _ in range(len(wanted) + 3):
            page.keyboard.press("Tab")
            key, outline = page.evaluate(
                "[document.activeElement.dataset.key ?? '', getComputedStyle(document.activeElement).outlineStyle]"
            )
            assert not key or outline != "none", f"no focus ring on {key}"
            reached.add(key)
        assert wanted <= reached, page.evaluate(
            "(keys) => keys.map((key) => document.querySelector(`[data-key='${key}']`).outerHTML)",
            sorted(wanted - reached),
        )
        page.focus("#prompt")
        page.keyboard.press("Control+A")
        page.keyboard.type("typed")
        page.focus("#generate")
        page.keyboard.press("Enter")
        expect(page.locator("#answer")).to_have_text("typed", timeout=20_000)
        page.focus("#train")
        page.keyboard.press("Space")
        expect(page.locator("#train-result")).to_have_text("Run 1 was started.", timeout=20_000)
        page.focus("#hours")
        page.keyboard.press("ArrowUp")
        with page.expect_response("**/history?hours=1"):
            page.keyboard.press("Enter")


@check
def practice_is_a_switch_by_keyboard_and_on_a_phone(browser: Browser, real: str, echo: str) -> None:
    with opened(browser, echo) as page, opened(browser, echo, **PHONE) as phone:
        box = page.get_by_role("switch", name="Practise by itself")
        expect(box).to_be_enabled(timeout=20_000)
        expect(box).not_to_be_checked()
        box.focus()
        page.keyboard.press("Space")
        expect(page.locator("#practice-result")).to_have_text("Practice is on, after a restart too.", timeout=20_000)
        expect(box).to_be_checked()
        expect(box).to_be_focused()
        assert fetch(f"{echo}/practice")["on"] is True
        # Another page that is open follows, and its label is large enough to be touched.
        label = phone.get_by_text("Practise by itself")
        expect(phone.locator("#practice")).to_be_checked(timeout=20_000)
        label.tap()
        expect(phone.locator("#practice-result")).to_have_text("Practice is off, after a restart too.", timeout=20_000)
        expect(box).not_to_be_checked(timeout=20_000)
        # What the server did not do is not shown as done. (Other statuses would be errors in the console.)
        page.route(f"{echo}/practice", lambda route: route.fulfill(status=200, body="no answer"))
        box.click()
        expect(page.locator("#practice-result")).to_contain_text("Nothing was changed")
        expect(box).not_to_be_checked()


@check
def practice_that_is_fixed_says_why(browser: Browser, real: str, echo: str) -> None:
    with opened(browser, real) as page:
        box = page.get_by_role("switch", name="Practise by itself")
        expect(page.locator("#practice-why")).to_have_text(
            "Fixed: runs do not start automatically (training.enabled is false).", timeout=20_000
        )
        expect(box).to_be_disabled()
        assert "practice-note" in (box.get_attribute("aria-describedby") or "")


@check
def an_open_page_does_not_grow(browser: Browser, real: str, echo: str) -> None:
    with opened(browser, echo) as page:
        loaded(page)
        page.click("#generate")
        expect(page.locator("#try-result")).to_contain_text("tokens/s", timeout=20_000)
        count = "document.getElementsByTagName('*').length"
        page.wait_for_timeout(1500)
        before = page.evaluate(count)
        # Ten reads of the history, as an hour's.
        for _ in range(5):
            for hours in ("1", "24"):
                with page.expect_response("**/cases?*"):
                    page.select_option("#hours", hours)
                page.wait_for_timeout(100)
        page.click("#generate")
        page.wait_for_timeout(1500)
        assert page.evaluate(count) == before


@check
def open_for_2000_requests_it_takes_less_than_150_mb(browser: Browser, real: str, echo: str) -> None:
    """Of memory, as Linux divides what processes share (PSS)."""

    def megabytes() -> float:
        found = browser.new_browser_cdp_session().send("SystemInfo.getProcessInfo")["processInfo"]
        sizes: list[int] = []
        for process in found:
            if process["type"] == "renderer":
                with open(f"/proc/{process['id']}/smaps_rollup", encoding="ascii") as lines:
                    sizes.append(next(int(line.split()[1]) for line in lines if line.startswith("Pss:")))
        return max(sizes) / 1024

    with opened(browser, real) as page:
        loaded(page)
        page.wait_for_timeout(1500)
        before, sizes, noted = megabytes(), list[float](), page.locator("#requests-note").inner_text()
        with ThreadPoolExecutor(4) as clients:
            for start in range(0, 2000, 200):
                texts = [f"request {start + i}" for i in range(200)]
                list(clients.map(lambda text: fetch(f"{real}/generate", {"prompt": text, "max_tokens": 4}), texts))
                page.wait_for_timeout(100)
                sizes.append(megabytes())
        expect(page.locator("#requests-note")).not_to_have_text(noted)
    print("memory of the page, MB:", round(before), [round(size) for size in sizes])
    assert max(sizes) < 150, sizes


@check
def while_models_load_the_stage_is_shown(browser: Browser, real: str, echo: str) -> None:
    """As api.application.build_startup_api answers, and then as a server that is ready."""
    inside = browser.new_context()
    page = inside.new_page()
    stages = ["fetching", "loading"]

    def starting(route: Route) -> None:
        if not stages:
            route.continue_()
            return
        message = f"the server is starting: {stages.pop(0)}"
        body = {"error": {"message": message, "type": "", "param": None, "code": "unavailable"}}
        route.fulfill(status=503, json=body)

    page.route(f"{echo}/events", starting)
    page.goto(f"{echo}/")
    for text in ("the server is starting: fetching", "the server is starting: loading", "Serving"):
        expect(page.locator("#state")).to_have_text(text, timeout=10_000)
    inside.close()


@check
def a_key_is_asked_for_and_stored_nowhere(browser: Browser, real: str, echo: str) -> None:
    """The server asks for one once routes answer 401, which is done to them here on their way."""
    keys: list[object] = []
    inside = browser.new_context()
    page = inside.new_page()

    def guard(route: Route) -> None:
        request = route.request
        if request.url.endswith("/session") and request.method == "POST":
            keys.append(json.loads(request.post_data))
            known = keys[-1] == {"key": "right"}
            route.fulfill(status=200 if known else 401, content_type="application/json", body="{}")
        elif {"key": "right"} in keys:
            route.continue_()
        else:
            body = '{"error": {"message": "a key is needed", "type": "", "param": null, "code": "unauthorized"}}'
            route.fulfill(status=401, content_type="application/json", body=body)

    for path in ("events", "history*", "cases*", "session"):
        page.route(f"{echo}/{path}", guard)
    page.goto(f"{echo}/")
    expect(page.locator("#login")).to_be_visible()
    expect(page.locator("#login-key")).to_be_focused()
    page.keyboard.type("wrong")
    page.keyboard.press("Enter")
    expect(page.locator("#login-error")).to_have_text("The server does not know this key.")
    assert page.input_value("#login-key") == ""
    page.keyboard.type("right")
    page.keyboard.press("Enter")
    expect(page.locator("#login")).to_be_hidden()
    expect(page.locator("#state")).to_have_text("Serving", timeout=20_000)
    assert keys == [{"key": "wrong"}, {"key": "right"}]
    assert page.evaluate("[localStorage.length, sessionStorage.length, document.cookie, location.search]") == [
        0,
        0,
        "",
        "",
    ]
    inside.close()


@check
def a_double_click_rolls_back_once(browser: Browser, real: str, echo: str) -> None:
    """The last check: it changes which adapter serves."""
    newest = fetch(f"{real}/adapters")["active"]
    with opened(browser, real) as page:
        loaded(page)
        expect(page.locator("#rollback")).to_have_text(f"Roll back adapter {newest}")
        answers: list[tuple[str, int]] = []

        def note(response: Response) -> None:
            if response.request.method == "POST":
                answers.append((response.url.rpartition("/")[2], response.status))

        page.on("response", note)
        page.dblclick("#rollback")
        expect(page.locator("#adapter-result")).to_have_text("The bare draft serves now.", timeout=20_000)
        expect(page.locator("#adapters-table tr").first).to_contain_text("rolled back", timeout=20_000)
        # One before it serves again; a click that comes after the answer to the first is of the same double click.
        other = page.locator("#adapters-table tr").nth(1).get_by_role("button")
        page.wait_for_timeout(2000)
        other.click()
        expect(page.locator("#rollback")).to_have_text(f"Roll back adapter {newest - 1}", timeout=20_000)
        page.click("#rollback")
        expect(page.locator("#adapter-result")).to_have_text(f"Adapter {newest - 1} serves now.")
        page.wait_for_timeout(500)
        assert answers == [(f"rollback?expected={newest}", 200), ("activate", 200)], answers
    states = {ref["id"]: ref["state"] for ref in fetch(f"{real}/adapters")["adapters"]}
    assert states == {newest: "rolled_back", newest - 1: "active"}, states


@check
def a_key_opens_the_page_and_stays_nowhere(browser: Browser, real: str, echo: str) -> None:
    address, key = LOCKED
    inside = browser.new_context()
    page = inside.new_page()
    page.goto(f"{address}/")
    expect(page.locator("#login")).to_be_visible(timeout=20_000)
    page.fill("#login-key", "rd-nothing")
    page.keyboard.press("Enter")
    expect(page.locator("#login-error")).to_have_text("The server does not know this key.")
    page.fill("#login-key", key)
    page.keyboard.press("Enter")
    expect(page.locator("#state")).to_have_text("Serving", timeout=20_000)
    expect(page.locator("#login")).to_be_hidden()
    (cookie,) = inside.cookies()
    assert (cookie["httpOnly"], cookie["sameSite"]) == (True, "Strict") and key not in cookie["value"]
    stored = page.evaluate("JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie])")
    assert stored == '[{},{},""]', stored
    assert key not in page.content()
    page.reload()
    expect(page.locator("#state")).to_have_text("Serving", timeout=20_000)
    inside.close()


@check
def texts_are_shown_by_the_link_whose_token_stays_nowhere(browser: Browser, real: str, echo: str) -> None:
    token, inside = TOKENS[echo], browser.new_context()
    page = inside.new_page()
    wrong: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: wrong.append(message.text) if message.type in {"error", "warning"} else None)
    page.on("request", lambda request: asked.append(request.url))
    page.goto(f"{echo}/")
    expect(page.locator("#cases-empty")).to_contain_text("Only the user who runs this server", timeout=20_000)
    expect(page.locator("#state")).to_have_text("Serving")
    expect(page.locator("#login")).to_be_hidden()
    assert page.locator("#cases-list li").count() == 0 and not [url for url in asked if "/cases" in url]
    # Opened where the page is open already, and then anew.
    for again in (False, True):
        if again:
            inside.clear_cookies()
            page.goto("about:blank")
        page.goto(f"{echo}/#token={token}")
        expect(page.locator("#cases-list li")).to_have_count(1, timeout=20_000)
        assert page.url == f"{echo}/"
        (cookie,) = inside.cookies()
        assert (cookie["httpOnly"], cookie["sameSite"]) == (True, "Strict") and token not in cookie["value"]
    stored = page.evaluate("JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie, history.state])")
    assert stored == '[{},{},"",null]', stored
    assert token not in page.content() and not [url for url in asked if token in url.partition("#")[0]]
    page.reload()
    expect(page.locator("#cases-list li")).to_have_count(1, timeout=20_000)
    page.go_back()
    assert token not in page.url
    assert wrong == [], wrong
    # One that opens nothing is said; the rest of the page goes on.
    inside.clear_cookies()
    page.goto("about:blank")
    page.goto(f"{echo}/#token=rd-nothing")
    expect(page.locator("#cases-empty")).to_contain_text("Only the user who runs this server", timeout=20_000)
    assert page.url == f"{echo}/"
    inside.close()


def main(
    chromium: str, real: str, echo: str, locked: str, key: str, real_token: str, echo_token: str, *names: str
) -> None:
    LOCKED.extend((locked, key))
    TOKENS.update({real: real_token, echo: echo_token})
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=list(FLAGS))
        for function in CHECKS:
            if names and function.__name__ not in names:
                continue
            started_at = time.monotonic()
            try:
                function(browser, real, echo)
            except Exception as error:  # noqa: BLE001  (the others are made all the same)
                traceback.print_exc(file=sys.stdout)
                print(f"failed {function.__name__}: {error!r}", flush=True)
            else:
                print(f"ok {function.__name__} ({time.monotonic() - started_at:.1f} s)", flush=True)
        browser.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
