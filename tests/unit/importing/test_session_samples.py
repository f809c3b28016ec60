"""The samples of sessions, evaluations and datasets, imported together."""

import json
import shutil

from fakes.trace_files import SAMPLES, write_lines
from stillroom.data.checks import message_problems
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
