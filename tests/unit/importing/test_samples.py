"""The samples of all formats, imported: each comes back as the conversation it was."""

import json
import shutil
from pathlib import Path

import pytest

from fakes.scripted_calls import plain_conversation
from fakes.trace_files import SAMPLES, write_lines
from stillroom.data.checks import message_problems
from stillroom.importing.formats.table import FORMATS
from stillroom.importing.request import ImportRollouts
from stillroom.importing.run import import_rollouts
from stillroom.settings import Workspace

_KEPT = {
    "alpaca": 3,
    "atif": 4,
    "claude_code": 6,
    "codex": 5,
    "csv": 3,
    "inspect_ai": 4,
    "nemo_gym": 1,
    "openai_agents": 4,
    "openai_evals": 1,
    "openai_fine_tuning": 8,
    "openai_preferences": 2,
    "openhands": 3,
    "pairs": 3,
    "rnow": 1,
    "sharegpt": 3,
    "swe_agent": 2,
    "trl_preferences": 6,
    "verifiers": 1,
    "verifiers_traces": 2,
}
"""The conversations that the samples of each format hold."""


def test_the_samples_of_all_formats_are_recognised_and_kept_in_one_import(tmp_path):
    for name in _KEPT:
        shutil.copytree(
            SAMPLES / name, tmp_path / "logs" / name, ignore=shutil.ignore_patterns("*.seen.json")
        )
    request = ImportRollouts(input="logs/**/*", output="out.jsonl", reward_from=("preferred",))
    result = import_rollouts(Workspace(tmp_path), request)
    assert {name: counts.kept for name, counts in result.formats.items()} == _KEPT
    assert result.kept + result.merged + result.refused == result.read
    assert result.refused_by_reason == {"no model call": 20, "no assistant message": 2}
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_bytes().splitlines()]
    assert [list(message_problems(row["messages"])) for row in rows] == [[]] * sum(_KEPT.values())
    pair = [row for row in rows if row["reward"] is not None]
    assert sorted(row["reward"] for row in pair) == [0.0] * 4 + [1.0] * 4
    # The pairs about Oslo, of both formats, are of one task.
    assert len({row["task_id"] for row in pair}) == 3


def test_named_columns_make_a_table_of_rows_that_no_format_knows(tmp_path):
    write_lines(tmp_path / "rows.jsonl", {"q": "Two plus two?", "a": "4", "n": 1})
    columns = {"user": "q", "assistant": "a"}
    request = ImportRollouts(input="rows.jsonl", output="out.jsonl", columns=columns)
    assert import_rollouts(Workspace(tmp_path), request).kept == 1
    (row,) = map(json.loads, (tmp_path / "out.jsonl").read_bytes().splitlines())
    assert [m["content"] for m in row["messages"]] == ["Two plus two?", "4"]
    assert row["metadata"] == {"n": 1}


_JUDGED = ("helicone", "langfuse", "phoenix")


@pytest.mark.parametrize(
    ("sources", "num_rollouts"),
    [
        ("anthropic_messages", 2),
        ("openai_responses/chained.jsonl", 1),
        ("openai_batch", 1),
        ("anthropic_batch", 1),
        ("gemini", 3),
        ("otel_genai/traceloop_anthropic.jsonl", 1),
        ("otel_genai/ai_sdk.jsonl", 1),
        ("openinference", 1),
        ("phoenix", 1),
        ("langfuse", 1),
        ("langsmith", 1),
        ("litellm", 1),
        ("helicone", 1),
        ("stored_completions", 1),
    ],
)
def test_the_calls_of_a_sample_become_the_conversation_that_was_held(
    sources, num_rollouts, tmp_path
):
    given = SAMPLES / sources
    copy = shutil.copytree if given.is_dir() else shutil.copy
    copy(given, tmp_path / "logs" if given.is_dir() else tmp_path)
    name = "logs" if given.is_dir() else given.name
    result = import_rollouts(Workspace(tmp_path), ImportRollouts(input=name, output="out.jsonl"))
    assert result.kept + result.merged + result.refused == result.read
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_bytes().splitlines()]
    assert len(rows) == num_rollouts
    assert result.calls_per_rollout.high <= 3
    for row in rows:
        assert [(m["role"], m["content"]) for m in row["messages"]] == plain_conversation()
        assert {answerer["model"] for answerer in row["answered_by"]} == {"scripted-1"}
        assert [tool["function"]["name"] for tool in row["tools"]] == ["price", "stock"]
        assert row["rewards"].get("helpful") == (1.0 if sources in _JUDGED else None)
    assert set(result.refused_by_reason) <= {"no model call", "feedback without a number"}


PAGE = Path(__file__).parents[3] / "docs" / "traces.md"


def test_the_page_on_traces_explains_every_format():
    page = PAGE.read_text(encoding="utf-8")
    assert len({known.name for known in FORMATS}) == len(FORMATS) >= 14
    assert [known.name for known in FORMATS if f"`{known.name}`" not in page] == []
