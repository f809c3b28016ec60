"""Lines of rollout files, good and bad, for what reads them."""

import json
import random
from typing import Any

from hypothesis import strategies as st

from fakes.mangling import JSON
from fakes.rollout_rows import assistant, rollout_row, tool_call, tool_reply, user


def encoded(row: Any, *, compact: bool = True) -> bytes:
    separators = (",", ":") if compact else (", ", ": ")
    return json.dumps(row, ensure_ascii=False, separators=separators).encode()


def deep(depth: int) -> bytes:
    return b"[" * depth + b"]" * depth


def row_with(field: bytes, value: bytes) -> bytes:
    """A rollout line with one more field of raw bytes."""
    return encoded(rollout_row())[:-1] + b',"' + field + b'":' + value + b"}"


def saying(content: bytes, field: bytes = b"messages") -> bytes:
    """A rollout line whose user says raw bytes: ours, or rnow's with `conversation`."""
    talk = b'[{"role":"user","content":' + content + b'},{"role":"assistant","content":"a"}]'
    rest = b'"completed":true' if field == b"conversation" else b'"stop_reason":"answered"'
    return b'{"' + field + b'":' + talk + b"," + rest + b"}"


BAD_CONTENTS = [b"5", b"true", b"{}", b"[5]", b'[{"type":5}]', b"null", b"nul", b'"\\ud800"']
BAD_CONTENTS += [b'"\t"', b'"\xff"', b'"\\x"', b'[{"type":"text","text":' + deep(10_000) + b"}]"]
BAD_LINES = [
    b"{",
    b"null",
    b"[]",
    b'"text"',
    b"\0\0\0\0",
    b"{}\0",
    b"\xff\xfe{\0}\0",
    b"{'id': 1}",
    b'{"id": "a"}',
    b'{"messages": 5, "stop_reason": "answered"}',
    b'{"messages": [{"content": "x"}], "stop_reason": "answered"}',
    b'{"messages": [], "stop_reason": 5}',
    b'{"responses_create_params": {"input": "x"}}',
    b'{"responses_create_params": {"input": "x"}, "response": {"output": [{"type": "x"}]}}',
    b'{"conversation": [{"role": "user"}], "completed": true}',
    encoded(rollout_row(reward="1")),
    encoded(rollout_row(success="yes")),
    encoded(rollout_row(messages={"role": "user"})),
    encoded(rollout_row(messages=[{"role": "judge", "content": "x"}, assistant("a")])),
    encoded(rollout_row(reward=10**400)),
    encoded(rollout_row())[:-2],
    encoded(rollout_row()) + b"x",
    row_with(b"more", deep(10_000)),
    row_with(b"more", b'"\xff"'),
    row_with(b"more", b'"\\ud800"'),
    row_with(b"more", b"NaN"),
    *map(saying, BAD_CONTENTS),
    *(saying(content, b"conversation") for content in BAD_CONTENTS),
]
"""None of these is a rollout row."""


INSERTS = [b"\0", b"\xff", b"\r", b"\n", b"\r\n", b'"', b"{", b"}", b"\\", b"\xef\xbb\xbf", b" "]
INSERTS += [b"\\ud800", b"NaN", b"-", b"1e999", b"null", deep(30), deep(5_000), b"\xe2\x80\xa8"]


def mutated(chance: random.Random, line: bytes) -> bytes:
    """The line with one to three places in it changed."""
    data = bytearray(line)
    for _ in range(chance.randint(1, 3)):
        place = chance.randrange(len(data) + 1)
        match chance.randrange(4):
            case 0:
                data[place:place] = chance.choice(INSERTS)
            case 1:
                del data[place : place + chance.randint(1, 9)]
            case 2 if place < len(data):
                data[place] = chance.randrange(256)
            case _:
                end = place + chance.randint(1, 40)
                data[place:place] = data[place:end]
    return bytes(data)


@st.composite
def rollout_lines(draw: st.DrawFn) -> bytes:
    """A good rollout line of one of few tasks, with fields as they may be."""
    call = tool_call(draw(st.sampled_from(["price", "stock"])), call_id=draw(st.sampled_from("ab")))
    answers = [
        [assistant(draw(st.sampled_from(["12", "13", "ü\u2028"])))],
        [assistant(None, call), tool_reply("7", call["id"]), assistant("12")],
        [assistant(None, call)],
    ]
    row = rollout_row(
        task_id=draw(st.sampled_from(["t1", "t2", "t3"])),
        messages=[user("What?"), *draw(st.sampled_from(answers))],
        reward=draw(st.sampled_from([None, 0, 0.25, 0.5, 1, 1.25])),
        success=draw(st.sampled_from([True, False, None])),
        stop_reason=draw(st.sampled_from(["answered", "max_turns"])),
        tool_errors=draw(st.integers(0, 2)),
        metadata=draw(
            st.sampled_from([{}, {"task_type": "x"}, {"task_type": None}, {"task_type": 5}])
        ),
    )
    if draw(st.booleans()):
        row["extra"] = draw(JSON)
    return encoded(row, compact=draw(st.booleans()))
