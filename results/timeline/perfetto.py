"""Take perfetto.png of a part of the timeline in Perfetto: `python perfetto.py http://127.0.0.1:9001 perfetto.png`.

README.md says what serves it. Needs playwright and Debian's package chromium.
"""

import sys

from playwright.sync_api import sync_playwright

FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
RECEIVED = 917, 249  # a message that rank 0 received; the arrow of the one that is selected is drawn
CLOSE_DETAILS = 1286, 375

url, picture = sys.argv[1:]
with sync_playwright() as playwright:
    browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=FLAGS)
    page = browser.new_page(viewport={"width": 1300, "height": 720})
    page.goto(url)
    for rank in (1, 0):  # shows its rows
        page.get_by_text(f"rank {rank} on").first.click()
        page.wait_for_timeout(1500)
    page.mouse.click(*RECEIVED)
    page.wait_for_timeout(2500)
    page.mouse.click(*CLOSE_DETAILS)
    page.wait_for_timeout(1000)
    page.set_viewport_size({"width": 1300, "height": 440})
    page.mouse.move(700, 400)
    page.wait_for_timeout(1500)
    page.screenshot(path=picture)
    browser.close()
