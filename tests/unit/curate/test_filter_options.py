"""The filters that look at messages, at other rows, or at other files."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import ValidationError

from fakes.filtering import TALK, filtered, kept_of
from fakes.foreign_rollouts import RNOW_ROW, write_rnow
from fakes.rollout_lines import encoded
from fakes.rollout_rows import (
    assistant,
    read_rows,
    rollout_row,
    tool_call,
    tool_reply,
    user,
    write_lines,
    write_rows,
)
from stillroom.curate.convert import ConvertRollouts, convert_rollouts
from stillroom.curate.filter.across_rows import judge_rows
from stillroom.curate.filter.request import FilterDataset
from stillroom.curate.filter.rules import FilterContext
from stillroom.curate.rows import CuratedRow, read_curated_rows
from stillroom.errors import DataError
from stillroom.settings import Workspace

SFT = {
    "messages": [user("What is 5 + 7?"), *TALK[1:3], assistant("12")],
    "tools": [],
    "metadata": {"task_type": "sum"},
}


def dropped_of(folder: Path) -> list[tuple[str | None, list[str]]]:
    return [(row["id"], row["reasons"]) for row in read_rows(folder / "kept.jsonl.dropped")]


NO_TOOL_ERRORS = "tool errors not recorded: use not_contains with match=conversation"


@pytest.mark.parametrize(
    ("options", "reasons"),
    [
        ({}, []),
        ({"min_turns": 2, "require_final_answer": True, "require_tool_use": "price"}, []),
        ({"min_turns": 3}, ["under 3 turns"]),
        ({"min_reward": 0.5}, ["no reward"]),
        ({"success": True}, ["success unknown"]),
        ({"success": False}, ["success unknown"]),
        ({"max_tool_errors": 3}, [NO_TOOL_ERRORS]),
        ({"min_success_rate": 0.5}, ["task success rate unknown"]),
        ({"contains": "^12$"}, []),
        ({"contains": "13"}, ["contains: no match"]),
    ],
)
def test_supervised_rows_pass_no_filter_that_cannot_judge_them(
    tmp_path: Path, options: dict, reasons: list[str]
) -> None:
    write_lines(tmp_path / "sft.jsonl", [encoded(SFT)])

    result = filtered(tmp_path, "sft.jsonl", **options)

    assert (result.read, result.kept) == (1, 0 if reasons else 1)
    assert [found for _, found in dropped_of(tmp_path)] == ([reasons] if reasons else [])
    assert result.categories_before == {"sum": 1}


def test_a_supervised_row_with_a_reward_is_judged_by_it(tmp_path: Path) -> None:
    rows = [{**SFT, "reward": reward, "id": f"row-{reward}"} for reward in (0.25, 1.0)]
    write_lines(tmp_path / "sft.jsonl", map(encoded, rows))

    assert filtered(tmp_path, "sft.jsonl", min_reward=0.5).kept == 1
    assert filtered(tmp_path, "sft.jsonl", success=False).kept == 1
    assert dropped_of(tmp_path) == [("row-1.0", ["a success"])]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "What is 5 + 7?"},
        {"messages": [user("What is 5 + 7?")]},
        {"prompt": [user("a")], "chosen": [assistant("b")], "rejected": [assistant("c")]},
        {"messages": [user("a"), tool_reply("7", "call_9"), assistant("b")]},
    ],
)
def test_rows_that_are_neither_rollouts_nor_supervised_are_counted(
    tmp_path: Path, row: dict
) -> None:
    write_lines(tmp_path / "rows.jsonl", [encoded(row)])

    result = filtered(tmp_path, "rows.jsonl")

    assert result.dropped == {"not a rollout or SFT row": 1}
    assert result.problems


def test_tasks_that_mostly_fail_are_dropped_whole(tmp_path: Path) -> None:
    outcomes = {"easy": [True, True], "half": [True, False], "hard": [False, False, True]}
    rows = [
        rollout_row(task_id=task, sample=sample, success=success)
        for task, successes in outcomes.items()
        for sample, success in enumerate(successes)
    ]
    broken = {"class": "timeout", "message": "slow"}
    rows.append(rollout_row(task_id="easy", sample=9, success=None, reward=None, error=broken))
    rows.append(rollout_row(task_id="lost", success=None, reward=None, error=broken))

    assert kept_of(tmp_path, rows, min_success_rate=0.5) == ["easy"] * 2 + ["half"] * 2 + ["easy"]
    assert Counter(reason for _, [reason] in dropped_of(tmp_path)) == {
        "task success rate below 0.5": 3,
        "task success rate unknown": 1,
    }


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"contains": r"euros?$"}, ["a", "b"]),
        ({"contains": r"(?i)LAMP"}, ["a"]),
        ({"contains": r"(?i)LAMP", "match": "conversation"}, ["a", "c"]),
        ({"not_contains": "sorry"}, ["a", "b", "d"]),
        ({"not_contains": "secret sauce", "match": "conversation"}, ["a", "b", "c"]),
        ({"contains": "euro", "not_contains": "lamp"}, ["b"]),
    ],
)
def test_expressions_look_at_the_answer_or_at_all_messages(
    tmp_path: Path, options: dict, kept: list[str]
) -> None:
    parts = [{"type": "text", "text": "It costs 12 euros"}]
    rows = [
        rollout_row(task_id="a", messages=[user("x"), assistant("The lamp costs 1 euro")]),
        rollout_row(task_id="b", messages=[user("x"), {"role": "assistant", "content": parts}]),
        rollout_row(task_id="c", messages=[user("A lamp?"), assistant("sorry")]),
        rollout_row(
            task_id="d",
            messages=[user("x"), assistant(None, tool_call()), tool_reply("secret sauce")],
        ),
    ]

    assert kept_of(tmp_path, rows, **options) == kept


def test_answers_in_another_language_are_dropped_with_what_they_are(tmp_path: Path) -> None:
    texts = ["The price of the lamp is twelve euros.", "Der Preis beträgt zwölf Euro.", "12"]
    rows = [rollout_row(task_id=text, messages=[user("x"), assistant(text)]) for text in texts]

    assert kept_of(tmp_path, rows, language="en") == texts[:1]
    assert [reason for _, reason in dropped_of(tmp_path)] == [
        ["language: de"],
        ["language: unknown"],
    ]


def test_secrets_are_found_wherever_they_stand_and_never_written_down(tmp_path: Path) -> None:
    key, mail = "sk-" + "aB3dE5gH7jK9mN1pQ3sT" * 2, "bob.smith@mail.com"
    called = assistant(None, tool_call(arguments=json.dumps({"key": key})))
    rows = [
        rollout_row(task_id="clean"),
        rollout_row(task_id="call", messages=[user("x"), called, tool_reply("7"), assistant("7")]),
        rollout_row(task_id="tool", messages=[*TALK[:2], tool_reply(f"{key} {mail}"), TALK[3]]),
        rollout_row(task_id="metadata", metadata={"deep": [{"mail": f"to {mail}"}]}),
    ]

    assert kept_of(tmp_path, rows, drop_secrets=True) == ["clean", "metadata"]
    assert kept_of(tmp_path, rows, drop_pii=True) == ["clean", "call"]
    result = filtered(tmp_path, drop_secrets=True, drop_pii=True)

    assert result.dropped == {"secret: OpenAI key": 2, "personal data: email address": 1}
    assert dropped_of(tmp_path)[1] == (
        "tool-0",
        ["secret: OpenAI key", "personal data: email address"],
    )
    written = [path for path in tmp_path.iterdir() if path.name != "rollouts.jsonl"]
    for found in (key, mail):
        assert not any(found.encode() in path.read_bytes() for path in written)
        assert found not in repr(result)


LONG = "Please tell me what the tall green lamp by the door costs in euros with shipping to Oslo"


def test_near_duplicates_leave_out_tool_results_and_keep_the_best(tmp_path: Path) -> None:
    def talk(reply: str, answer: str) -> list[dict]:
        return [
            {"role": "system", "content": reply},
            user(LONG),
            assistant(None, tool_call()),
            tool_reply(f"{reply} " * 50),
            assistant(answer),
        ]

    rows = [
        rollout_row(task_id="1", messages=talk("a", "It costs 12 euros"), reward=0.5),
        rollout_row(task_id="2", messages=talk("b", "it costs 12 euros!"), reward=1.0),
        rollout_row(task_id="3", messages=talk("a", "Nobody sells lamps like it any more")),
        rollout_row(task_id="4", messages=talk("c", "It costs 12 euros"), success=False),
    ]

    assert kept_of(tmp_path, rows, dedupe="near", success=True) == ["2", "3"]
    (first, *_) = read_rows(tmp_path / "kept.jsonl.dropped")
    assert first["reasons"] == ["near duplicate"]
    assert first["like"] == f"{tmp_path}/rollouts.jsonl:2"


def test_near_duplicates_of_other_systems_rows_are_found(tmp_path: Path) -> None:
    again = {**RNOW_ROW, "id": "again"}
    again["conversation"] = [
        {**message, "content": message["content"].upper()}
        if isinstance(message.get("content"), str)
        else message
        for message in RNOW_ROW["conversation"]
    ]
    write_rnow(tmp_path / "rollouts", RNOW_ROW, again)

    result = filtered(tmp_path, "rollouts", dedupe="near")

    assert result.dropped == {"near duplicate": 1}


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("held.txt", LONG.encode()),
        ("held.jsonl", encoded({"prompt": LONG.upper()})),
        ("held.jsonl", encoded({"messages": [{"role": "system", "content": "x"}, user(LONG)]})),
        ("held.jsonl", encoded({"messages": [user(LONG), assistant("12")]})),
        ("held.jsonl", encoded(rollout_row(messages=[user(LONG), assistant("12")]))),
    ],
)
def test_rows_with_evaluation_prompts_are_dropped(
    tmp_path: Path, name: str, content: bytes
) -> None:
    write_lines(tmp_path / name, [content])
    write_lines(tmp_path / "other.txt", [b"Nothing like it"])
    changed = LONG.replace("tall", "large").replace("lamp", "LAMP,")
    boilerplate = {"role": "system", "content": LONG}
    rows = [
        rollout_row(task_id="clean", messages=[boilerplate, user("Hello"), assistant("Hi")]),
        rollout_row(task_id="same", messages=[user(f"Now.\n{LONG}!\nQuick."), assistant("12")]),
        rollout_row(task_id="near", messages=[user(changed), assistant("12")]),
        rollout_row(task_id="said", messages=[user("Ask me"), assistant(LONG)]),
        rollout_row(task_id="read", messages=[*TALK[:2], tool_reply(LONG), TALK[3]]),
    ]

    assert kept_of(tmp_path, rows, decontaminate=["other.txt", name]) == ["clean", "read"]
    dropped = {row["id"]: row for row in read_rows(tmp_path / "kept.jsonl.dropped")}
    assert dropped["same-0"]["reasons"] == ["evaluation prompt, contained"]
    assert dropped["near-0"]["reasons"] == ["evaluation prompt, slightly changed"]
    assert {row["like"] for row in dropped.values()} == {f"{tmp_path}/{name}:1"}
    manifest = json.loads((tmp_path / "kept.jsonl.manifest.json").read_bytes())
    assert [Path(file["path"]).name for file in manifest["inputs"]][1:] == ["other.txt", name]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", r"held\.jsonl:2: the line is not valid JSON"),
        (b'{"x": 1}', r"held\.jsonl:2: the line has no known format"),
        (b'{"prompt": 5}', r"held\.jsonl:2: prompt must be a string"),
    ],
)
def test_an_evaluation_file_that_cannot_be_read_is_refused(
    tmp_path: Path, line: bytes, message: str
) -> None:
    write_lines(tmp_path / "held.jsonl", [b'{"prompt": "a"}', line])

    with pytest.raises(DataError, match=message):
        kept_of(tmp_path, [rollout_row()], decontaminate=["held.jsonl"])
    write_lines(tmp_path / "held.jsonl", [])
    with pytest.raises(DataError, match="has no prompts"):
        kept_of(tmp_path, [rollout_row()], decontaminate=["held.jsonl"])


def test_the_verdicts_of_a_review_are_followed(tmp_path: Path) -> None:
    # As files of older versions give them: by id, and the last verdict on a row counts.
    verdicts = [{"id": "b-0", "verdict": "keep"}, {"id": "a-0", "verdict": "keep"}]
    verdicts.append({"id": "b-0", "verdict": "drop"})
    write_rows(tmp_path / "reviewed.jsonl", [*verdicts, {"id": "gone", "verdict": "keep"}])
    rows = [rollout_row(task_id=task) for task in "abc"] + [rollout_row(task_id="d", id=None)]

    assert kept_of(tmp_path, rows, verdicts="reviewed.jsonl") == ["a", "c", "d"]
    assert kept_of(tmp_path, rows, verdicts="reviewed.jsonl", reviewed_only=True) == ["a"]
    result = filtered(tmp_path, verdicts="reviewed.jsonl", reviewed_only=True)

    assert result.dropped == {
        "dropped in review": 1,
        "not reviewed": 2,
    }
    assert result.problems == ["1 of 4 verdicts match no row of the input"]


def test_distributions_before_and_after_say_of_how_many_rows_they_are(tmp_path: Path) -> None:
    rows = [rollout_row(task_id=str(number), reward=number / 10) for number in range(11)]
    rows += [rollout_row(task_id="unjudged", reward=None, success=None, messages=TALK)]
    write_lines(tmp_path / "rollouts.jsonl", map(encoded, rows))

    result = filtered(tmp_path, min_reward=0.5)

    before, after = result.before, result.after
    assert before.reward is not None
    assert after.reward is not None
    assert (before.rows_with_reward, after.rows_with_reward, result.read) == (11, 6, 12)
    assert (before.reward.low, before.reward.high) == (0.0, 1.0)
    assert before.reward.median == pytest.approx(0.5, rel=0.005)
    assert (after.reward.low, after.reward.mean) == (0.5, pytest.approx(0.75))
    assert before.turns is not None
    assert (before.turns.median, before.turns.high) == (1, 2)
    assert before.tokens is None
    said = sum(len(message["content"] or "") for message in TALK)
    [call] = TALK[1]["tool_calls"]
    assert before.characters is not None
    assert before.characters.low == said + sum(map(len, call["function"].values()))


def test_a_row_counts_for_each_filter_that_it_fails(tmp_path: Path) -> None:
    rows = [rollout_row(task_id="a", reward=0.0), rollout_row(task_id="b", success=False)]
    write_lines(tmp_path / "rollouts.jsonl", map(encoded, rows))

    result = filtered(tmp_path, min_reward=0.5, min_turns=2, success=True)

    assert result.dropped == {"reward below 0.5": 1, "no success": 1}
    assert result.failed_filters == {"reward below 0.5": 1, "no success": 1, "under 2 turns": 2}


def test_the_reasons_why_a_row_is_no_success_are_counted_apart(tmp_path: Path) -> None:
    unknown = {"success": None, "reward": None}
    rows = [
        rollout_row(task_id="failed", success=False),
        rollout_row(task_id="low", success=None, reward=0.2),
        rollout_row(task_id="broken", success=False, error={"kind": "teacher", "message": "down"}),
        rollout_row(task_id="cut", stop_reason="truncated", **unknown),
        rollout_row(task_id="call", messages=[user("?"), assistant(None, tool_call())], **unknown),
        rollout_row(task_id="complete", **unknown),
    ]
    write_lines(tmp_path / "rollouts.jsonl", map(encoded, rows))
    reasons = {"no success": 2, "ended by an infrastructure failure": 1, "no complete answer": 2}

    assert filtered(tmp_path, success=True).dropped == reasons
    request = ConvertRollouts(input="rollouts.jsonl", output="train.jsonl")
    assert convert_rollouts(Workspace(tmp_path), request).left_out == reasons


def test_kept_addresses_of_reserved_domains_are_counted(tmp_path: Path) -> None:
    def about(task_id: str, address: str) -> dict:
        return rollout_row(task_id=task_id, messages=[user(f"I am {address}"), assistant("Hi")])

    rows = [about("spared", "max@shop-mail.example"), about("real", "max@shop-mail.com")]

    assert kept_of(tmp_path, rows, drop_pii=True) == ["spared"]
    assert (
        filtered(tmp_path, drop_pii=True)
        .warnings[0]
        .startswith("1 kept rows have email addresses in domains reserved for examples")
    )
    assert not any("addresses" in warning for warning in filtered(tmp_path).warnings)


def test_at_most_n_rows_are_drawn_from_those_that_pass(tmp_path: Path) -> None:
    rows = [rollout_row(task_id=str(number), reward=number % 2) for number in range(40)]

    drawn = kept_of(tmp_path, rows, n=5, min_reward=1)

    assert len(drawn) == 5
    assert all(int(task) % 2 for task in drawn)
    assert drawn == sorted(drawn, key=int)
    assert kept_of(tmp_path, rows, n=5, min_reward=1) == drawn
    assert kept_of(tmp_path, rows, n=5, min_reward=1, seed=1) != drawn
    assert filtered(tmp_path, n=5, min_reward=1).dropped == {
        "reward below 1": 20,
        "not among the 5 sampled": 15,
    }
    assert len(kept_of(tmp_path, rows, n=99, dedupe="exact", max_per_category=30)) == 1


def test_of_very_many_categories_the_largest_are_told(tmp_path: Path) -> None:
    rows = [rollout_row(metadata={"task_type": f"kind-{number % 120}"}) for number in range(200)]
    write_lines(tmp_path / "rollouts.jsonl", map(encoded, rows))

    categories = filtered(tmp_path).categories_before

    assert len(categories) == 51
    assert sum(categories.values()) == 200
    assert categories["(others)"] == 100


def test_an_input_that_grows_between_two_readings_is_refused(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "rollouts.jsonl", [encoded(rollout_row())] * 3)
    request = FilterDataset(input="rollouts.jsonl", output="kept.jsonl", max_per_category=9)
    reads = 0

    def read() -> Iterator[CuratedRow]:
        nonlocal reads
        reads += 1
        if reads == 2:
            write_lines(path, [encoded(rollout_row())] * 4)
        return read_curated_rows(path, with_supervised=True)

    with pytest.raises(DataError, match="changed while it was read"):
        list(judge_rows(read, request, FilterContext()))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 5}, "max_tokens needs model"),
        ({"reviewed_only": True}, "reviewed_only needs verdicts"),
        ({"contains": "("}, "is not a valid regular expression"),
        ({"dedupe": "fuzzy"}, "'exact' or 'near'"),
        ({"min_success_rate": 1.5}, "less than or equal to 1"),
        ({"min_rewrad": 1}, "Extra inputs"),
    ],
)
def test_a_request_that_lacks_something_says_what(options: dict, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        FilterDataset(input="a", output="b", **options)


@pytest.mark.parametrize(("given", "kind"), [(True, "exact"), ("true", "exact"), (False, None)])
def test_dedupe_may_still_be_a_yes_or_no(given: bool | str, kind: str | None) -> None:
    assert (
        FilterDataset.model_validate({"input": "a", "output": "b", "dedupe": given}).dedupe == kind
    )
