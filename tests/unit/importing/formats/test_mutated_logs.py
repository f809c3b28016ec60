"""Whatever is in a log, its import raises nothing and accounts for every row."""

from pathlib import Path

import pytest

from fakes.mutated_logs import MUTATED_FORMATS, check_mutated
from fakes.scripted_calls import write_rows
from fakes.trace_files import read


@pytest.mark.thorough
@pytest.mark.parametrize("name", MUTATED_FORMATS)
def test_every_row_of_a_broken_log_is_kept_merged_or_refused(name: str, tmp_path: Path) -> None:
    assert check_mutated(tmp_path, name, seed=0, num_files=12) > 0


@pytest.mark.parametrize(
    "key", ["input", "args", "messages", "output", "data", "content", "traces"]
)
@pytest.mark.parametrize("depth", [50, 400, 800])
def test_rows_that_are_nested_deeply_are_refused_or_read(key, depth, tmp_path):
    deep = f'{{"{key}":' * depth + '"x"' + "}" * depth
    observation = '{"id":"o","traceId":"t","type":"GENERATION","input":%s,"output":%s}'
    run = '{"id":"r","run_type":"llm","inputs":%s,"outputs":%s}'
    call = '{"call_type":"completion","response_cost":1,"messages":%s,"response":%s}'
    for name, row in (("langfuse", observation), ("langsmith", run), ("litellm", call)):
        path = write_rows(tmp_path / "deep.jsonl", (row % (deep, deep)).encode(), deep.encode())
        assert {item.location.line for item in read(name, path)} == {1, 2}
