"""Logs of calls made from conversations: with retries, branches, parallel tools and compaction.

Each call repeats its history as another client would spell it. `expected_conversations` says, by
comparing every two calls, which conversations they make.
"""

import random
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import strategies as st

from stillroom.importing.records import Location, LoggedConversation

TEXTS = ("a", "b", "x\n  y", "ü")
ARGUMENTS = ('{"k": 1}', '{"k": 2, "l": "ü"}', "{}", "no json")


@dataclass
class Log:
    """A log: its calls, and each call's plain messages with the group that they are in."""

    rows: list[LoggedConversation] = field(default_factory=list)
    plain: list[tuple[str | None, tuple]] = field(default_factory=list)


def plain_messages(messages):
    """Returns messages as tuples: without reasoning, and ids replaced by the calls' numbers."""
    ids, numbers = {}, 0
    plain = []
    for message in messages:
        text = (message.get("content") or "").strip()
        if message["role"] == "assistant":
            calls = message.get("tool_calls", ())
            for call in calls:
                ids[call["id"]] = numbers
                numbers += 1
            made = tuple((c["function"]["name"], c["function"]["arguments"]) for c in calls)
            plain.append(("assistant", text, made))
        elif message["role"] == "tool":
            plain.append(("tool", text, ids[message["tool_call_id"]]))
        else:
            plain.append((message["role"], text))
    return tuple(plain)


def spelled(messages, seed):
    """Returns a history as some client writes it: other ids, no reasoning, parts, blanks, nulls."""
    draw = random.Random(seed)
    prefix, is_plain = f"c{draw.randrange(3)}", draw.random() < 0.5
    for message in messages:
        again = {**message, "content": _spelled_text(message["content"], draw)}
        again.pop("reasoning_content", None)
        if message["role"] == "system" and draw.random() < 0.3:
            again["role"] = "developer"
        if "tool_calls" in message:
            again["tool_calls"] = [{**call, "id": prefix + call["id"]}
                                   for call in message["tool_calls"]]  # fmt: skip
        if "tool_call_id" in message:
            again["tool_call_id"] = prefix + message["tool_call_id"]
        yield {**message} if is_plain else again


def _spelled_text(text, draw):
    match draw.randrange(4):
        case 0 if not text:
            return None
        case 1:
            return [{"type": "text", "text": text}]
        case 2:
            return f" {text}\r\n" if text else text
        case _:
            return text


def expected_conversations(log):
    """Returns the conversations of a log: the calls that no other call of their group extends."""
    distinct = set(log.plain)
    return {
        (group, messages)
        for group, messages in distinct
        if not any(
            group == other and len(longer) > len(messages) and longer[: len(messages)] == messages
            for other, longer in distinct
        )
    }


@st.composite
def call_logs(draw, *, max_turns=5):
    """Draws a log of up to three groups, in any order and with some calls twice."""
    log = Log()
    for group in draw(st.lists(st.sampled_from([None, "g", "h"]), min_size=1, max_size=3)):
        _add_conversations(draw, log, group, max_turns)
    order = draw(st.permutations(range(len(log.rows))))
    again = draw(st.lists(st.sampled_from(range(len(log.rows))), max_size=3))
    chosen = [*order, *again]
    shuffled = Log()
    for number, index in enumerate(chosen):
        row = log.rows[index]
        location = Location(Path(f"{number % 2}.jsonl"), number + 1)
        shuffled.rows.append(
            LoggedConversation(
                location=location, messages=row.messages, is_call=True, group=row.group, model="m"
            )
        )
        shuffled.plain.append(log.plain[index])
    return shuffled


def _add_conversations(draw, log, group, max_turns):
    system = draw(st.sampled_from([None, "s"]))
    start = [{"role": "system", "content": system}] if system else []
    waiting = [[*start, {"role": "user", "content": draw(st.sampled_from(TEXTS))}]]
    for _ in range(draw(st.integers(1, max_turns))):
        history = waiting.pop()
        reply = _reply(draw, len(history))
        _add_call(draw, log, group, history, reply)
        match draw(st.sampled_from(["go on", "go on", "retry", "branch", "compact"])):
            case "retry":
                _add_call(draw, log, group, history, _reply(draw, len(history)))
            case "branch":
                waiting.insert(0, history)
            case "compact":
                waiting.insert(0, [*start, {"role": "user", "content": f"summary {len(history)}"}])
        waiting.append([*history, reply, *_answers(draw, reply)])


def _add_call(draw, log, group, history, reply):
    seed = draw(st.integers(0, 1000))
    messages = [*spelled(history, seed), reply]
    log.rows.append(
        LoggedConversation(
            location=Location(Path("x"), 1), messages=messages, is_call=True, group=group
        )
    )
    log.plain.append((group, plain_messages([*history, reply])))


def _reply(draw, number):
    reply = {"role": "assistant", "content": draw(st.sampled_from(("", *TEXTS)))}
    if draw(st.booleans()):
        reply["reasoning_content"] = "because"
    names = draw(st.lists(st.sampled_from(["look", "mail"]), max_size=3))
    if names:
        reply["tool_calls"] = [
            {
                "id": f"{number}-{index}",
                "type": "function",
                "function": {"name": name, "arguments": draw(st.sampled_from(ARGUMENTS))},
            }
            for index, name in enumerate(names)
        ]
    return reply


def _answers(draw, reply):
    if "tool_calls" not in reply:
        return [{"role": "user", "content": draw(st.sampled_from(TEXTS))}]
    calls = draw(st.permutations(reply["tool_calls"]))
    return [
        {"role": "tool", "content": draw(st.sampled_from(TEXTS)), "tool_call_id": call["id"]}
        for call in calls
    ]
