"""Links between pages, their anchors and figures exist."""

import re
from pathlib import Path
from urllib.parse import unquote

import pytest

from docs.pages import PAGES, ROOT, title


def slug(heading: str) -> str:
    """The anchor of a heading, as GitHub and MyST make it."""
    text = re.sub(r"[`*_]|\[([^\]]*)\]\([^)]*\)", r"\1", heading.strip()).lower()
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


def anchors(page: Path) -> set[str]:
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return {slug(heading) for heading in re.findall(r"^#{1,6} (.+)$", text, re.MULTILINE)}


def links(page: Path) -> list[str]:
    text = re.sub(
        r"^```(?!\{(?:figure|image)\}).*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL
    )
    pictures = re.findall(r"^```\{(?:figure|image)\} (\S+)", text, re.MULTILINE)
    return [*pictures, *re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", text))]


@pytest.mark.parametrize("page", PAGES, ids=title)
def test_links_exist(page):
    for link in links(page):
        if link.startswith(("http://", "https://", "mailto:")):
            continue
        file, _, anchor = unquote(link).partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.is_relative_to(ROOT), f"{link} leaves the repository"
        assert target.exists(), f"{link}: there is no {target.relative_to(ROOT)}"
        if anchor:
            assert anchor in anchors(target), f"{link}: {target.name} has {sorted(anchors(target))}"


def test_folders_of_the_map_exist():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for path in re.findall(r"^\| `([\w/.]+)`", text, re.MULTILINE):
        assert (ROOT / path).exists(), path


def test_there_are_links():
    assert sum(len(links(page)) for page in PAGES) > 20
