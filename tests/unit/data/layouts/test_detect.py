from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes.foreign_rollouts import (
    FOREIGN_ROWS,
    GYM_ROW,
    RNOW_ROW,
    TUTORIAL_ROW,
)
from fakes.mangling import JSON, mangled
from fakes.rollout_rows import assistant, rollout_row, user
from stillroom.data.checks import message_problems, tool_schema_problems
from stillroom.data.layouts.detect import (
    RULES,
    RolloutLayout,
    as_rollout,
    layout_of,
    rollout_problems,
)

Row = dict[str, Any]
FOREIGN = (RolloutLayout.RNOW, RolloutLayout.NEMO_GYM)


@pytest.mark.parametrize(
    ("row", "layout"),
    [
        (rollout_row(), "stillroom"),
        (RNOW_ROW, "rnow"),
        (GYM_ROW, "nemo_gym"),
        (TUTORIAL_ROW, "nemo_gym"),
        ({"output": [], "reward": 1}, "nemo_gym"),
        ({"responses_create_params": {"input": "x"}}, None),
        ({"messages": [user("a"), assistant("b")]}, None),
        ({"conversation": [user("a")]}, None),
        ({}, None),
    ],
)
def test_a_layout_is_told_from_its_fields(row: Row, layout: str | None) -> None:
    assert layout_of(row) == layout


def test_a_rollout_of_rnow_is_read_whole() -> None:
    ours = as_rollout(RNOW_ROW)

    assert ours["messages"] == RNOW_ROW["conversation"]
    assert (ours["id"], ours["reward"], ours["success"]) == ("sample_1", 0.75, None)
    assert ours["rewards"] == {"accuracy": 0.5, "brevity": 0.25}
    assert ours["metadata"] == RNOW_ROW["metadata"]
    assert (ours["stop_reason"], ours["turns"], ours["error"]) == ("answered", 2, None)
    assert ours["usage"] == {"prompt_tokens": 301, "completion_tokens": 111}
    other_answer = {**RNOW_ROW, "conversation": [*RNOW_ROW["conversation"][:2], assistant("?")]}
    other_task = {**RNOW_ROW, "conversation": [user("else"), assistant("?")]}
    assert as_rollout(other_answer)["task_id"] == ours["task_id"]
    assert as_rollout(other_task)["task_id"] != ours["task_id"]


@pytest.mark.parametrize(
    ("changes", "kind", "reported"),
    [
        ({"completed": "error", "success": False, "error": "boom"}, "internal", "boom"),
        ({"completed": "error", "errors": ["late", "very"]}, "internal", "late; very"),
        ({"rewards": {"a": 1.0, "b": "timeout"}}, "reward", "reward failed: b"),
        ({"rewards": {"b": "error"}, "errors": ["b: boom"]}, "reward", "b: boom"),
    ],
)
def test_a_failure_of_rnow_is_no_reward_of_zero(changes: Row, kind: str, reported: str) -> None:
    ours = as_rollout({**RNOW_ROW, "total_reward": 0, **changes})

    assert (ours["reward"], ours["success"], ours["stop_reason"]) == (None, None, "error")
    assert ours["error"]["class"] == kind
    assert reported in ours["error"]["message"]


@pytest.mark.parametrize(
    ("changes", "success"),
    [
        ({"completed": False}, False),
        ({"completed": True}, None),
        ({"success": False}, False),
        # It only says that the rollout ran; total_reward judges the answer.
        ({"success": True}, None),
    ],
)
def test_a_rollout_of_rnow_that_did_not_complete_is_no_success_and_no_failure(
    changes: Row, success: bool | None
) -> None:
    row = {key: value for key, value in RNOW_ROW.items() if key != "success"}
    ours = as_rollout({**row, **changes})
    assert (ours["success"], ours["error"], ours["reward"]) == (success, None, 0.75)


def test_a_rollout_of_nemo_gym_becomes_chat_messages() -> None:
    ours = as_rollout(GYM_ROW)

    system, requested, calls, price, stock, answer = ours["messages"]
    assert system == {"role": "system", "content": "You mind a shop."}
    assert requested == {"role": "user", "content": "What is a lamp?"}
    assert calls["reasoning_content"] == "I look it up."
    assert [(c["id"], c["function"]["arguments"]) for c in calls["tool_calls"]] == [
        ("call_1", '{"item": "lamp"}'),
        ("call_2", "{}"),
    ]
    assert price == {"role": "tool", "tool_call_id": "call_1", "content": "7"}
    assert stock["content"] == "5"
    assert answer == {"role": "assistant", "content": "It costs 7."}
    assert ours["tools"][0] == {
        "type": "function",
        "function": {
            "name": "price",
            "parameters": GYM_ROW["responses_create_params"]["tools"][0]["parameters"],
            "strict": True,
        },
    }
    assert (ours["reward"], ours["success"], ours["stop_reason"]) == (1.0, None, "answered")
    assert ours["metadata"]["verifier_metadata"] == {"expected": 7}
    assert ours["usage"] == {"prompt_tokens": 30, "completion_tokens": 12}
    assert list(message_problems(ours["messages"])) == []
    assert list(tool_schema_problems(ours["tools"])) == []


def test_a_row_of_the_tutorial_has_its_items_at_the_top() -> None:
    ours = as_rollout(TUTORIAL_ROW)

    assert ours["messages"][0] == {"role": "user", "content": "What is a lamp?"}
    assert ours["messages"][-1]["content"] == "It costs 7."
    assert (ours["success"], ours["metadata"]) == (False, {"task_type": "price"})


def test_a_response_that_failed_is_no_reward_of_zero() -> None:
    response = {**GYM_ROW["response"], "error": {"code": "server_error", "message": "boom"}}
    ours = as_rollout({**GYM_ROW, "response": response, "reward": 0.0})

    assert (ours["reward"], ours["stop_reason"]) == (None, "error")
    assert ours["error"] == {"class": "internal", "message": "boom"}


@pytest.mark.parametrize(
    ("row", "field"),
    [
        ({**RNOW_ROW, "conversation": []}, "conversation"),
        ({**RNOW_ROW, "conversation": [{"role": "x", "content": ""}]}, "conversation[0].role"),
        ({**RNOW_ROW, "total_reward": "1"}, "total_reward"),
        ({**RNOW_ROW, "rewards": {"a": "late"}}, "rewards.a"),
        ({**RNOW_ROW, "rewards": [1]}, "rewards"),
        ({**RNOW_ROW, "metadata": []}, "metadata"),
        ({**GYM_ROW, "reward": "1"}, "reward"),
        ({**GYM_ROW, "response": 5}, "response"),
        ({**GYM_ROW, "response": {"output": [{"type": "mcp_call"}]}}, "response.output[0].type"),
        ({**GYM_ROW, "response": {"output": [5]}}, "response.output[0]"),
        ({**GYM_ROW, "response": {"output_text": "x"}}, "output"),
        ({**GYM_ROW, "responses_create_params": {}}, "responses_create_params.input"),
        ({**TUTORIAL_ROW, "output": [{"role": "robot"}]}, "output[0].role"),
    ],
)
def test_what_is_wrong_with_a_row_is_told_with_its_field(row: Row, field: str) -> None:
    assert [problem.field for problem in rollout_problems(row)] == [field]


@given(mangled(FOREIGN_ROWS), st.dictionaries(st.just("extra"), JSON))
def test_a_foreign_row_is_refused_or_becomes_one_without_problems(row: Row, more: Row) -> None:
    row = {**row, **more}
    layout = layout_of(row)
    if layout not in FOREIGN or list(rollout_problems(row)):
        return
    ours = RULES[layout].to_stillroom(row)

    assert list(message_problems(ours["messages"])) == []
    assert list(rollout_problems(ours)) == []
