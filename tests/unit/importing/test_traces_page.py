from pathlib import Path

from stillroom.importing.formats.table import FORMATS

PAGE = Path(__file__).parents[3] / "docs" / "traces.md"


def test_the_page_on_traces_explains_every_format():
    page = PAGE.read_text(encoding="utf-8")
    assert len({known.name for known in FORMATS}) == len(FORMATS) >= 14
    assert [known.name for known in FORMATS if f"`{known.name}`" not in page] == []
