"""The page in a real browser: what a visitor does, and what comes of it."""

import csv
import os
import shutil
import time
from collections.abc import Iterator
from urllib.parse import parse_qs, urlsplit

import pytest
from PIL import Image

from explorer.hostile import UPLOADS

playwright = pytest.importorskip("playwright.sync_api", reason="the browser is driven by the package playwright")

#: milliseconds that the page may take for anything, on a busy machine
PATIENCE = 30_000


def find_browser() -> str | None:
    named = os.environ.get("EIGENGRAIN_CHROMIUM")
    return named or next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="module")
def browser():
    path = find_browser()
    with playwright.sync_playwright() as driver:
        try:
            # without a sandbox, as containers allow none; it visits this machine alone
            browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-dev-shm-usage"])
        except playwright.Error as error:
            reason = str(error).splitlines()[0]
            pytest.skip(
                f"no Chromium to drive ({reason}): install the system's package chromium, or name its program in "
                "EIGENGRAIN_CHROMIUM"
            )
        yield browser
        browser.close()


class Seen:
    """A page, and what it loaded."""

    def __init__(self, page, url):
        self.page, self.url = page, url
        self.requests: list[str] = []
        self.errors: list[str] = []
        page.on("request", lambda request: self.requests.append(request.url))
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("console", lambda message: self.errors.append(message.text) if message.type == "error" else None)

    def open(self, query: str = "") -> None:
        self.page.goto(self.url + query)
        self.page.wait_for_selector("#maps figure img", timeout=PATIENCE)
        self.page.wait_for_function("location.search.includes('split=')", timeout=PATIENCE)

    def words(self) -> dict[str, str]:
        """The address as it is now."""
        return {name: values[0] for name, values in parse_qs(urlsplit(self.page.url).query).items()}

    def wait_for_word(self, name: str, value: str) -> None:
        self.page.wait_for_function(
            "([name, value]) => new URLSearchParams(location.search).get(name) === value",
            arg=[name, value],
            timeout=PATIENCE,
        )

    def move_split(self, split: int | str) -> None:
        box = self.page.locator("#split input[type=number]")
        box.fill(str(split))
        box.press("Enter")
        box.blur()

    def upload(self, path) -> None:
        self.page.locator("#upload input[type=file]").set_input_files(str(path))


@pytest.fixture
def seen(browser, server) -> Iterator[Seen]:
    context = browser.new_context(viewport={"width": 1400, "height": 1200}, accept_downloads=True)
    yield Seen(context.new_page(), server.url)
    context.close()


def test_everything_a_visitor_does(seen, lens, tmp_path):
    page = seen.page
    seen.open()
    assert page.title() == "What large and small eigenvalues see"
    assert seen.words()["image"] == "example-0"

    # an example: the third of the second class
    page.locator("#class input").click()
    page.get_by_role("option", name=lens.classes[1]).click()
    page.wait_for_timeout(700)
    page.locator("#gallery button.thumbnail-item, #gallery .thumbnail-lg").nth(2).click()
    seen.wait_for_word("image", "example-7")
    playwright.expect(page.locator("#picture")).to_contain_text("plumage test 7", timeout=PATIENCE)

    # the split
    seen.move_split(20)
    seen.wait_for_word("split", "20")
    playwright.expect(page.locator("#spectrum")).to_contain_text("large: 20", timeout=PATIENCE)
    playwright.expect(page.locator("#answers .card.large")).to_contain_text("top:20", timeout=PATIENCE)
    playwright.expect(page.locator("#maps .head.small")).to_contain_text("last:44", timeout=PATIENCE)
    shown = lens.answers(lens.look("example-7"), 20)[1]
    share = f"{100 * float(shown.probabilities.max()):.1f} %"
    playwright.expect(page.locator("#answers .card.large")).to_contain_text(share)

    # the rules
    page.locator("#rules").get_by_text("guided").click()
    seen.wait_for_word("rules", "vanilla,deconv,guided")
    playwright.expect(page.locator("#maps .rule")).to_have_count(3, timeout=PATIENCE)
    assert page.locator("#maps figure img").count() == 9

    # a subset of one's own
    page.locator("#custom textarea, #custom input").fill("top:1+last:12")
    page.locator("#custom textarea, #custom input").press("Enter")
    playwright.expect(page.locator("#answers .card.custom")).to_contain_text("13 of 64", timeout=PATIENCE)
    playwright.expect(page.locator("#maps figure img")).to_have_count(12, timeout=PATIENCE)

    # files to keep
    with page.expect_download(timeout=PATIENCE) as download:
        page.locator("#save-table").click()
    assert download.value.suggested_filename == "eigengrain-example-7-split20.csv"
    with open(download.value.path(), newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert sum(row["kind"] == "eigenvalue" for row in rows) == 64
    assert {row["subset"] for row in rows if row["kind"] == "probability"} == {"all", "top:20", "last:44", "top:1+last:12"}
    with page.expect_download(timeout=PATIENCE) as download:
        page.locator("#save-panel").click()
    assert Image.open(download.value.path()).format == "PNG"

    # an image of one's own
    lens.images.image(3).save(tmp_path / "mine.png")
    seen.upload(tmp_path / "mine.png")
    playwright.expect(page.locator("#picture")).to_contain_text("uploaded: mine.png", timeout=PATIENCE)
    page.wait_for_function("location.search.includes('upload-')", timeout=PATIENCE)

    outside = [url for url in seen.requests if not url.startswith((seen.url, "data:", "blob:"))]
    assert outside == []
    assert seen.errors == []


def test_the_address_restores_the_view(seen):
    query = "?model=plain&image=example-5&split=33&rules=guided&custom=top:2&target=2&cut=projector&scale=each"
    seen.open(query)
    page = seen.page
    playwright.expect(page.locator("#picture")).to_contain_text("plumage test 5", timeout=PATIENCE)
    playwright.expect(page.locator("#spectrum")).to_contain_text("large: 33", timeout=PATIENCE)
    playwright.expect(page.locator("#maps .rule")).to_have_text(["guided"], timeout=PATIENCE)
    assert page.locator("#split input[type=number]").input_value() == "33"
    assert page.locator("#model input").input_value() == "plain"
    assert page.locator("#cut input:checked").input_value() == "projector"
    playwright.expect(page.locator("#answers .card.custom")).to_contain_text("top:2", timeout=PATIENCE)
    assert {name: seen.words()[name] for name in ("model", "image", "split", "target", "scale")} == {
        "model": "plain",
        "image": "example-5",
        "split": "33",
        "target": "2",
        "scale": "each",
    }


def test_a_list_of_models_that_is_only_looked_at_changes_nothing(seen, lens):
    seen.open("?image=example-5&target=1")
    page = seen.page
    page.locator("#class input").click()
    page.get_by_role("option", name=lens.classes[0]).click()
    page.locator("#model input").click()
    page.locator("#title h1").click()
    page.wait_for_timeout(1500)
    assert page.locator("#target input").input_value() == lens.classes[1]
    assert page.locator("#class input").input_value() == lens.classes[0]
    assert {name: seen.words().get(name) for name in ("image", "target")} == {"image": "example-5", "target": "1"}
    # another one does change the page
    page.locator("#model input").click()
    page.get_by_role("option", name="plain").click()
    seen.wait_for_word("model", "plain")
    playwright.expect(page.locator("#class input")).to_have_value(lens.classes[2], timeout=PATIENCE)


def test_the_page_by_keyboard(seen):
    seen.open("?split=20")
    page = seen.page
    lists = page.locator("[role=listbox]")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.ariaLabel") == "Model"
    playwright.expect(lists.filter(visible=True)).to_have_count(1)
    for _ in range(2):  # past the list of classes, to the examples
        page.keyboard.press("Tab")
        page.wait_for_timeout(400)
    assert page.evaluate("document.activeElement.closest('#gallery') !== null")
    playwright.expect(lists.filter(visible=True)).to_have_count(0)
    # one sees where one is
    unmarked = []
    for _ in range(18):
        page.keyboard.press("Tab")
        kind, outline = page.evaluate(
            "(() => { const at = document.activeElement; return [at.type, getComputedStyle(at).outlineStyle]; })()"
        )
        if kind in ("range", "radio", "checkbox") and outline != "solid":
            unmarked.append(kind)
        if kind == "range":
            break
    assert (kind, unmarked) == ("range", [])
    page.keyboard.press("ArrowRight")
    seen.wait_for_word("split", "21")


@pytest.mark.parametrize(("typed", "kept"), [("999", "63"), ("0", "1"), ("", "1")])
def test_a_split_that_cannot_be_is_the_nearest_in_the_box_and_on_the_page(seen, typed, kept):
    seen.open("?split=20")
    seen.move_split(typed)
    seen.wait_for_word("split", kept)
    playwright.expect(seen.page.locator("#split input[type=number]")).to_have_value(kept, timeout=PATIENCE)
    playwright.expect(seen.page.locator("#answers .card.large")).to_contain_text(f"top:{kept},", timeout=PATIENCE)
    assert seen.page.locator("[data-testid=toast-body]").count() == 0
    # nothing moves the box alone
    assert seen.page.locator("#split button").count() == 0


def test_a_wide_window_has_the_page_in_its_middle(seen):
    seen.page.set_viewport_size({"width": 2400, "height": 900})
    seen.open()
    left, right = seen.page.evaluate(
        "() => { const box = document.querySelector('.gradio-container').getBoundingClientRect(); "
        "return [box.left, document.documentElement.clientWidth - box.right]; }"
    )
    assert left == pytest.approx(right, abs=1)
    assert left > 300


def test_a_perturbation_is_started_and_stopped(seen):
    page = seen.page
    seen.open()
    page.get_by_role("tab", name="Change the image").click()
    steps = page.locator("#steps input[type=number]")
    steps.fill("1000")
    steps.press("Enter")
    page.locator("#start").click()
    playwright.expect(page.locator("#changed")).to_contain_text("running", timeout=PATIENCE)
    page.wait_for_function("document.querySelectorAll('#changed polyline.loss').length > 0", timeout=PATIENCE)
    page.locator("#stop").click()
    playwright.expect(page.locator("#changed [data-state=stopped]")).to_be_visible(timeout=PATIENCE)
    text = page.locator("#changed .note").inner_text()
    assert 0 < int(text.split()[1]) < 1000
    page.wait_for_timeout(500)
    assert page.locator("#changed .note").inner_text() == text
    assert page.locator("#changed img").count() == 3


@pytest.mark.parametrize("name", UPLOADS)
def test_hostile_uploads_get_a_message(seen, tmp_path, name):
    make, said = UPLOADS[name]
    seen.open()
    before = seen.page.locator("#picture").inner_text()
    seen.upload(make(tmp_path / name))
    playwright.expect(seen.page.locator(".toast-wrap, [data-testid=toast-body]").first).to_contain_text(
        said, timeout=PATIENCE
    )
    assert seen.page.locator("#picture").inner_text() == before
    # there is room for another file at once
    playwright.expect(seen.page.locator("#upload input[type=file]")).to_be_attached(timeout=PATIENCE)
    assert seen.page.title() == "What large and small eigenvalues see"
    seen.move_split(9)  # the page goes on
    playwright.expect(seen.page.locator("#answers .card.large")).to_contain_text("top:9", timeout=PATIENCE)


def test_a_moved_split_is_answered_in_a_second(seen):
    """From the key to the new predictions on the page, in the best of several moves: the machine may be busy."""
    seen.open()
    times = []
    for split in (30, 31, 32, 33, 34):
        began = time.perf_counter()
        seen.move_split(split)
        seen.page.wait_for_selector(f"#answers .card.large small:has-text('top:{split},')", timeout=PATIENCE)
        times.append(time.perf_counter() - began)
    assert min(times) < 1
