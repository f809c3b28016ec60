"""The module in C gives the outline of what Python would find out too, and of nothing else."""

import json
import os
import random
import subprocess
import sys
from inspect import isbuiltin
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import stillroom
from fakes.compiled_outline import WARNINGS, can_compile, compile_outline, load_outline
from fakes.facts import in_full
from fakes.foreign_rollouts import GYM_ROW
from fakes.mangling import mangled
from fakes.outline_lines import (
    BAD_VALUES,
    GOOD_VALUES,
    MESSAGES,
    ROWS,
    SFT_ROW,
    TALK,
    TWICE,
)
from fakes.rollout_lines import BAD_LINES, deep, encoded, mutated, rollout_lines, row_with, saying
from fakes.rollout_rows import assistant, rollout_row, tool_call, user
from stillroom.curate.rows.outline import no_outline
from stillroom.curate.rows.read import _Reader, outline
from stillroom.curate.rows.supervised import outlined_facts
from stillroom.lines import Line

ROOT = Path(stillroom.__file__).parents[2]
UNDEFINED = ("-fsanitize=undefined", "-fsanitize-undefined-trap-on-error")


@pytest.fixture(scope="module", params=[(), ("-U__SSE2__", "-O2"), UNDEFINED], ids=str)
def native(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    flags = (*WARNINGS, *request.param)
    return load_outline(compile_outline(tmp_path_factory.mktemp("native"), *flags))


def exactly(data: bytes) -> memoryview:
    """The bytes with others around them, which do not belong to them."""
    return memoryview(b'"' * 32 + data + b'"' * 32)[32:-32]


def found(data: bytes, **also: Any) -> tuple[Any, ...]:
    """What curation makes of a line."""
    reader = _Reader(**also)
    [row] = reader.read(Path("f"), [Line(1, 0, len(data), exactly(data))])
    parts = row.parts and tuple(bytes(getattr(row.parts, n)) for n in row.parts.__struct_fields__)
    facts = in_full(row.facts)
    return facts, row.problem, parts, row.layout, row.translated


def both_ways(native: ModuleType, data: bytes) -> None:
    for with_parts, with_supervised in ((False, False), (True, False), (False, True)):
        also = {"with_parts": with_parts, "with_supervised": with_supervised}
        at_once = found(data, **also, outline=native.outline)
        assert at_once == found(data, **also, outline=no_outline)


def test_the_fields_that_are_cut_out_are_those_that_are_decoded(native: ModuleType) -> None:
    assert set(native.SHORT_FIELDS) == outline._SHORT_FIELDS
    assert native.VERSION == outline._VERSION


def test_an_outline_tells_how_the_conversation_goes(native: ModuleType) -> None:
    line = encoded(rollout_row(messages=TALK, metadata={"ü": [1]}, more={"id": 1}), compact=False)

    found = native.outline(line)

    row = json.loads(line)
    assert json.loads(found.fields) == {
        name: row[name] for name in native.SHORT_FIELDS if name in row
    }
    assert json.loads(line[found.start : found.end]) == TALK
    assert not found.is_conversation
    assert found.num_turns == 2
    assert json.loads(line[found.last_start : found.last_end]) == TALK[-1]
    assert not found.is_open
    assert not found.has_gym_field


@pytest.mark.parametrize(
    ("messages", "is_open"), [([], True), (TALK[:2], True), (TALK[:3], True), (TALK, False)]
)
def test_an_answer_of_the_assistant_ends_a_conversation(
    native: ModuleType, messages: list, is_open: bool
) -> None:
    found = native.outline(encoded(rollout_row(messages=messages)))

    assert found.is_open is is_open
    assert (found.last_start == found.last_end) == (messages == [])


@settings(deadline=None)
@given(line=rollout_lines())
def test_what_is_usual_has_an_outline(native: ModuleType, line: bytes) -> None:
    assert native.outline(line) is not None
    both_ways(native, line)


@pytest.mark.parametrize("value", GOOD_VALUES, ids=range(len(GOOD_VALUES)))
def test_a_value_of_any_kind_is_gone_over(native: ModuleType, value: bytes) -> None:
    line = row_with(b"more", value)

    assert native.outline(exactly(line)) is not None
    both_ways(native, line)


@pytest.mark.parametrize("value", [*BAD_VALUES, deep(100)], ids=range(len(BAD_VALUES) + 1))
def test_what_is_no_value_or_a_deep_one_has_no_outline(native: ModuleType, value: bytes) -> None:
    for line in (row_with(b"more", value), row_with(b"metadata", value), saying(value)):
        assert native.outline(exactly(line)) is None
        both_ways(native, line)


@pytest.mark.parametrize("line", [*BAD_LINES, encoded(GYM_ROW)], ids=range(len(BAD_LINES) + 1))
def test_of_what_is_no_rollout_both_ways_say_the_same(native: ModuleType, line: bytes) -> None:
    both_ways(native, line)


@pytest.mark.parametrize(
    "more",
    [
        {"success": True},
        {"success": 5},
        {"completed": True},
        {"stop_reason": None},
        {"stop_reason": "answered"},
        {"stillroom": {}},
        {"output": [], "reward": 1.0},
        {"output": [{"type": "message", "role": "assistant", "content": "a"}]},
        {"responses_create_params": {"input": "a"}, "response": {"output": []}},
        {"id": 5},
        {"rollout_id": 5},
        {"task_id": None},
        {"reward": "1"},
        {"metadata": []},
        {"tools": 5},
        {"tools": [{}]},
        {"tool_errors": "none"},
        {"messages": TALK[:2]},
        {"messages": TALK[:3]},
        {"messages": []},
        {"conversation": []},
    ],
    ids=str,
)
def test_of_supervised_rows_both_ways_say_the_same(native: ModuleType, more: dict) -> None:
    both_ways(native, encoded(SFT_ROW | more))


def test_a_supervised_row_is_told_by_its_outline(native: ModuleType) -> None:
    line = encoded(SFT_ROW)

    facts = outlined_facts(Line(1, 0, len(line), line), native.outline(line))

    assert facts is not None
    assert (facts.id, facts.task_id, facts.reward, facts.num_turns) == ("task-0", "task", 1.0, 2)


@pytest.mark.parametrize("message", MESSAGES, ids=range(len(MESSAGES)))
def test_of_every_message_both_ways_say_the_same(native: ModuleType, message: Any) -> None:
    called = assistant(None, tool_call(call_id="x"), tool_call(call_id="\n"))
    for before in ([user("a")], [user("a"), called], [user("a") | {"tool_calls": [tool_call()]}]):
        for name in ("messages", "conversation"):
            rest = {"stop_reason": "a", "id": "a", "task_id": "t", "completed": True}
            both_ways(native, encoded({name: [*before, message], **rest}))
            both_ways(native, encoded({name: [*before, message], "reward": 1}))


@pytest.mark.parametrize("line", TWICE, ids=range(len(TWICE)))
def test_of_a_field_that_stands_there_twice_both_ways_take_the_same(
    native: ModuleType, line: bytes
) -> None:
    both_ways(native, line)


@pytest.mark.parametrize("mark", [b'"', b"\\n", b"\x1f", b"\x80", b"\xc3\xbc", b"\\u00fc", b"\\"])
def test_no_place_in_a_text_is_passed_over(native: ModuleType, mark: bytes) -> None:
    for before in range(40):
        for after in (0, 1, 7, 15, 16, 17):
            line = row_with(b"more", b'"' + b"a" * before + mark + b"a" * after + b'"')
            try:
                json.loads(line)
                is_sound = True
            except ValueError:
                is_sound = False
            assert (native.outline(exactly(line)) is not None) == is_sound


@pytest.mark.parametrize("row", ROWS, ids=range(len(ROWS)))
def test_no_part_of_a_line_has_an_outline(native: ModuleType, row: dict) -> None:
    line = encoded(row)

    assert native.outline(exactly(line)) is not None
    for end in range(len(line)):
        assert native.outline(exactly(line[:end])) is None
    assert native.outline(exactly(b" \t" + line + b"\r\n ")) is not None
    for more in (b"x", b"}", b"{}", b"\0", b"\xa0"):
        assert native.outline(exactly(line + more)) is None


@settings(deadline=None, max_examples=300)
@given(row=mangled(ROWS), seed=st.none() | st.integers(0, 2**32))
def test_of_any_line_both_ways_say_the_same(
    native: ModuleType, row: dict, seed: int | None
) -> None:
    line = encoded(row)

    both_ways(native, line if seed is None else mutated(random.Random(seed), line))


def test_what_is_no_bytes_is_a_type_error(native: ModuleType) -> None:
    with pytest.raises(TypeError):
        native.outline("text")


HARNESS = """
import ctypes, random, sys
from fakes.compiled_outline import load_outline
from fakes.rollout_lines import BAD_LINES, encoded, mutated, row_with
from fakes.outline_lines import BAD_VALUES, GOOD_VALUES, MESSAGES, ROWS, TWICE
from pathlib import Path

outline = load_outline(Path(sys.argv[1])).outline
chance = random.Random(7)
lines = [encoded(row) for row in ROWS]
lines += [encoded({"messages": [m, m], "stop_reason": "a"}) for m in MESSAGES]
lines += [row_with(b"more", value) for value in BAD_VALUES + GOOD_VALUES] + BAD_LINES + TWICE
lines += [mutated(chance, line) for line in lines for _ in range(20)]
count = 0
for line in lines:
    for end in {len(line), *(chance.randrange(len(line) + 1) for _ in range(20))}:
        # Memory of its own, of just that size: the byte behind it belongs to nobody.
        outline((ctypes.c_char * end).from_buffer_copy(line[:end]) if end else b"")
        count += 1
print(count)
"""


def sanitizer() -> Path:
    """The library that watches what a program reads and writes."""
    if sys.platform != "linux" or not can_compile():
        pytest.skip("only on Linux, with a compiler, it can be loaded before Python")
    asked = ["cc", "-print-file-name=libasan.so"]
    told = subprocess.run(asked, check=True, capture_output=True, text=True, timeout=60).stdout
    if not Path(told.strip()).is_absolute():
        pytest.skip("the compiler comes without AddressSanitizer's library")
    return Path(told.strip())


@pytest.mark.parametrize("flag", ["-O2", "-U__SSE2__"])
def test_nothing_is_read_or_written_where_it_must_not(tmp_path: Path, flag: str) -> None:
    runtime = sanitizer()
    module = compile_outline(tmp_path, "-fsanitize=address", "-g", flag)
    done = subprocess.run(
        [sys.executable, "-c", HARNESS, str(module)],
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), *sys.path]),
            # Python's own blocks would hide what lies behind a line.
            "PYTHONMALLOC": "malloc",
            "ASAN_OPTIONS": "detect_leaks=0",
            "LD_PRELOAD": str(runtime),
        },
    )

    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) > 10_000


def test_the_set_up_has_built_the_module_where_it_could() -> None:
    if not (ROOT / ".venv" / ".installed").exists() or not can_compile():
        pytest.skip("the set-up has not run here, or there is no compiler")
    assert isbuiltin(outline.outline), "run scripts/setup.sh test"


def test_a_module_built_from_other_sources_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("stillroom.curate._outline")
    module.VERSION, module.SHORT_FIELDS = outline._VERSION, tuple(outline._SHORT_FIELDS)
    module.outline = len
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(stillroom.curate, "_outline", module, raising=False)

    assert outline._outliner() is len
    module.VERSION += 1
    assert outline._outliner() is no_outline
    module.VERSION, module.SHORT_FIELDS = outline._VERSION, ("id",)
    assert outline._outliner() is no_outline
    monkeypatch.setitem(sys.modules, module.__name__, None)
    monkeypatch.delattr(stillroom.curate, "_outline")
    assert outline._outliner() is no_outline
