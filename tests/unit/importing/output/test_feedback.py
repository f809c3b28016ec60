"""Feedback: tables that judge the conversations of a log, and the scores that are rewards."""

import gzip
import json
import math
from pathlib import Path
from typing import Any

import pytest

from fakes.collected_rows import logged, taken
from stillroom.curate.filter.request import FilterDataset
from stillroom.curate.filter.run import filter_dataset
from stillroom.errors import InputError
from stillroom.importing.input_files import PARTLY_DECOMPRESSED
from stillroom.importing.output.feedback import reward_of, scores_from_feedback
from stillroom.importing.records import Feedback, Location
from stillroom.importing.request import ImportResult, ImportRollouts
from stillroom.importing.run import import_rollouts
from stillroom.settings import Workspace
from stillroom_mcp.next_steps import after_import_rollouts


def imported(root: Path, feedback: str, name: str = "feedback.csv", **given: Any) -> ImportResult:
    rows = [
        {
            "session": session,
            "request": {"messages": [{"role": "user", "content": f"What of {session}?"}]},
            "response": {"choices": [{"message": {"role": "assistant", "content": session}}]},
        }
        for session in ("a", "b", "c")
    ]
    (root / "logs").mkdir()
    (root / "logs" / "calls.jsonl").write_text("\n".join(map(json.dumps, rows)), "utf-8")
    (root / "logs" / name).write_text(feedback, "utf-8")
    request = ImportRollouts(input="logs", output="out.jsonl", **given)
    return import_rollouts(Workspace(root), request)


def scores(root: Path) -> list[dict[str, float]]:
    lines = (root / "out.jsonl").read_text("utf-8").splitlines()
    by_text = {row["messages"][-1]["content"]: row["rewards"] for row in map(json.loads, lines)}
    return [by_text[session] for session in ("a", "b", "c")]


@pytest.mark.parametrize(
    "feedback",
    [
        "session,thumb\na,up\nb,down\n",
        "Session ID,comment,Thumb\na,fine,1\nb,,0\nc,no verdict,\n",
        "conversationId,thumb\na,👍\nb,Thumbs Down\n",
        "id,thumb\na,true\nb,false\n",
        "call_id,thumb,comment\na,up,\nb,down,no good\n",
        "id,generation_id,agent_id,thumb,at,by\n1,a,a,👍🏽,9,c\n2,b,a,👎️,8,c\n",
        "litellm_call_id;thumb_comment;Thumb\na;bad;:+1:\nb;fine;-0.0\n",
        "call_id,feedback,thumb\na,I liked it,✅\nb,,wrong\n",
        "request_id,user_id,thumb\na,c,Correct\nb,c,no\n",
    ],
)
def test_a_table_of_thumbs_judges_the_calls_or_sessions_that_it_names(
    tmp_path: Path, feedback: str
) -> None:
    made = imported(tmp_path, feedback, reward_from=("thumb|Thumb",))
    assert [list(each.values()) for each in scores(tmp_path)] == [[1.0], [0.0], []]
    assert made.rewarded == 2
    assert made.read == made.kept + made.merged + made.refused
    assert made.unread_files == []


def test_json_rows_of_thumbs_are_read_as_a_table_of_them_is(tmp_path: Path) -> None:
    rows = [{"call_id": "a", "thumb": "up"}, {"call_id": "b", "thumb": "down", "comment": "no"}]
    imported(tmp_path, "\n".join(map(json.dumps, rows)), "thumbs.jsonl")
    assert scores(tmp_path) == [{"thumb": 1.0}, {"thumb": 0.0}, {}]
    other = {"call_id": "a", "name": "thumb", "value": 1}
    (tmp_path / "other").mkdir()
    made = imported(tmp_path / "other", json.dumps(other), "other.jsonl")
    assert (made.unread_files, made.refused) == (["logs/other.jsonl"], 1)
    assert "unknown format: other.jsonl; if one has feedback: set columns=" in made.notes[0]


def test_the_columns_of_feedback_that_were_taken_are_said(tmp_path: Path) -> None:
    made = imported(tmp_path, "call_id,thumb,comment\na,up,\nb,down,\nz,up,\n")
    said = (
        "logs/feedback.csv was read as feedback, with the scores in thumb and the ids in call_id: "
        "2 of 3 scores match an imported call or session; "
    )
    assert [note for note in made.notes if note.startswith(said)]


@pytest.mark.parametrize(
    ("feedback", "note"),
    [
        (
            "ref,opinion\na,up\n",
            (
                "its table was refused (no column has the conversation); if it is feedback: "
                'set columns=["id=COLUMN", "score=COLUMN"]; '
                "its columns are ref, opinion"
            ),
        ),
        (
            "event_id,exchange_id,thumb\n1,a,up\n",
            "its table was refused (no column has the conversation)",
        ),
        (
            "call_id,thumb\nx,up\ny,down\n",
            "all 2 rows were refused (feedback on a call that was not imported); set feedback_by",
        ),
        (
            "call_id,thumb\na,A\nb,B\nc,\n",
            "all 3 rows were refused (feedback without a number); a score is a number or a word",
        ),
    ],
)
def test_a_file_of_which_nothing_was_read_is_named_in_the_notes_and_the_next_step(
    tmp_path: Path, feedback: str, note: str
) -> None:
    made = imported(tmp_path, feedback)
    assert made.unread_files == ["logs/feedback.csv"]
    assert made.notes[0].startswith(f"nothing was read from logs/feedback.csv: {note}")
    step = after_import_rollouts(None, made)
    assert step.startswith("nothing was read from logs/feedback.csv: see notes before you use")


def test_files_of_which_a_part_was_read_or_that_have_no_model_calls_are_not_called_unread(
    tmp_path: Path,
) -> None:
    reply = {"role": "assistant", "content": "Hello"}
    call = {"request": {"messages": [{"role": "user", "content": "Hi"}]},
            "response": {"choices": [{"message": reply}]}}  # fmt: skip
    whole = gzip.compress(f"{json.dumps(call)}\n".encode() * 9)
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "cut.jsonl.gz").write_bytes(whole[:-6])
    span = {"id": "s", "traceId": "t", "type": "SPAN", "startTime": "2026-03-01", "name": "x"}
    (tmp_path / "logs" / "spans.jsonl").write_text(json.dumps(span), "utf-8")
    (tmp_path / "logs" / "read.me").write_text("The logs.", "utf-8")
    made = import_rollouts(Workspace(tmp_path), ImportRollouts(input="logs", output="out.jsonl"))
    assert set(made.refused_by_reason) == {"unknown format", "no model call", PARTLY_DECOMPRESSED}
    assert made.unread_files == ["logs/read.me"]
    assert made.notes[0].startswith("nothing was read from logs/spans.jsonl")
    assert made.notes[1].startswith("1 files have an unknown format: read.me; if one has feedback")


def test_other_columns_and_json_rows_of_feedback_are_read_if_they_are_named(tmp_path: Path) -> None:
    columns = ("id=chat", "score=happy")
    imported(tmp_path, "chat,happy\na,5\nb,never\nz,1\n", columns=columns)
    assert scores(tmp_path) == [{"happy": 5.0}, {}, {}]
    refused = (tmp_path / "out.jsonl.refused").read_text("utf-8")
    assert "feedback without a number" in refused
    assert "feedback on a call that was not imported" in refused

    (tmp_path / "json").mkdir()
    imported(tmp_path / "json", '{"chat": "c", "happy": 2}\n', "votes.jsonl", columns=columns)
    assert scores(tmp_path / "json") == [{}, {}, {"happy": 2.0}]


def test_a_table_with_an_id_and_a_value_among_other_columns_is_no_feedback(tmp_path: Path) -> None:
    made = imported(tmp_path, "id,text,lang,score\n1,What?,en,3\n2,Who?,en,4\n")
    assert made.refused_by_reason == {"no column has the conversation": 1}
    assert "for a table of feedback" in made.problems[0]


def feedback(line, about, value, name="good"):
    return Feedback(Location(Path("scores.jsonl"), line), about, name, value)


def test_feedback_finds_the_rollout_that_its_row_went_into(tmp_path):
    rows = [
        logged(1, "Hi", "Hello", id="c1", group="s"),
        logged(2, "Hi", "Hello", "Bye", "Bye", id="c2", group="s", feedback_ids=("t2",)),
        logged(3, "Other", "x", id="c3", group="s"),
        feedback(1, "c1", 0.25),
        feedback(2, "t2", 1.0, "late"),
        feedback(3, "s", 0.5, "session"),
        feedback(4, "c1", 0.75),
        feedback(5, "nobody", 1.0),
        feedback(6, "c3", math.nan),
    ]
    with taken(tmp_path, rows) as found:
        scores = scores_from_feedback(found.collected, found.joined, found.tally)
        assert scores == {1: {"good": 0.25, "late": 1.0, "session": 0.5}, 2: {"session": 0.5}}
        assert [row.source for row in found.refused] == ["scores.jsonl:5", "scores.jsonl:6"]
        count = found.tally.formats["calls"]
        assert (count.read, count.merged, count.refused) == (9, 4, 2)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ((), None),
        (("a",), 1.0),
        (("a", "b"), 0.5),
        (("a", "c"), None),
        (("langfuse.score.a",), 1.0),
        (("x.score.y",), 0.25),
        (("z|a", "b|x"), 0.5),
        (("a|b",), 0.0),
        (("b|a", "a"), 0.5),
        (("a|x.score.y|z",), 0.25),
        (("z|q.score.a",), 1.0),
        (("z|q",), None),
        (("c|d",), 0.75),
        (("stars>=4",), 0.0),
        (("stars >= 2.5", "a"), 1.0),
        (("x.score.y>=.25",), 1.0),
        (("langfuse.score.stars>=3",), 1.0),
        (("b|stars>=3",), 0.0),
        (("a|stars>=3",), 1.0),
        (("moons>=3",), None),
        (("e>=9",), 0.25),
    ],
)
def test_the_reward_is_the_mean_of_the_named_scores_if_none_lacks(names, expected):
    scores = {"a": 1.0, "b": 0.0, "x.score.y": 0.25, "c|d": 0.75, "stars": 3.0, "e>=9": 0.25}
    assert reward_of(scores, names) == expected


@pytest.mark.parametrize(
    ("table", "reward_from", "shown"),
    [
        ("session,stars\na,1\nb,5\n", "stars", "stars ranges from 1 to 5 (in 2 rollouts)"),
        ("session,stars\na,1\nb,1\n", "stars", '"stars>=4"'),
        ("session,rating\na,0\nb,1\nc,5\n", "rating", '"rating>=4"'),
        ("session,rating\na,up\nb,3\n", "thumb|rating", '"rating>=4"'),
        ("session,userRating\na,1\nb,10\n", "userRating", '"userRating>=6"'),
        ("session,score\na,20\nb,100\n", "score", '"score>=61"'),
        ("session,score\na,1\nb,2\n", "score", '"score>=2"'),
        ("session,score\na,2\nb,2\n", "score", '"score>=2"'),
        ("session,score\na,0.5\nb,1.5\n", "score", '"score>=1"'),
        ("session,score\na,1.001\nb,1.002\n", "score", '"score>=1.002"'),
        ("session,score\na,0\nb,12345678\n", "score", '"score>=6172840"'),
        ("session,reward\na,0\nb,2\n", "", '"reward>=2"'),
    ],
)
def test_a_rating_is_no_reward_until_its_lowest_good_score_is_named(
    tmp_path: Path, table: str, reward_from: str, shown: str
) -> None:
    with pytest.raises(InputError) as error:
        imported(tmp_path, table, reward_from=(reward_from,) if reward_from else ())
    assert shown in str(error.value)
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize(
    ("table", "reward_from"),
    [
        ("session,stars\na,1\nb,4\nc,3.5\n", "stars>=4"),
        ("session,stars\na,1\nb,1\nb,5\nc,2\n", "stars>=2"),
        ("session,rating\na,0\nb,1\n", "rating"),
        ("session,rating\na,-1\nb,1\nc,-1\n", "rating"),
        ("session,rating\na,false\nb,true\n", "rating"),
        ("session,rating\na,0.25\nb,0.75\nc,0.4\n", "rating"),
        ("session,rating\nb,1\n", "rating"),
    ],
)
def test_ratings_with_a_lowest_good_score_and_thumbs_say_what_is_right(
    tmp_path: Path, table: str, reward_from: str
) -> None:
    imported(tmp_path, table, reward_from=(reward_from,))
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text("utf-8").splitlines()]
    right = {row["messages"][-1]["content"] for row in rows if row["success"]}
    low_twice = table.count("\nb,") == 2
    assert right == ({"c"} if low_twice else {"b"})


def graded(root: Path, *marks: dict[str, Any], **given: Any) -> ImportResult:
    """Imports a conversation for each of the marks, which are fields next to its messages."""
    answers = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "x"}]
    rows = [json.dumps({"messages": answers, "id": f"{n}"} | mark) for n, mark in enumerate(marks)]
    (root / "rows.jsonl").write_text("\n".join(rows), "utf-8")
    request = ImportRollouts(input="rows.jsonl", output="out.jsonl", **given)
    return import_rollouts(Workspace(root), request)


def outcomes(root: Path) -> list[tuple[float, bool]]:
    lines = (root / "out.jsonl").read_text("utf-8").splitlines()
    return [(row["reward"], row["success"]) for row in map(json.loads, lines)]


@pytest.mark.parametrize("names", [(), ("reward",)])
@pytest.mark.parametrize(
    ("rewards", "are_all_right"),
    [((1, 2, 2), True), ((3, 7, 10), True), ((1, 1.5), True), ((0, 5), False), ((2, 2), False)],
)
def test_a_sources_own_reward_keeps_its_scale_and_a_note_says_how_to_select(
    tmp_path: Path, names: tuple[str, ...], rewards: tuple[float, ...], are_all_right: bool
) -> None:
    made = graded(tmp_path, *({"reward": reward} for reward in rewards), reward_from=names)
    assert outcomes(tmp_path) == [(reward, reward >= 0.5) for reward in rewards]
    (note,) = (note for note in made.notes if note.startswith("rewards go up to"))
    assert ("so that no rollout counts as wrong" in note) == are_all_right
    assert "min_reward of filter_dataset" in note
    assert '["reward>=N"]' in note

    kept = FilterDataset(input="rows.jsonl", output="kept.jsonl", min_reward=max(rewards))
    assert filter_dataset(Workspace(tmp_path), kept).kept == rewards.count(max(rewards))


def test_a_row_that_names_no_success_is_wrong_and_one_that_does_is_no_better(
    tmp_path: Path,
) -> None:
    """A `success` may say that an episode was completed, which makes its answer no better."""
    named = ({"reward": 3, "success": False}, {"reward": 7, "success": True})
    graded(tmp_path, *named, {"reward": 0, "success": True})
    assert outcomes(tmp_path) == [(0, False), (7, True), (0, False)]


def test_files_read_in_place_may_have_ratings_without_a_limit(tmp_path: Path) -> None:
    table = "session,reward\na,1\nb,5\n"
    with pytest.raises(InputError, match="run_recipe then takes the output of that import"):
        imported(tmp_path, table)
    kept = FilterDataset(input="logs", output="kept.jsonl", min_reward=4)
    assert filter_dataset(Workspace(tmp_path), kept).kept == 1


@pytest.mark.parametrize("name", ["stars>4", "thumb|stars=>4", "stars=4", "stars < 2", "stars>=4."])
def test_a_limit_that_cannot_be_read_is_refused_with_the_right_form(
    tmp_path: Path, name: str
) -> None:
    with pytest.raises(InputError, match=r"stars>=NUMBER"):
        imported(tmp_path, "session,stars\na,1\nb,5\n", reward_from=(name,))
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize("name", ["recall@k=5", "eval.score.recall@k=5"])
def test_the_name_of_a_score_may_look_like_a_limit(tmp_path: Path, name: str) -> None:
    columns = ("id=session", "score=recall@k=5")
    made = imported(tmp_path, "session,recall@k=5\na,0.75\n", columns=columns, reward_from=(name,))
    assert made.rewarded == 1


def observations(root: Path, feedback: str, **given: Any) -> ImportResult:
    """Imports four observations of Langfuse, which keep the id of the response as metadata."""
    rows = [
        {"id": f"o{n}", "traceId": f"t{n}", "type": "GENERATION", "model": "m",
         "startTime": "2026-03-01", "input": f"What of {n}?", "output": f"It is {n}.",
         "metadata": {"response_id": f"resp_{n}", "ticket": n, "user_id": "o1"}}
        for n in range(4)
    ]  # fmt: skip
    (root / "calls.jsonl").write_text("\n".join(map(json.dumps, rows)), "utf-8")
    (root / "thumbs.csv").write_text(feedback, "utf-8")
    request = ImportRollouts(input=("calls.jsonl", "thumbs.csv"), output="out.jsonl", **given)
    return import_rollouts(Workspace(root), request)


def thumbs(root: Path) -> list[float | None]:
    lines = (root / "out.jsonl").read_text("utf-8").splitlines()
    return [json.loads(line)["rewards"].get("thumb") for line in lines]


def test_feedback_finds_its_call_by_any_id_of_the_row_and_says_where_it_looked(
    tmp_path: Path,
) -> None:
    made = observations(tmp_path, "response_id,thumb\nresp_0,1\no1,0\nt2,1\nresp_9,1\n")
    assert thumbs(tmp_path) == [1.0, 0.0, 1.0, None]
    assert made.refused_by_reason == {"feedback on a call that was not imported": 1}
    assert "resp_9 was not found in: id, session, trace, " in made.problems[0]
    assert "metadata.response_id" in made.problems[0]
    assert "feedback_by" in made.problems[0]


def test_a_named_field_is_searched_before_the_ids_that_are_searched_anyway(tmp_path: Path) -> None:
    made = observations(tmp_path, "id,thumb\n3,1\no1,0\nt2,1\nx,1\n", feedback_by="ticket")
    assert thumbs(tmp_path) == [None, 0.0, 1.0, 1.0]
    assert made.refused_by_reason == {"feedback on a call that was not imported": 1}
    assert "x was not found in: metadata.ticket, id, session, trace, " in made.problems[0]
    assert "set feedback_by to another field" in made.problems[0]
    observations(tmp_path, "id,thumb\no1,1\n", feedback_by="user_id")
    assert thumbs(tmp_path) == [1.0] * 4
    made = observations(tmp_path, "id,thumb\nx,1\n", feedback_by="nothing")
    assert "x was not found in: nothing (no row has this field), id, " in made.problems[0]


@pytest.mark.parametrize(
    ("row", "about"),
    [
        ({"response": {"id": "chatcmpl-1"}, "id": "r1"}, "chatcmpl-1"),
        ({"request_id": "r1", "trace_id": "t1"}, "t1"),
        ({"metadata": {"langfuse": {"traceId": "t1"}}}, "t1"),
    ],
)
def test_ids_beside_the_bodies_of_a_call_are_ids_of_it(
    tmp_path: Path, row: dict[str, Any], about: str
) -> None:
    message = {"role": "assistant", "content": "Hello"}
    response = {"choices": [{"message": message}]} | row.pop("response", {})
    call = {"request": {"messages": [{"role": "user", "content": "Hi"}]}, "response": response}
    (tmp_path / "calls.jsonl").write_text(json.dumps(call | row), "utf-8")
    (tmp_path / "thumbs.csv").write_text(f"id,thumb\n{about},up\n", "utf-8")
    request = ImportRollouts(input=("calls.jsonl", "thumbs.csv"), output="out.jsonl")
    assert import_rollouts(Workspace(tmp_path), request).merged == 1
    assert thumbs(tmp_path) == [1.0]


@pytest.mark.parametrize(
    ("table", "disagreeing"),
    [
        ("a,up\na,down\nb,up\nb,up\nc,down\n", 1),
        ("a,up\na,down\nc,up\nc,down\nc,down\n", 2),
        ("a,down\na,up\nb,up\nb,down\nb,up\n", 2),
        ("a,up\nb,down\n", 0),
    ],
)
def test_rollouts_whose_feedback_disagrees_are_counted_and_the_lowest_value_counts(
    tmp_path: Path, table: str, disagreeing: int
) -> None:
    made = imported(tmp_path, "session,thumb\n" + table, reward_from=("thumb",))

    said = [note for note in made.notes if "disagrees" in note]
    counted = f"{disagreeing} rollouts have feedback that disagrees with other feedback"
    assert [note[: len(counted)] for note in said] == [counted] * bool(disagreeing)
    judged = {line[0] for line in table.split()}
    wrong = {line[0] for line in table.split() if line.endswith("down")}
    expected = [float(session not in wrong) if session in judged else None for session in "abc"]
    assert [each.get("thumb") for each in scores(tmp_path)] == expected


def test_a_thumb_down_under_any_of_the_joined_names_is_the_reward(tmp_path: Path) -> None:
    table = "session,thumb,rating\na,up,0\nb,0,1\nc,up,1\n"
    made = imported(tmp_path, table, reward_from=("thumb|rating",))

    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text("utf-8").splitlines()]
    assert {row["messages"][-1]["content"]: row["success"] for row in rows} == {
        "a": False,
        "b": False,
        "c": True,
    }
    assert any(note.startswith("2 rollouts have different scores under") for note in made.notes)


def judged_call(score: float, *replies: str) -> dict[str, Any]:
    """Returns a call with a score, the last of a conversation with these replies."""
    turns = [
        [{"role": "user", "content": "Next"}, {"role": "assistant", "content": reply}]
        for reply in replies
    ]
    *history, reply = [message for turn in turns for message in turn]
    response = {"choices": [{"message": reply}]}
    return {"scores": {"thumb": score}, "request": {"messages": history}, "response": response}


@pytest.mark.parametrize(
    ("calls", "thumb", "note"),
    [
        # The same call, logged twice.
        ([judged_call(0, "x"), judged_call(1, "x")], 0.0, "feedback that disagrees"),
        ([judged_call(1, "x"), judged_call(0, "x")], 0.0, "feedback that disagrees"),
        ([judged_call(0, "x"), judged_call(1, "x", "y")], 1.0, "calls with different values"),
        ([judged_call(1, "x"), judged_call(1, "x", "y"), judged_call(1, "x")], 1.0, None),
    ],
)
def test_different_scores_in_the_log_of_a_conversation_are_counted(
    tmp_path: Path, calls: list[dict[str, Any]], thumb: float, note: str | None
) -> None:
    (tmp_path / "calls.jsonl").write_text("\n".join(map(json.dumps, calls)), "utf-8")
    made = import_rollouts(
        Workspace(tmp_path), ImportRollouts(input="calls.jsonl", output="out.jsonl")
    )
    assert thumbs(tmp_path) == [thumb]
    counted = [said for said in made.notes if said.startswith("1 rollouts have")]
    assert len(counted) == (note is not None)
    assert all(note is not None and note in said for said in counted)


@pytest.mark.parametrize(("score", "table"), [(1, "a,down\n"), (0, "a,up\n")])
def test_feedback_that_disagrees_with_a_score_of_the_log_is_counted(
    tmp_path: Path, score: float, table: str
) -> None:
    row = {
        "session": "a",
        "scores": {"thumb": score},
        "request": {"messages": [{"role": "user", "content": "Hi"}]},
        "response": {"choices": [{"message": {"role": "assistant", "content": "a"}}]},
    }
    (tmp_path / "calls.jsonl").write_text(json.dumps(row), "utf-8")
    (tmp_path / "thumbs.csv").write_text("session,thumb\n" + table, "utf-8")
    request = ImportRollouts(input=("calls.jsonl", "thumbs.csv"), output="out.jsonl")

    made = import_rollouts(Workspace(tmp_path), request)

    assert any(note.startswith("1 rollouts have feedback that disagrees") for note in made.notes)
    assert thumbs(tmp_path) == [0.0]


_JUDGED_ROWS = {
    "rows.csv": "question,answer,thumb,source\nA?,a,up,web\nB?,b,down,web\nC?,c,,web\n",
    "rows.jsonl": "".join(
        json.dumps(
            {
                "messages": [
                    {"role": "user", "content": f"{name.upper()}?"},
                    {"role": "assistant", "content": name},
                ],
                "thumb": thumb,
                "source": "web",
            }
        )
        + "\n"
        for name, thumb in (("a", "up"), ("b", 0), ("c", None))
    ),
    "calls.jsonl": "".join(
        json.dumps(
            {
                "request": {"messages": [{"role": "user", "content": f"{name.upper()}?"}]},
                "response": {"choices": [{"message": {"role": "assistant", "content": name}}]},
                "thumb": thumb,
            }
        )
        + "\n"
        for name, thumb in (("a", "👍"), ("b", False), ("c", None))
    ),
}


@pytest.mark.parametrize("name", _JUDGED_ROWS)
def test_a_thumb_in_the_row_of_its_conversation_is_a_score_that_may_be_the_reward(
    tmp_path: Path, name: str
) -> None:
    (tmp_path / name).write_text(_JUDGED_ROWS[name], "utf-8")
    made = import_rollouts(Workspace(tmp_path), ImportRollouts(input=name, output="plain.jsonl"))
    assert (made.scores, made.rewarded) == ({"thumb": 2}, 0)
    assert [note for note in made.notes if "(thumb) but no reward" in note]

    request = ImportRollouts(input=name, output="out.jsonl", reward_from=("thumb",))
    import_rollouts(Workspace(tmp_path), request)
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text("utf-8").splitlines()]
    assert [row["reward"] for row in rows] == [1.0, 0.0, None]


def test_a_reward_in_a_table_is_the_reward(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("question,answer,reward\nA?,a,0.25\nB?,b,\n", "utf-8")
    request = ImportRollouts(input="rows.csv", output="out.jsonl")
    assert import_rollouts(Workspace(tmp_path), request).rewarded == 1
