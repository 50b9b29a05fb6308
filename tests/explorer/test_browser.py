"""The page in a real browser."""

import csv
import os
import shutil
from collections.abc import Iterator
from urllib.parse import parse_qs, urlsplit

import pytest
from PIL import Image

playwright = pytest.importorskip("playwright.sync_api", reason="the browser is driven by the package playwright")

#: time limit in milliseconds, for a busy machine
PATIENCE = 30_000


def find_browser() -> str | None:
    path = os.environ.get("EIGENGRAIN_CHROMIUM")
    return path or next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="module")
def browser():
    path = find_browser()
    with playwright.sync_playwright() as driver:
        try:
            # without a sandbox, which containers do not allow; it only visits this machine
            browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-dev-shm-usage"])
        except playwright.Error as error:
            reason = str(error).splitlines()[0]
            pytest.skip(
                f"no Chromium ({reason}): install the system's package chromium, or set EIGENGRAIN_CHROMIUM to its path"
            )
        # one context for all pages, so that the scripts of the page are cached
        yield browser.new_context(viewport={"width": 1400, "height": 1200}, accept_downloads=True)
        browser.close()


class Visit:
    """A page with its requests and errors."""

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
        """The query of the current address."""
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
def visit(browser, server) -> Iterator[Visit]:
    page = browser.new_page()
    yield Visit(page, server.url)
    page.close()


def test_choose_split_download_and_upload(visit, session, tmp_path):
    page = visit.page
    visit.open()
    assert page.title() == "What large and small eigenvalues see"
    assert visit.words()["image"] == "example-0"

    # an example: the third of the second class
    page.locator("#class input").click()
    page.get_by_role("option", name=session.classes[1]).click()
    page.wait_for_timeout(700)
    page.locator("#gallery button.thumbnail-item, #gallery .thumbnail-lg").nth(2).click()
    visit.wait_for_word("image", "example-7")
    playwright.expect(page.locator("#answer")).to_contain_text("plumage test 7", timeout=PATIENCE)

    # the split
    visit.move_split(20)
    visit.wait_for_word("split", "20")
    playwright.expect(page.locator("#spectrum")).to_contain_text("large: 20", timeout=PATIENCE)
    playwright.expect(page.locator("#parts .card.large")).to_contain_text("top:20", timeout=PATIENCE)
    playwright.expect(page.locator("#maps .head.small")).to_contain_text("last:44", timeout=PATIENCE)
    shown = session.predict(session.analyse("example-7"), 20)[1]
    share = f"{100 * float(shown.probabilities.max()):.1f} %"
    playwright.expect(page.locator("#parts .card.large")).to_contain_text(share)

    # the kinds of maps
    page.locator("#kinds").get_by_label("pixels, guided").click()
    visit.wait_for_word("maps", "smooth,guided")
    playwright.expect(page.locator("#maps .rule")).to_have_count(2, timeout=PATIENCE)
    assert page.locator("#maps figure img").count() == 6

    # a map is enlarged by a click, and closed by another one
    page.locator("#maps .zoom").first.click()
    shown = page.locator("#zoom img")
    playwright.expect(shown).to_be_visible()
    assert shown.get_attribute("src") == page.locator("#maps img").first.get_attribute("src")
    assert shown.bounding_box()["width"] > 2 * page.locator("#maps img").first.bounding_box()["width"]
    shown.click()
    playwright.expect(shown).to_be_hidden()

    # a custom subset
    page.locator("#custom textarea, #custom input").fill("top:1+last:12")
    page.locator("#custom textarea, #custom input").press("Enter")
    playwright.expect(page.locator("#parts .card.custom")).to_contain_text("13 of 64", timeout=PATIENCE)
    playwright.expect(page.locator("#maps figure img")).to_have_count(8, timeout=PATIENCE)

    # downloads
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

    # an upload
    session.images.image(3).save(tmp_path / "mine.png")
    visit.upload(tmp_path / "mine.png")
    playwright.expect(page.locator("#answer")).to_contain_text("uploaded: mine.png", timeout=PATIENCE)
    page.wait_for_function("location.search.includes('upload-')", timeout=PATIENCE)

    outside = [url for url in visit.requests if not url.startswith((visit.url, "data:", "blob:"))]
    assert outside == []
    assert visit.errors == []


def test_the_address_restores_the_view(visit):
    query = "?model=plain&image=example-5&split=33&maps=guided&custom=top:2&target=2&cut=projector&scale=each&other=seb"
    visit.open(query)
    page = visit.page
    playwright.expect(page.locator("#answer")).to_contain_text("plumage test 5", timeout=PATIENCE)
    playwright.expect(page.locator("#spectrum")).to_contain_text("large: 33", timeout=PATIENCE)
    playwright.expect(page.locator("#maps .rule")).to_have_text(["pixels, guided"], timeout=PATIENCE)
    assert page.locator("#split input[type=number]").input_value() == "33"
    assert page.locator("#model input").input_value() == "plain"
    assert page.locator("#cut input:checked").input_value() == "projector"
    assert page.locator("#answer section").evaluate_all("all => all.map(each => each.dataset.model)") == ["plain", "seb"]
    playwright.expect(page.locator("#parts .card.custom")).to_contain_text("top:2", timeout=PATIENCE)
    assert {name: visit.words()[name] for name in ("model", "image", "split", "target", "scale")} == {
        "model": "plain",
        "image": "example-5",
        "split": "33",
        "target": "2",
        "scale": "each",
    }


def test_closing_the_list_of_models_without_a_choice_changes_nothing(visit, session):
    visit.open("?image=example-5&target=1")
    page = visit.page
    page.locator("#class input").click()
    page.get_by_role("option", name=session.classes[0]).click()
    page.locator("#model input").click()
    page.locator("#title h1").click()
    page.wait_for_timeout(1500)
    assert page.locator("#target input").input_value() == session.classes[1]
    assert page.locator("#class input").input_value() == session.classes[0]
    assert {name: visit.words().get(name) for name in ("image", "target")} == {"image": "example-5", "target": "1"}
    # another model changes the page
    page.locator("#model input").click()
    page.get_by_role("option", name="plain").click()
    visit.wait_for_word("model", "plain")
    playwright.expect(page.locator("#class input")).to_have_value(session.classes[2], timeout=PATIENCE)
    playwright.expect(page.locator("#custom textarea, #custom input")).to_have_value("top:60", timeout=PATIENCE)
    playwright.expect(page.locator("#parts .card.custom")).to_contain_text("top:60", timeout=PATIENCE)


def test_the_page_by_keyboard(visit):
    visit.open("?split=20")
    page = visit.page
    lists = page.locator("[role=listbox]")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.ariaLabel") == "Model"
    playwright.expect(lists.filter(visible=True)).to_have_count(1)
    for _ in range(3):  # past the dropdowns of the other model and of classes, to the examples
        page.keyboard.press("Tab")
        page.wait_for_timeout(400)
    assert page.evaluate("document.activeElement.closest('#gallery') !== null")
    playwright.expect(lists.filter(visible=True)).to_have_count(0)
    # the focus is visible
    unmarked = []
    for _ in range(60):
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
    visit.wait_for_word("split", "21")


def test_a_split_out_of_range_becomes_the_nearest_one(visit):
    visit.open("?split=20")
    for typed, kept in (("0", "1"), ("999", "63"), ("", "1")):
        visit.move_split(typed)
        visit.wait_for_word("split", kept)
        playwright.expect(visit.page.locator("#split input[type=number]")).to_have_value(kept, timeout=PATIENCE)
        playwright.expect(visit.page.locator("#parts .card.large")).to_contain_text(f"top:{kept},", timeout=PATIENCE)
    assert visit.page.locator("[data-testid=toast-body]").count() == 0
    # there is no reset button, which would move the box without an event
    assert visit.page.locator("#split button").count() == 0


def test_the_page_is_centred_in_a_wide_window(visit):
    visit.page.set_viewport_size({"width": 2400, "height": 900})
    visit.open()
    left, right = visit.page.evaluate(
        "() => { const box = document.querySelector('.gradio-container').getBoundingClientRect(); "
        "return [box.left, document.documentElement.clientWidth - box.right]; }"
    )
    assert left == pytest.approx(right, abs=1)
    assert left > 300


def test_mistakes_are_opened_by_a_click(visit, session):
    visit.open()
    page = visit.page
    playwright.expect(page.locator("#searched")).to_contain_text("all 9 examples", timeout=PATIENCE)
    mistake = session.mistakes[1]
    tile = page.locator("#mistakes .thumbnail-item").nth(1)
    playwright.expect(tile).to_contain_text(session.classes[mistake.predicted])
    tile.click()
    visit.wait_for_word("image", f"example-{mistake.number}")
    playwright.expect(page.locator("#answer .wrong")).to_be_visible(timeout=PATIENCE)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_phone_shows_the_answer_first_and_the_settings_last(visit, theme):
    page = visit.page
    page.set_viewport_size({"width": 390, "height": 844})
    page.emulate_media(color_scheme=theme)
    visit.open("?other=plain")
    tops = [page.locator(f"#{name}").bounding_box()["y"] for name in ("answer", "choose", "work", "settings")]
    assert tops == sorted(tops)
    examples = page.locator("#gallery .thumbnail-item").evaluate_all("all => all.map(each => each.offsetTop)")
    assert len(examples) > 1
    assert len(set(examples)) == 1  # in one row
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    assert page.evaluate("document.body.classList.contains('dark')") is (theme == "dark")


def test_a_perturbation_is_started_and_stopped(visit):
    page = visit.page
    visit.open()
    page.get_by_role("tab", name="Perturb the image").click()
    steps, slider = (page.locator(f"#steps input[type={kind}]") for kind in ("number", "range"))
    for _ in range(50):  # the page may not listen yet to the tab that was just opened
        steps.fill("1000")
        steps.press("Enter")
        page.wait_for_timeout(100)
        if slider.input_value() == "1000":
            break
    playwright.expect(slider).to_have_value("1000")
    page.locator("#start").click()
    playwright.expect(page.locator("#perturbed [data-state=RUNNING]")).to_be_visible(timeout=PATIENCE)
    page.wait_for_function("document.querySelectorAll('#perturbed polyline.loss').length > 0", timeout=PATIENCE)
    page.locator("#stop").click()
    note = page.locator("#perturbed [data-state=STOPPED]")
    playwright.expect(note).to_be_visible(timeout=PATIENCE)
    step = int(note.get_attribute("data-step"))
    assert 0 < step < 1000
    page.wait_for_timeout(500)
    assert int(note.get_attribute("data-step")) == step
    assert page.locator("#perturbed .zoom img").count() == 3


def test_hostile_uploads_get_a_message(visit, hostile_files):
    visit.open()
    before = visit.page.locator("#answer").inner_text()
    messages = visit.page.locator("[data-testid=toast-body]")
    for split, file in enumerate(hostile_files.values(), start=9):
        visit.upload(file)
        playwright.expect(messages.first).to_be_visible(timeout=PATIENCE)
        visit.page.locator("[data-testid=toast-close]").first.click()
        playwright.expect(messages).to_have_count(0, timeout=PATIENCE)
        assert visit.page.locator("#answer").inner_text() == before
        # the page still works, and another file can be uploaded
        visit.move_split(split)
        playwright.expect(visit.page.locator("#parts .card.large")).to_contain_text(f"top:{split},", timeout=PATIENCE)
        playwright.expect(visit.page.locator("#upload input[type=file]")).to_be_attached(timeout=PATIENCE)
    assert visit.page.title() == "What large and small eigenvalues see"


def test_the_last_of_several_quick_moves_is_shown(visit):
    visit.open("?split=52")
    slider = visit.page.locator("#split input[type=range]")
    slider.focus()
    for _ in range(8):  # faster than the answers
        slider.press("ArrowLeft")
    visit.wait_for_word("split", "44")
    playwright.expect(visit.page.locator("#parts .card.large")).to_have_attribute("data-subset", "top:44", timeout=PATIENCE)
    playwright.expect(visit.page.locator("#maps .head.large small")).to_have_text("top:44", timeout=PATIENCE)
