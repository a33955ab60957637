"""Pictures of the page: `shots.py CHROMIUM LINK FOLDER`. LINK: the page's address with the token, as `redraft serve` prints it.

Opens the page and takes a picture; prints the wall time in seconds at which the page first names an adapter; waits for a line
on standard input; takes the others.
"""

from __future__ import annotations

import sys
from pathlib import Path

from playwright.sync_api import expect, sync_playwright

FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking")
PROMPT = "Write a SQL query: the names of all customers in Berlin, sorted."
WIDE = {"viewport": {"width": 1080, "height": 1220}}
PHONE = {"viewport": {"width": 390, "height": 844}}
NAMED = """() => new Promise((resolve) => {
  const look = () => /^[0-9]+$/.test(document.getElementById('adapter').textContent) && resolve(Date.now() / 1000);
  new MutationObserver(look).observe(document.getElementById('adapter'), {childList: true, characterData: true, subtree: true});
  look();
})"""


def main(chromium: str, link: str, folder: str) -> None:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=list(FLAGS))
        light = browser.new_context(**WIDE, color_scheme="light").new_page()
        light.goto(link)
        expect(light.locator("#state")).to_have_text("Serving", timeout=60_000)
        light.screenshot(path=Path(folder) / "page-new.png")
        print(light.evaluate(NAMED), flush=True)
        sys.stdin.readline()
        dark = browser.new_context(**WIDE, color_scheme="dark").new_page()
        phone = browser.new_context(**PHONE, color_scheme="light").new_page()
        for name, page in (("light", light), ("dark", dark), ("phone", phone)):
            if page is not light:
                page.goto(link)
            expect(page.locator("#cases-list li").first).to_be_visible(timeout=60_000)
            page.wait_for_timeout(12_000)
            page.screenshot(path=Path(folder) / f"page-{name}.png")
        light.fill("#prompt", PROMPT)
        light.fill("#most", "64")
        light.click("#race")
        expect(light.locator("#try-result")).to_contain_text("times as fast", timeout=120_000)
        light.locator("#try").screenshot(path=Path(folder) / "page-race.png")
        light.locator("#cases").screenshot(path=Path(folder) / "page-cases.png")
        browser.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
