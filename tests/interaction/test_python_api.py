"""The examples of docs/python.md run as they are shown."""

import re
from pathlib import Path
from typing import Any

import pytest

from fakes.documents import blocks_of
from fakes.source_tree import ROOT
from stillroom import api


@pytest.mark.usefixtures("warm_python")
def test_the_example_of_the_python_api_distils_the_demo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    example, *others = [
        block for block in blocks_of(ROOT / "docs/python.md") if block.language == "python"
    ]
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(example.text, names)  # noqa: S102 - it is our own page
    shown = capsys.readouterr().out
    assert re.search(r"^(\d+) of 20 rollouts are right; \1 rows to train on$", shown, re.MULTILINE)
    assert re.search(r"^accuracy \d+% \(\d+% to \d+%\)$", shown, re.MULTILINE)
    assert (tmp_path / "shop/sft.jsonl").is_file()

    for block in others:
        exec(block.text, names)  # noqa: S102
    assert len(others) == 2
    assert isinstance(names["result"], api.ValidationReport)
    assert re.match(r"there is no run 'no-such-run' in .*: list the runs", capsys.readouterr().out)
