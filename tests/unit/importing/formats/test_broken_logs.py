"""Whatever stands in a log, its reader raises nothing and accounts for every row."""

import copy
import json
import random

import pytest

from fakes.scripted_calls import write_rows
from fakes.trace_files import LOG_FORMATS, SAMPLES, places_in, read, sample_files
from stillroom.importing.records import LoggedConversation

_ODD = (None, 0, -1.5, True, "", "x", "[", '{"a": [', [], {}, [[]], [None], {"a": 1},
        [{"type": 5}], {"type": []}, 10**30, "2026", "\u0000", [{"role": "user"}],
        {"role": "assistant"})  # fmt: skip
_NUM_BROKEN = 25


def rows_of(path):
    if path.suffix == ".csv":
        return []
    text = path.read_text("utf-8")
    documents = [text] if path.suffix == ".json" else text.splitlines()
    return [json.loads(document) for document in documents]


@pytest.mark.parametrize("name", LOG_FORMATS)
def test_rows_with_odd_values_are_read_or_refused(name, tmp_path):
    chosen = random.Random(name)
    files = [path for path in sample_files() if path.is_relative_to(SAMPLES / name)]
    rows = [row for path in files for row in rows_of(path)]
    broken = []
    for _ in range(_NUM_BROKEN):
        row = copy.deepcopy(chosen.choice(rows))
        for _ in range(chosen.randint(1, 3)):
            holder, key = chosen.choice(list(places_in(row)))
            holder[key] = copy.deepcopy(chosen.choice(_ODD))
        broken.append(row)
    path = write_rows(tmp_path / "broken.jsonl", *broken)
    items = read(name, path)
    places = [item.place for item in items]
    places += [p for item in items if isinstance(item, LoggedConversation) for p in item.also_at]
    assert {place.line for place in places} == set(range(1, _NUM_BROKEN + 1))
    for item in items:
        if isinstance(item, LoggedConversation):
            json.dumps(item.messages)
            assert all(isinstance(message["content"], str) for message in item.messages)


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
        assert {item.place.line for item in read(name, path)} == {1, 2}
