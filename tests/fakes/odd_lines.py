"""What lines of rows may hold: each kind of JSON value, sound and broken, and odd messages."""

from typing import Any

from fakes.rollout_lines import deep, encoded
from fakes.rollout_rows import assistant, rollout_row, tool_call, tool_reply, user

TALK = [user("a"), assistant(None, tool_call()), tool_reply("7 ü😀\\\n"), assistant("7")]
SFT_ROW = {"messages": TALK, "tools": [], "metadata": {"a": 1}, "reward": 1.0}
SFT_ROW |= {"task_id": "task", "rollout_id": "task-0"}
ROWS = [rollout_row(messages=TALK), SFT_ROW]
VALUES = [
    *(b"1.50", b"9" * 400, b"true", b"null", b"[]", b' {"a":{"a":1},"a":2} ', deep(60)),
    *(b'""', b'"\\u0041\\/\\n\\\\\\""', b'"\\ud83d\\ude00"', '"üß€漢字😀\\u00fc"'.encode()),
    *(b"", b"01", b"NaN", b"nul", b"[1,]", b"[}", b'{"a":1,}', b'{"a" 1}', b'"', b"'a'"),
    *(b'"\\u123g"', b'"\\ud800"', b'"\n"', b'"\x80"', b'"\xed\xa0\x80"', deep(100)),
]
"""JSON values, sound and broken."""
ODD_FIELDS: list[dict[str, Any]] = [
    {"success": True},
    {"success": 5},
    {"stop_reason": None},
    {"stop_reason": "answered"},
    {"output": [], "reward": 1.0},
    {"output": [{"type": "message", "role": "assistant", "content": "a"}]},
    {"responses_create_params": {"input": "a"}, "response": {"output": []}},
    {"id": 5},
    {"rollout_id": 5},
    {"task_id": None},
    {"reward": "1"},
    {"metadata": []},
    {"tools": [{}]},
    {"tool_errors": "none"},
    {"messages": TALK[:3]},
    {"messages": []},
    {"conversation": None, "success": True},
    {"conversation": TALK, "stop_reason": None, "completed": True},
]
"""What a supervised row may hold in addition, by which it may be another kind of row."""
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
