"""Samples for a person to judge."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from fakes.rollout_rows import assistant, read_rows, rollout_row, user, write_lines, write_rows
from stillroom import api
from stillroom.curate.review import band_names, band_of
from stillroom.curate.verdicts import read_verdicts
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
    assert len({row["id"] for row in rows}) == len({row["row_id"] for row in rows}) == 50
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


def test_a_review_that_was_begun_is_never_replaced(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", rollouts(5))
    sample(tmp_path)
    rows = read_rows(tmp_path / "review.jsonl")
    sample(tmp_path)
    write_rows(tmp_path / "review.jsonl", [{**rows[0], "verdict": "keep"}, *rows[1:]])

    with pytest.raises(InputError, match="has 1 verdicts"):
        sample(tmp_path)
    with pytest.raises(InputError, match="is also an input"):
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


def gym_row(number: int) -> dict[str, Any]:
    """A row of NeMo Gym's without any id, as some of its environments write them."""
    said = {"type": "message", "role": "assistant", "content": f"It costs {number}."}
    return {
        "responses_create_params": {"input": f"What is {number}?"},
        "response": {"output": [said]},
        "reward": number % 11 / 10,
    }


def rnow_row(number: int) -> dict[str, Any]:
    """A row of rnow's, which numbers the samples of each rollout from 1."""
    talk = [user(f"What is {number}?"), assistant(str(number))]
    return {
        "id": f"sample_{number % 4}",
        "completed": True,
        "success": True,
        "total_reward": number % 11 / 10,
        "rewards": {},
        "conversation": talk,
    }


SAME_IDS = {
    "nemo_gym": [gym_row(n % 90) for n in range(258)],
    "rnow": [rnow_row(n % 90) for n in range(258)],
    # A teacher's and a student's rollouts of the same prompts agree in their ids.
    "stillroom": rollouts(90) * 2 + rollouts(78),
    "sft": [{"messages": [user(str(n % 90)), assistant("b")]} for n in range(258)],
}


@pytest.mark.parametrize("layout", SAME_IDS)
def test_one_row_marked_drop_drops_that_row_and_no_other(tmp_path: Path, layout: str) -> None:
    source = write_rows(tmp_path / "rows.jsonl", SAME_IDS[layout])
    sample(tmp_path)
    rows = read_rows(tmp_path / "review.jsonl")
    marked = {**rows[7], "verdict": "drop"}
    write_rows(tmp_path / "judged.jsonl", [*rows[:7], marked, *rows[8:]])
    number = int(marked["where"].rpartition(":")[2])

    asked: dict[str, Any] = {"input": "rows.jsonl", "output": "kept.jsonl"}
    request = api.FilterDataset(**asked, verdicts="judged.jsonl")
    result = api.filter_dataset(Workspace(tmp_path), request)

    assert (result.read, result.kept, len(rows)) == (258, 257, 50)
    lines = source.read_bytes().splitlines()
    kept = (tmp_path / "kept.jsonl").read_bytes().splitlines()
    assert kept == lines[: number - 1] + lines[number:]
    [dropped] = read_rows(tmp_path / "kept.jsonl.dropped")
    assert (dropped["line"], dropped["row"]) == (number, marked["id"])

    copies = request.model_copy(update={"verdicts_for_copies": True})
    result = api.filter_dataset(Workspace(tmp_path), copies)
    lines_dropped = [row["line"] for row in read_rows(tmp_path / "kept.jsonl.dropped")]
    assert lines_dropped == [n for n in range(1, 259) if (n - number) % 90 == 0]
    assert result.kept == 258 - len(lines_dropped)


def test_a_verdict_on_an_id_that_several_rows_have_is_refused(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", SAME_IDS["rnow"])
    write_rows(tmp_path / "judged.jsonl", [{"id": "sample_1", "verdict": "drop"}])
    request = api.FilterDataset(input="rows.jsonl", output="kept.jsonl", verdicts="judged.jsonl")

    with pytest.raises(InputError, match=r"66 rows have the id 'sample_1'.*#1 \(rows.jsonl:2\)"):
        api.filter_dataset(Workspace(tmp_path), request)

    assert not (tmp_path / "kept.jsonl").exists()


def test_equal_rows_of_two_files_are_told_apart_by_the_sampled_file(tmp_path: Path) -> None:
    for name in "ab":
        write_rows(tmp_path / "rows" / f"{name}.jsonl", rollouts(3))
    sample(tmp_path, "rows", counts=(9, 9, 9))
    rows = read_rows(tmp_path / "review.jsonl")
    marked = [
        {**row, "verdict": "drop" if row["where"] == "rows/b.jsonl:2" else None} for row in rows
    ]
    write_rows(tmp_path / "judged.jsonl", marked)

    request = api.FilterDataset(input="rows", output="kept.jsonl", verdicts="judged.jsonl")
    assert api.filter_dataset(Workspace(tmp_path), request).kept == 5

    [dropped] = read_rows(tmp_path / "kept.jsonl.dropped")
    assert (Path(dropped["file"]).name, dropped["line"]) == ("b.jsonl", 2)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"id": "a", "verdict": "kep"}', r"reviewed\.jsonl:2: verdict 'kep' is unknown"),
        (b'{"verdict": "keep"}', r"reviewed\.jsonl:2: not a reviewed row"),
        (b"{", r"reviewed\.jsonl:2: not a reviewed row"),
        (b'{"id": "a", "verdict": null}', "has no verdicts"),
    ],
)
def test_a_review_without_readable_verdicts_is_refused(
    tmp_path: Path, line: bytes, message: str
) -> None:
    path = write_lines(tmp_path / "reviewed.jsonl", [b'{"id": "a", "verdict": null}', line])

    with pytest.raises(DataError, match=message):
        read_verdicts(path)
