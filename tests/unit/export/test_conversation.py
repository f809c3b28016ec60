from pathlib import Path

import pytest

from fakes.conversations import answer, user
from fakes.rollout_rows import write_rows
from stillroom.export.conversation import evaluated_conversation, trained_conversation
from stillroom.lineage import now, record_file
from stillroom.settings import Workspace
from stillroom.versions import tag_file

SYSTEM = {"role": "system", "content": "Be brief."}
TOOL = {"type": "function", "function": {"name": "price", "parameters": {}}}


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [SYSTEM, user("a"), answer("b")], "tools": [TOOL]},
        {"prompt": [SYSTEM, user("a")], "chosen": [], "rejected": [], "tools": [TOOL]},
    ],
)
def test_the_most_frequent_system_message_and_tools_are_those_trained(tmp_path: Path, row) -> None:
    bare = {"messages": [user("a"), answer("b")]}
    path = write_rows(tmp_path / "rows.jsonl", [row, bare, row])

    trained = trained_conversation(Workspace(tmp_path), record_file(path))

    assert trained is not None
    assert (trained.num_rows, trained.system, trained.tool_schemas) == (3, "Be brief.", [TOOL])
    assert trained.systems == {"Be brief.": 2, "": 1}


def test_rows_that_have_changed_say_nothing_but_their_kept_copy_does(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [{"messages": [SYSTEM, user("a"), answer("b")]}])
    record = record_file(path)
    write_rows(path, [{"messages": [user("a"), answer("b")]}])
    assert trained_conversation(Workspace(tmp_path), record) is None

    write_rows(path, [{"messages": [SYSTEM, user("a"), answer("b")]}])
    tag_file(tmp_path, path, "v1", created_at=now(), manifest=None)
    path.unlink()
    trained = trained_conversation(Workspace(tmp_path), record)
    assert trained is not None
    assert trained.system == "Be brief."


def test_evaluations_of_the_same_questions_are_known_with_and_without_a_system_message(
    tmp_path: Path,
) -> None:
    def rollouts(name: str, questions: str, *system: dict) -> Path:
        rows = [{"messages": [*system, user(q), answer("7")]} for q in questions]
        return write_rows(tmp_path / name, rows)

    with_it = evaluated_conversation(rollouts("a", "xyz", SYSTEM))
    without = evaluated_conversation(rollouts("b", "zyx"))
    other = evaluated_conversation(rollouts("c", "xy"))

    assert with_it is not None
    assert without is not None
    assert other is not None
    assert (with_it.system, without.system) == ("Be brief.", "")
    assert with_it.questions == without.questions != other.questions
    assert evaluated_conversation(tmp_path / "none") is None
