"""The samples of logs and traces, imported: each comes back as the conversation it was."""

import json
import shutil

import pytest

from fakes.scripted_calls import plain_conversation
from fakes.trace_files import SAMPLES
from stillroom.importing.request import ImportRollouts
from stillroom.importing.run import import_rollouts
from stillroom.settings import Workspace

_JUDGED = ("helicone", "langfuse", "phoenix")


@pytest.mark.parametrize(
    ("sources", "num_calls"),
    [
        ("anthropic_messages", 6),
        ("openai_responses/chained.jsonl", 3),
        ("openai_batch", 3),
        ("anthropic_batch", 3),
        ("gemini", 9),
        ("otel_genai/traceloop_anthropic.jsonl", 3),
        ("otel_genai/ai_sdk.jsonl", 3),
        ("openinference", 7),
        ("phoenix", 6),
        ("langfuse", 9),
        ("langsmith", 12),
        ("litellm", 6),
        ("helicone", 3),
        ("stored_completions", 3),
    ],
)
def test_the_calls_of_a_sample_become_the_conversation_that_was_held(sources, num_calls, tmp_path):
    given = SAMPLES / sources
    copy = shutil.copytree if given.is_dir() else shutil.copy
    copy(given, tmp_path / "logs" if given.is_dir() else tmp_path)
    name = "logs" if given.is_dir() else given.name
    result = import_rollouts(Workspace(tmp_path), ImportRollouts(input=name, output="out.jsonl"))
    assert result.kept + result.merged + result.refused == result.read
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_bytes().splitlines()]
    assert len(rows) == num_calls // result.calls_per_rollout.mean
    for row in rows:
        assert [(m["role"], m["content"]) for m in row["messages"]] == plain_conversation()
        assert {answerer["model"] for answerer in row["answered_by"]} == {"scripted-1"}
        assert [tool["function"]["name"] for tool in row["tools"]] == ["price", "stock"]
        assert row["rewards"].get("helpful") == (1.0 if sources in _JUDGED else None)
    assert set(result.refused_by_reason) <= {"no model call", "feedback without a number"}
