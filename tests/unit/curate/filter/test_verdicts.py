from pathlib import Path

import pytest

from fakes.rollout_rows import write_lines
from stillroom.curate.filter.verdicts import read_verdicts
from stillroom.errors import DataError


def test_the_last_verdict_on_a_row_counts_and_null_is_none(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "reviewed.jsonl",
        [
            b'{"id": "a", "verdict": "keep", "notes": "good"}',
            b'{"id": "b", "verdict": null}',
            b'{"id": "c", "verdict": "keep"}',
            b'{"id": "c", "verdict": "drop"}',
        ],
    )

    assert read_verdicts(path) == {"a": "keep", "c": "drop"}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"id": "a", "verdict": "kep"}', r"reviewed\.jsonl:2: verdict 'kep' is unknown"),
        (b'{"verdict": "keep"}', r"reviewed\.jsonl:2: is no reviewed row"),
        (b"{", r"reviewed\.jsonl:2: is no reviewed row"),
    ],
)
def test_a_verdict_that_says_nothing_is_refused(tmp_path: Path, line: bytes, message: str) -> None:
    path = write_lines(tmp_path / "reviewed.jsonl", [b'{"id": "a", "verdict": "keep"}', line])

    with pytest.raises(DataError, match=message):
        read_verdicts(path)


def test_a_review_that_nobody_did_is_refused(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "reviewed.jsonl", [b'{"id": "a", "verdict": null}'])

    with pytest.raises(DataError, match="holds no verdict"):
        read_verdicts(path)
