"""How a page becomes what a model reads; no browser is needed for that."""

from hypothesis import given
from hypothesis import strategies as st

from stillroom.tools.browser.page import Element, Snapshot, make_document, split_text


def a_snapshot(text: str = "", *, title: str = "T", num_elements: int = 0) -> Snapshot:
    elements = [Element(kind="link", name=f"Link {n}", detail="") for n in range(num_elements)]
    return Snapshot(
        url="http://e.com/", title=title, status=200, html="", text=text, elements=elements
    )


@given(st.text(), st.integers(1, 50))
def test_parts_are_short_enough_and_lose_nothing_but_line_ends(text: str, max_chars: int) -> None:
    parts = split_text(text, max_chars)
    assert all(0 < len(part) <= max_chars for part in parts if part)
    assert "".join(parts).replace("\n", "") == text.replace("\n", "")


def test_a_line_end_where_a_part_begins_is_passed() -> None:
    assert split_text("\nab", 1) == ["", "a", "b"]


@given(st.text(max_size=3000), st.integers(0, 60), st.integers(100, 2000))
def test_every_part_keeps_the_limit(text: str, num_elements: int, max_chars: int) -> None:
    snapshot = a_snapshot(text, num_elements=num_elements)
    document = make_document(snapshot, "", max_chars=max_chars)
    for page in range(1, document.num_parts + 1):
        assert len(document.render_part(page)) <= max_chars + 500
    shown = "\n".join(document.render_part(page) for page in range(1, document.num_parts + 1))
    assert all(f'"Link {n}"' in shown for n in range(num_elements))


def test_whole_text_stands_in_for_a_main_content_that_is_next_to_nothing() -> None:
    whole = "What the page says. " * 50
    for main, shown in (("", whole), ("Accept cookies?", whole), (f"# {whole}", f"# {whole}")):
        document = make_document(a_snapshot(whole), main, max_chars=5000)
        assert document.texts == [shown.strip()]


def test_control_characters_and_broken_letters_do_not_get_through() -> None:
    document = make_document(a_snapshot("a\x00\x1b[2Jb\ud800c", title="\x07t"), "", max_chars=100)
    assert document.texts == ["a[2Jb?c"]
    assert document.title == "t"
