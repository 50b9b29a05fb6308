"""The pages that the tests in this folder read, and helpers to take them apart."""

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
#: every page of the repository and of the documentation site
PAGES = sorted(
    [
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md")),
        *(page for page in (ROOT / "docs").rglob("*.md")),
    ]
)
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


def title(path: Path) -> str:
    return str(path.relative_to(ROOT))


class Block(NamedTuple):
    """A block of code: its language, its first line (counted from 1) and its text."""

    language: str
    line: int
    text: str


def blocks(page: Path, *languages: str) -> list[Block]:
    """The fenced blocks of a page in the given languages."""
    text = page.read_text(encoding="utf-8")
    matches = re.finditer(r"^```([\w{}-]*)[^\n]*\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [Block(match[1], text.count("\n", 0, match.start()) + 2, match[2]) for match in matches if match[1] in languages]


def prose(text: str) -> str:
    """A page without its code, links and mathematics."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"\$\$.*?\$\$", "", text, flags=re.DOTALL)
    return re.sub(r"`[^`\n]*`|\$[^$\n]*\$|\]\([^)]*\)|https?://\S+", "", text)
