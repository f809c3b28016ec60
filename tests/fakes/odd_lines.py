"""What lines of rows may hold: each kind of JSON value, sound and broken, and odd messages."""

from typing import Any

from fakes.rollout_lines import deep, encoded
from fakes.rollout_rows import assistant, rollout_row, tool_call, tool_reply, user

TALK = [user("a"), assistant(None, tool_call()), tool_reply("7 ü😀\\\n"), assistant("7")]
SFT_ROW = {"messages": TALK, "tools": [], "metadata": {"a": 1}, "reward": 1.0}
SFT_ROW |= {"task_id": "task", "rollout_id": "task-0"}
ROWS = [rollout_row(messages=TALK), SFT_ROW]
# fmt: off
GOOD_VALUES = [
    *(b"0", b"-0", b"10", b"1.50", b"1e5", b"-2E+05", b"1.0e-9", b"9" * 400, b"true", b"false"),
    *(b"null", b"[]", b"{}", b" [ 1 , [ ] , { } ] ", b'{"a":{"a":1},"a":2}', deep(60)),
    *(b'""', b'"\\u0041\\/\\b\\f\\n\\r\\t\\\\\\""', b'"\\ud83d\\ude00"', b'"\\uFFFF\\u0000"'),
    b'"\x7f"',
    *(f'"{text}"'.encode() for text in ("\x80", "\u07ff", "\u0800", "\ud7ff", "\ue000", "\uffff")),
    *(f'"{text}"'.encode() for text in ("\U00010000", "\U0010ffff")),
    '"üß€漢字😀😀\\u00fc\\u4e00\\n\\nü\\\\a漢\\"b"'.encode(),
]
BAD_VALUES = [
    *(b"", b"-", b"01", b"+1", b".5", b"1.", b"1.e5", b"1e", b"1e+", b"0x10", b"1 2", b"--1"),
    b"NaN",
    *(b"nul", b"True", b"nulll", b"[", b"[1", b"[1,", b"[1,]", b"[,1]", b"[1 2]", b"]", b"[}"),
    b"[]]",
    *(b"{", b'{"a"', b'{"a":', b'{"a":1', b'{"a":1,}', b'{"a" 1}', b"{1:1}", b'{,"a":1}', b"{a:1}"),
    *(b'"', b"'a'", b'"\\', b'"\\"', b'"\\a"', b'"\\u"', b'"\\u12"', b'"\\u123g"', b'"\\U0041"'),
    *(b'"\\ud800"', b'"\\udc00"', b'"\\ud800\\u0041"', b'"\\ud800\\"', b'"\\ud800xxxxxx"'),
    *(b'"\x00"', b'"\x1f"', b'"\t"', b'"\n"', b"\x0b1", b"\xc2\xa01", b"\xef\xbb\xbf1"),
    *(
        b'"' + wide + b'"'
        for wide in (b"\x80", b"\xbf", b"\xc0\x80", b"\xc1\xbf", b"\xc2", b"\xc2a")
    ),
    *(
        b'"' + wide + b'"'
        for wide in (b"\xe0\x9f\xbf", b"\xed\xa0\x80", b"\xe2\x82", b"\xef\xbf\xc0")
    ),
    *(
        b'"' + wide + b'"'
        for wide in (b"\xf0\x8f\xbf\xbf", b"\xf4\x90\x80\x80", b"\xf5\x80\x80\x80")
    ),
    *(b'"' + wide + b'"' for wide in (b"\xf0\x90\x80", b"\xff", b"\xfe", b"\xf0\x90\x80a")),
]
# fmt: on
MESSAGES: list[Any] = [
    {**assistant("a"), "role": "developer"},
    {"role": "assistant"},
    {"role": "user"},
    {"role": "tool", "content": None},
    {"content": "a"},
    {"role": None, "content": "a"},
    {"role": ["user"], "content": "a"},
    user("a") | {"tool_calls": [tool_call(call_id="x")]},
    assistant(None) | {"tool_calls": None},
    assistant(None) | {"tool_calls": []},
    assistant(None) | {"tool_calls": {}},
    assistant(None) | {"tool_calls": [5]},
    assistant(None) | {"tool_calls": [{}]},
    assistant(None, tool_call() | {"id": None}, tool_call(call_id="")),
    assistant(None, tool_call() | {"id": 5}),
    assistant(None, tool_call() | {"function": None}),
    assistant(None, tool_call() | {"function": {"name": "a"}}),
    assistant(None, tool_call() | {"function": {"arguments": "a"}}),
    assistant(None, tool_call() | {"function": {"name": "a", "arguments": {}}}),
    assistant(None, tool_call() | {"function": {"name": 5, "arguments": "{}"}}),
    assistant(None, tool_call() | {"function": {"name": "a", "arguments": "{}", "more": [1]}}),
    assistant(None, *(tool_call(call_id=str(number)) for number in range(1100))),
    tool_reply("a", "x"),
    tool_reply("a", "") | {"tool_call_id": None},
    tool_reply("a", "ü"),
    tool_reply("a", "\n"),
    tool_reply("a") | {"tool_call_id": 5},
    {"role": "tool", "content": "a"},
    "user",
    None,
    [],
    [{"type": "text", "text": "a"}],
]
TWICE = [
    encoded(rollout_row())[:-1] + b',"reward":0.25,"success":false}',
    encoded(rollout_row())[:-1] + b',"reward":"x"}',
    encoded(rollout_row())[:-1] + b',"messages":[]}',
    encoded(rollout_row())[:-1] + b',"conversation":[]}',
    encoded(rollout_row())[:-1] + b',"conversation":null}',
    encoded(rollout_row())[:-1] + b',"rew\\u0061rd":0.25}',
    encoded(rollout_row())[:-1] + b',"id":5}',
    encoded(rollout_row())[:-1] + b',"id":"a"' * 100 + b"}",
    encoded(rollout_row()).replace(b'"content":"12"', b'"content":"12","content":5'),
    encoded(rollout_row()).replace(b'"content":"12"', b'"content":5,"content":"12"'),
    encoded(rollout_row()).replace(b'"content":"12"', b'"content":"12","role":"user"'),
    encoded(rollout_row()).replace(b'"content":"12"', b'"content":"12","r\\u006fle":"user"'),
    encoded(rollout_row(messages=TALK)).replace(b'"arguments"', b'"name":"x","arguments"'),
    encoded(rollout_row(messages=TALK)).replace(b'"id":"call_0"', b'"id":"x","id":"call_0"'),
]
