"""What the documents name is there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("document", ["README.md", "CLAUDE.md", "docs/benchmarks.md"])
def test_every_file_that_a_document_names_is_there(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:tests|benchmarks|docs|skills|scripts)/[\w./-]+)`", text))

    assert document != "docs/benchmarks.md" or named
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []
