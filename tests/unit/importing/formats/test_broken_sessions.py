"""Whatever stands in a session, a result or a dataset, its reader raises nothing."""

import copy
import json
import random

import pytest

from fakes.trace_files import SAMPLES, places_in, read, sample_files, write_lines
from stillroom.data.checks import message_problems
from stillroom.importing.records import LoggedConversation

_FORMATS = (
    "alpaca",
    "atif",
    "claude_code",
    "claude_code_output",
    "codex",
    "inspect_ai",
    "nemo_gym",
    "openai_agents",
    "openai_evals",
    "openai_fine_tuning",
    "openai_preferences",
    "openhands",
    "pairs",
    "rnow",
    "sharegpt",
    "swe_agent",
    "trl_preferences",
    "verifiers",
    "verifiers_traces",
)
_ODD = (None, 0, -1.5, True, "", "x", "[", '{"a": [', [], {}, [[]], [None], {"a": 1}, 10**30,
        [{"type": 5}], {"type": []}, {"type": "x"}, "\u0000", [{"role": "user"}], ["x"],
        {"role": "assistant"}, [{"type": "text", "text": 5}])  # fmt: skip
_NUM_FILES = 12


def rows_of(path):
    if path.suffix not in (".json", ".jsonl", ".traj"):
        return []
    text = path.read_text("utf-8")
    rows = (
        [json.loads(line) for line in text.splitlines()]
        if path.suffix == ".jsonl"
        else [json.loads(text)]
    )
    return rows[0] if isinstance(rows[0], list) else rows


def broken(rows, chosen):
    """The rows with some values replaced, taken out or given twice."""
    rows = copy.deepcopy(rows)
    places = list(places_in(rows))
    for holder, key in chosen.sample(places, min(len(places), chosen.randint(1, 6))):
        if isinstance(holder, dict) and key in holder and chosen.random() < 0.3:
            del holder[key]
        elif isinstance(holder, dict) or key < len(holder):
            odd = copy.deepcopy(chosen.choice(_ODD))
            holder[key] = odd if chosen.random() < 0.7 else copy.deepcopy(chosen.choice(places)[0])
    return rows


def read_and_check(name, path):
    for item in read(name, path):
        if isinstance(item, LoggedConversation):
            json.dumps((item.messages, item.tools, item.metadata, item.scores), allow_nan=False)
            assert all(isinstance(message["content"], str) for message in item.messages)
            problems = {
                problem.field.rpartition(".")[2] for problem in message_problems(item.messages)
            }
            assert problems <= {"role", "tool_call_id", "weight"}, problems


@pytest.mark.parametrize("name", _FORMATS)
def test_files_with_odd_values_are_read_or_refused(name, tmp_path):
    chosen = random.Random(name)
    files = [rows_of(p) for p in sample_files() if p.is_relative_to(SAMPLES / name)]
    for number in range(_NUM_FILES):
        rows = broken(chosen.choice([rows for rows in files if rows]), chosen)
        if name == "inspect_ai":
            path = tmp_path / f"{number}.json"
            path.write_text(json.dumps(rows[0]))
        else:
            path = write_lines(tmp_path / f"rollout-{number}.jsonl", *rows)
        read_and_check(name, path)
