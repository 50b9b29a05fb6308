"""Take the screenshots of the documentation: ``python docs/screenshots.py REPORT RUN...``.

REPORT is a folder of ``eigengrain train``, whose page is shown, and each RUN a model for the explorer. Chromium is found as
in ``tests/explorer/test_browser.py``.
"""

import io
import os
import shutil
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, sync_playwright

from eigengrain.explorer.opening import open_sessions
from eigengrain.explorer.page import MISTAKES
from eigengrain.explorer.server import Server

FIGURES = Path(__file__).parent / "figures"
#: width of the window, and height of the part of each page that is shown
SIZES = {1440: {"explorer": 1424, "report": 1420}, 390: {"explorer": 1240, "report": 1240}}
#: image that the explorer shows: the first one for which the two models of ``figures/README.md`` give different answers
EXAMPLE = "example-188"
#: largest size of a file in bytes
MOST = 200_000


def save(picture: bytes, file: Path) -> None:
    """Save a screenshot with as many colours as the size of the file allows."""
    image = Image.open(io.BytesIO(picture)).convert("RGB")
    for colours in (256, 128, 64, 32):
        small = image.quantize(colours, Image.Quantize.MAXCOVERAGE, kmeans=3, dither=Image.Dither.NONE)
        small.save(file, optimize=True)
        if file.stat().st_size <= MOST:
            break
    print(f"{file.name}: {colours} colours, {file.stat().st_size / 1000:.0f} kB")


def open_explorer(page: Page, url: str) -> None:
    """Open the explorer, and wait until maps and mistakes are there."""
    page.goto(url)
    page.wait_for_selector("#maps figure img", timeout=60_000)
    page.wait_for_selector("#mistakes .thumbnail-item", timeout=60_000)
    page.wait_for_timeout(3000)


def main(report: str, runs: list[str]) -> None:
    found = filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome")))
    browser = os.environ.get("EIGENGRAIN_CHROMIUM") or next(found, None)
    sessions = open_sessions(runs)
    first, *second = list(sessions)[:2]
    for _ in sessions[first].find_mistakes(MISTAKES, 600):
        pass  # the page itself searches for a few seconds only
    with Server(sessions) as server, sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=browser, args=["--no-sandbox", "--disable-dev-shm-usage"])
        for width, heights in SIZES.items():
            for theme in ("light", "dark"):
                window = {"width": width, "height": 1000}
                page = chromium.new_page(viewport=window, color_scheme=theme)
                for name, height in heights.items():
                    if name == "explorer":
                        compared = "".join(f"&other={other}" for other in second) if width > 1000 else ""
                        open_explorer(page, f"{server.url}?image={EXAMPLE}{compared}")
                    else:
                        page.goto((Path(report) / "report.html").resolve().as_uri())
                    part = {"x": 0, "y": 0, "width": width, "height": height}
                    shot = page.screenshot(full_page=True, clip=part)
                    save(shot, FIGURES / f"{name}-{width}-{theme}.png")
                page.close()
        chromium.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
