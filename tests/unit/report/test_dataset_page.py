"""The page about a data file, through the operation that writes it."""

from pathlib import Path
from typing import Any

import pytest

from fakes.conversations import LAMP, PRICE, answer, calls, reply, user
from fakes.rollout_rows import rollout_row, write_lines, write_rows
from stillroom import api
from stillroom.errors import ModelError
from stillroom.settings import Workspace

ATTACK = "<img src=x onerror=alert(1)>"


def validated(folder: Path, **options: Any) -> tuple[api.ValidationReport, str]:
    request = api.ValidateDataset(path="rows.jsonl", **options)
    report = api.validate_dataset(Workspace(folder), request)
    assert report.report is not None
    return report, (folder / report.report).read_text(encoding="utf-8")


def test_a_good_file_has_its_distributions_and_categories(tmp_path: Path) -> None:
    rows = [
        rollout_row(task_id=str(n), reward=n % 5 / 4, metadata={"task_type": ["a", ATTACK][n % 2]})
        for n in range(40)
    ]
    write_rows(tmp_path / "rows.jsonl", rows)

    _, page = validated(tmp_path)

    assert "40\N{NO-BREAK SPACE}rollouts, all well formed." in page
    assert all(f'<span class="chart-title">{name}</span>' in page for name in ("Reward", "Turns"))
    assert page.count("50.0\N{NO-BREAK SPACE}%") >= 2
    assert ATTACK not in page
    assert "&lt;img" in page


def test_a_bad_file_lists_its_first_problems_and_names_the_file_with_all(tmp_path: Path) -> None:
    write_lines(tmp_path / "rows.jsonl", [b"{" + ATTACK.encode()] * 30)

    report, page = validated(tmp_path, format="sft")

    assert report.num_problems == 30
    assert page.count("Fix: write one JSON object per line") == 20
    assert "reports/rows.jsonl.problems.jsonl" in page
    assert ATTACK not in page


@pytest.mark.usefixtures("warm_python")
def test_with_a_model_tokens_are_counted_and_rows_that_cannot_be_trained_are_told(
    tmp_path: Path,
) -> None:
    good = {"messages": [user("Price?"), calls(LAMP), reply("12"), answer("12.")], "tools": [PRICE]}
    picture = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
    write_rows(tmp_path / "rows.jsonl", [good, {"messages": [picture, answer("b")]}])

    report, page = validated(tmp_path, model="demo/student")

    assert (report.good, report.token_rows) == (2, 2)
    assert report.tokens is not None
    assert report.trained_tokens is not None
    assert 0 < report.trained_tokens.high < report.tokens.high
    assert sum(report.left_out.values()) == 1
    assert "refused by the chat template" in next(iter(report.left_out))
    assert "training would leave out" in page
    assert '<span class="chart-title">Tokens</span>' in page


@pytest.mark.usefixtures("warm_python")
@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "a"},
        {"prompt": [user("a")], "chosen": [answer("b")], "rejected": [answer("cc")]},
        rollout_row(),
    ],
)
def test_tokens_of_every_format_are_counted(tmp_path: Path, row: dict[str, Any]) -> None:
    write_rows(tmp_path / "rows.jsonl", [row])

    report, _ = validated(tmp_path, model="demo/student")

    assert report.tokens is not None
    assert (report.trained_tokens is None) == (report.format == "prompts")


def test_a_model_that_is_not_there_is_refused_before_the_file_is_read(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", [{"prompt": "a"}])
    with pytest.raises(ModelError):
        validated(tmp_path, model="./nothing")
    assert not (tmp_path / "reports").exists()
