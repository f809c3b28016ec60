"""Rollouts of rnow and NeMo Gym."""

from fakes.foreign_rollouts import GYM_ROW, RNOW_ROW
from fakes.trace_files import SAMPLES, conversations, read, refusals, shown, write_lines
from stillroom.types import Usage


def test_a_rollout_of_rnow_keeps_its_rewards_and_tokens():
    (row,) = conversations(read("rnow", SAMPLES / "rnow" / "sample_1.json"))
    assert shown(row.messages) == shown(RNOW_ROW["conversation"])
    assert row.messages[2]["reasoning_content"] == "I look it up."
    assert row.scores == {"reward": 0.75, "accuracy": 0.5, "brevity": 0.25}
    assert row.usage == Usage(prompt_tokens=301, completion_tokens=111)
    assert (row.id, row.duration_s, row.finish_reason) == ("sample_1", 1.5, "stop")
    assert row.metadata["answer"] == "12"


def test_a_rollout_of_nemo_gym_keeps_its_model_and_tools():
    (row,) = conversations(read("nemo_gym", SAMPLES / "nemo_gym" / "rollouts.jsonl"))
    assert [m["role"] for m in row.messages][:3] == ["system", "user", "assistant"]
    assert row.messages[2]["reasoning_content"] == "I look it up."
    assert [call["id"] for call in row.messages[2]["tool_calls"]] == ["call_1", "call_2"]
    assert [tool["function"]["name"] for tool in row.tools] == ["price", "stock"]
    assert (row.model, row.scores["reward"]) == ("m", GYM_ROW["reward"])


def test_rows_that_are_no_rollouts_are_refused_and_failed_ones_keep_their_error(tmp_path):
    failed = RNOW_ROW | {"completed": False, "total_reward": 0}
    broken = RNOW_ROW | {"conversation": [{"role": "user"}]}
    rows = read("rnow", write_lines(tmp_path / "x.jsonl", {"a": 1}, failed, broken))
    assert refusals(rows) == [(1, "is no rollout of rnow"), (3, "the rollout cannot be read")]
    assert (rows[1].error, "reward" in rows[1].scores) == ("the rollout was not completed", False)
