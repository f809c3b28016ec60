"""Samples for a person to judge."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from fakes.rollout_rows import assistant, read_rows, rollout_row, user, write_lines, write_rows
from stillroom import api
from stillroom.curate.review import band_names, band_of, read_verdicts, shares
from stillroom.errors import DataError, InputError
from stillroom.settings import Workspace


def rollouts(num: int, **changes: Any) -> list[dict[str, Any]]:
    return [
        rollout_row(
            task_id=f"t{n}",
            messages=[user(f"What is {n}?"), assistant(str(n))],
            reward=n % 11 / 10,
            metadata={"task_type": "rare" if n % 25 == 0 else "common"},
            **changes,
        )
        for n in range(num)
    ]


def sample(folder: Path, name: str = "rows.jsonl", **options: Any) -> api.ReviewSample:
    request = api.SampleForReview(**{"input": name, "output": "review.jsonl", **options})
    return api.sample_for_review(Workspace(folder), request)


def test_rows_of_every_reward_are_drawn_and_are_to_be_filled_in(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", rollouts(400))

    result = sample(tmp_path)

    rows = read_rows(tmp_path / "review.jsonl")
    assert [(band.band, band.sampled) for band in result.bands] == [
        ("below 0.5", 10), ("0.5 to 0.8", 20), ("from 0.8", 20),
    ]  # fmt: skip
    assert Counter(row["band"] for row in rows) == {b.band: b.sampled for b in result.bands}
    assert sum(band.rows for band in result.bands) == result.read == 400
    assert all(row["verdict"] is None and row["notes"] == "" for row in rows)
    assert rows[0]["where"].startswith("rows.jsonl:")
    assert all(row["messages"][0]["content"].startswith("What is") for row in rows)
    assert len({row["id"] for row in rows}) == 50
    # 4 % of the rows, and as even as there are enough of them.
    assert result.categories["rare"] >= 10
    assert (tmp_path / "review.html").is_file()
    assert (tmp_path / "review.jsonl.manifest.json").is_file()


def test_the_same_seed_draws_the_same_rows_whatever_their_number_of_bands(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", rollouts(300))

    def ids(**options: Any) -> list[str]:
        sample(tmp_path, **options)
        return [row["id"] for row in read_rows(tmp_path / "review.jsonl")]

    assert ids() == ids()
    assert ids() != ids(seed=1)
    assert len(ids(bands=(), counts=(7,))) == 7
    assert len(ids(bands=(0.5,), counts=(0, 3))) == 3


def test_what_cannot_be_judged_is_left_out_and_counted(tmp_path: Path) -> None:
    failed = rollout_row(reward=None, error={"class": "timeout", "message": "x"}, success=None)
    rows = [failed, {"prompt": "a"}, *rollouts(3), rollout_row(reward=None)]
    write_rows(tmp_path / "rows.jsonl", rows)
    with (tmp_path / "rows.jsonl").open("ab") as stream:
        stream.write(b"{broken\n")

    result = sample(tmp_path)

    assert result.left_out == {
        "ended by an infrastructure failure": 1, "no answer": 1, "has problems": 1,
    }  # fmt: skip
    assert result.read == sum(band.rows for band in result.bands) + sum(result.left_out.values())
    assert [band.band for band in result.bands] == ["below 0.5", "no reward"]
    write_lines(tmp_path / "bad.jsonl", [b"{"])
    with pytest.raises(DataError, match="none of the 1 rows"):
        sample(tmp_path, "bad.jsonl")


def test_rows_of_supervision_and_preference_are_drawn_without_rewards(tmp_path: Path) -> None:
    sft = [{"messages": [user(str(n)), assistant("b")]} for n in range(60)]
    dpo = {"prompt": [user("a")], "chosen": [assistant("b")], "rejected": [assistant("c")]}
    write_rows(tmp_path / "rows.jsonl", [*sft, dpo])

    result = sample(tmp_path, counts=(30, 20, 11))

    rows = read_rows(tmp_path / "review.jsonl")
    assert result.sampled == 61
    assert len({row["id"] for row in rows}) == 61
    (pair,) = [row for row in rows if row["format"] == "dpo"]
    assert pair["rejected"] == [assistant("c")]
    assert "messages" not in pair


def test_verdicts_find_their_rows_again(tmp_path: Path) -> None:
    sft = [{"messages": [user(str(n)), assistant("b")]} for n in range(4)]
    gone = write_rows(tmp_path / "rows.jsonl", [*rollouts(4), *sft])
    sample(tmp_path)
    verdicts = [
        {**row, "verdict": "drop" if row["where"].endswith((":2", ":6")) else "keep"}
        for row in read_rows(tmp_path / "review.jsonl")
    ]
    write_rows(tmp_path / "judged.jsonl", verdicts)

    request = api.FilterDataset(input="rows.jsonl", output="kept.jsonl", verdicts="judged.jsonl")
    result = api.filter_dataset(Workspace(tmp_path), request)

    assert (result.read, result.kept) == (8, 6)
    lines = gone.read_bytes().splitlines()
    kept = (tmp_path / "kept.jsonl").read_bytes().splitlines()
    assert kept == [line for n, line in enumerate(lines, start=1) if n not in (2, 6)]


def test_a_review_that_was_begun_is_never_replaced(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", rollouts(5))
    sample(tmp_path)
    rows = read_rows(tmp_path / "review.jsonl")
    sample(tmp_path)
    write_rows(tmp_path / "review.jsonl", [{**rows[0], "verdict": "keep"}, *rows[1:]])

    with pytest.raises(InputError, match="holds 1 verdicts"):
        sample(tmp_path)
    with pytest.raises(InputError, match="is the input itself"):
        sample(tmp_path, output="rows.jsonl")


@pytest.mark.parametrize(
    "wrong",
    [
        {"bands": (0.8, 0.5)},
        {"counts": (1, 2)},
        {"counts": (0, 0, 0)},
        {"counts": (-1, 2, 2)},
    ],
)
def test_bands_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=r"bands|counts"):
        api.SampleForReview(input="a", output="b", **wrong)


def test_an_edge_belongs_to_the_band_above_it() -> None:
    assert [band_of(reward, (0.5, 0.8)) for reward in (0.49, 0.5, 0.8, None)] == [
        "below 0.5", "0.5 to 0.8", "from 0.8", "no reward",
    ]  # fmt: skip
    assert band_names(()) == ["any reward"]


@given(st.dictionaries(st.text(max_size=3), st.integers(0, 30), max_size=8), st.integers(0, 60))
def test_shares_are_as_even_as_can_be(sizes: dict[str, int], total: int) -> None:
    taken = shares(sizes, total)

    assert sum(taken.values()) == min(total, sum(sizes.values()))
    assert all(taken[name] <= size for name, size in sizes.items())
    short = [taken[name] for name, size in sizes.items() if taken[name] < size]
    assert not short or max(taken.values()) - min(short) <= 1


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
