"""Pictures of the page: `shots.py CHROMIUM ADDRESS FOLDER`."""

from __future__ import annotations

import sys
from pathlib import Path

from playwright.sync_api import expect, sync_playwright

FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking")
PROMPT = "Write a SQL query: the names of all customers in Berlin, sorted."


def main(chromium: str, address: str, folder: str) -> None:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=list(FLAGS))
        wide = {"viewport": {"width": 1080, "height": 1220}}
        for name, context in (
            ("light", {**wide, "color_scheme": "light"}),
            ("dark", {**wide, "color_scheme": "dark"}),
            ("phone", {"viewport": {"width": 390, "height": 844}, "color_scheme": "light"}),
        ):
            page = browser.new_context(**context).new_page()
            page.goto(f"{address}/")
            expect(page.locator("#cases-list li").first).to_be_visible(timeout=60_000)
            page.wait_for_timeout(12_000)
            page.screenshot(path=Path(folder) / f"page-{name}.png")
            if name == "light":
                page.fill("#prompt", PROMPT)
                page.fill("#most", "64")
                page.click("#race")
                expect(page.locator("#try-result")).to_contain_text("times as fast", timeout=120_000)
                page.locator("#try").screenshot(path=Path(folder) / "page-race.png")
                page.locator("#cases").screenshot(path=Path(folder) / "page-cases.png")
        browser.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
