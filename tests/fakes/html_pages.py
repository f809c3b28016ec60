"""HTML pages taken apart: which tags, attributes and texts they hold."""

from html.parser import HTMLParser
from pathlib import Path


class PageParser(HTMLParser):
    """Keeps what the page is made of."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.texts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def parse(path: Path) -> PageParser:
    parser = PageParser()
    parser.feed(path.read_text(encoding="utf-8"))
    return parser


def text_of(path: Path) -> str:
    """The page's text with single blanks, none of them unbreakable."""
    return " ".join(" ".join(parse(path).texts).split())
