"""Tables of feedback, which stand beside a log and judge its conversations."""

import json
from pathlib import Path
from typing import Any

import pytest

from stillroom.importing.request import ImportResult, ImportRollouts
from stillroom.importing.run import import_rollouts
from stillroom.settings import Workspace


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
    ],
)
def test_a_table_of_thumbs_judges_the_sessions_that_it_names(tmp_path: Path, feedback: str) -> None:
    made = imported(tmp_path, feedback, reward_from=("thumb|Thumb",))
    assert [list(each.values()) for each in scores(tmp_path)] == [[1.0], [0.0], []]
    assert made.rewarded == 2
    assert made.read == made.kept + made.merged + made.refused


def test_other_columns_and_json_rows_of_feedback_are_read_if_they_are_named(tmp_path: Path) -> None:
    columns = ("id=chat", "score=happy")
    imported(tmp_path, "chat,happy\na,5\nb,never\nz,1\n", columns=columns)
    assert scores(tmp_path) == [{"happy": 5.0}, {}, {}]
    refused = (tmp_path / "out.jsonl.refused").read_text("utf-8")
    assert "feedback without a number" in refused
    assert "feedback about no call that was kept" in refused

    (tmp_path / "json").mkdir()
    imported(tmp_path / "json", '{"chat": "c", "happy": 2}\n', "votes.jsonl", columns=columns)
    assert scores(tmp_path / "json") == [{}, {}, {"happy": 2.0}]


def test_a_table_with_an_id_and_a_value_among_other_columns_is_no_feedback(tmp_path: Path) -> None:
    made = imported(tmp_path, "id,text,lang,score\n1,What?,en,3\n2,Who?,en,4\n")
    assert made.refused_by_reason == {"no column holds the conversation": 1}
    assert "of a table of feedback" in made.problems[0]
