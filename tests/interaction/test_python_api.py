"""The example of docs/python.md runs as it is shown."""

import re
from pathlib import Path

import pytest

from fakes.documents import blocks_of
from fakes.source_tree import ROOT


@pytest.mark.usefixtures("warm_python")
def test_the_example_of_the_python_api_distils_the_demo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    [example] = [
        block for block in blocks_of(ROOT / "docs/python.md") if block.language == "python"
    ]
    monkeypatch.chdir(tmp_path)
    exec(example.text, {})  # noqa: S102 - it is our own page
    shown = capsys.readouterr().out
    assert re.search(r"^(\d+) of 20 rollouts are right; \1 rows to train on$", shown, re.MULTILINE)
    assert re.search(r"^accuracy \d+% \(\d+% to \d+%\)$", shown, re.MULTILINE)
    assert (tmp_path / "shop/sft.jsonl").is_file()
