"""Reads datasets of OpenAI (fine-tuning, preferences, evals), TRL, ShareGPT, Alpaca and Dolly.

ShareGPT's turns have a `from` field; a row of Alpaca has an instruction, an input for it, and an
output.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from stillroom.data.checks import as_number, describe
from stillroom.importing.formats.datasets.feedback_tables import score_of, scores_in
from stillroom.importing.json_rows import (
    JsonRow,
    Row,
    UnreadableRowError,
    detect_by_row,
    make_row_reader,
)
from stillroom.importing.payloads.fields import (
    as_list,
    as_row,
    decimal_number,
    first_text,
    text_of,
    usage_of,
)
from stillroom.importing.payloads.messages import (
    AUDIO_DROPPED,
    FILES_DROPPED,
    IMAGES_DROPPED,
    NO_MESSAGES,
    MessageReader,
    tool_call,
    tool_schemas,
)
from stillroom.importing.records import LoggedConversation, SourceRow, TraceFormat
from stillroom.rollout.rewards.rewards import SUCCESS_THRESHOLD

_OTHER_FORMAT_FIELDS = frozenset(
    (
        "body", "choices", "chosen", "completion", "events", "history", "kind", "object", "output",
        "outputs", "rejected", "request", "response", "scores", "steps", "stop_reason",
        "trajectory", "trajectory_format", "usage",
    )
)  # fmt: skip
"""Fields next to `messages` that logs and results have, but datasets do not."""
_CHAT_FIELDS = ("messages", "tools", "functions", "id", "model")
_COMPLETION_FIELDS = ("prompt", "completion", "tools")
_OPENAI_PAIR = {"preferred": "preferred_output", "non_preferred": "non_preferred_output"}
_TRL_PAIR = {"chosen": "chosen", "rejected": "rejected"}
"""For each answer, the preferred one first: its part of the location, and its field in the row."""


def conversation(
    row: JsonRow, messages: list[Row], reader: MessageReader, *, used: Sequence[str], **fields: Any
) -> LoggedConversation:
    """Returns the conversation of a dataset's row; `fields` are those of LoggedConversation.

    `used` are the columns that `messages` and `fields` were read from; others become metadata.
    Thumbs and ratings among the others become scores too.
    """
    data = row.data
    others = {key: value for key, value in data.items() if key not in used and value is not None}
    scores = _pop_score(others) if "scores" not in fields else {}
    if isinstance(others.get("metadata"), dict):
        others |= others.pop("metadata")
    if "scores" not in fields:
        scores |= scores_in(others)
    row_fields: Row = {"id": first_text(data, "id"), "model": first_text(data, "model")}
    row_fields |= {"metadata": others, "scores": scores} | fields
    row_fields["tools"] = tool_schemas(fields.get("tools"))
    dropped = tuple(reader.dropped)
    return LoggedConversation(
        location=row.location, messages=messages, is_call=False, dropped=dropped, **row_fields
    )


def _pop_score(fields: Row) -> dict[str, float]:
    """Pops the reward or success from a row's fields, and returns it as a score."""
    reward, success = decimal_number(fields.get("reward")), score_of(fields.get("success"))
    is_success = bool(success) if success in (0, 1) else None
    if reward is not None:
        del fields["reward"]
        # `success` may only mean that an episode or a call completed, so it never raises a reward.
        is_success = None if is_success else is_success
    elif is_success is not None:
        del fields["success"]
    return reward_scores(reward, is_success)


def reward_scores(reward: float | None, success: bool | None) -> dict[str, float]:
    """Returns the reward as scores. If `success` disagrees with it, `success` is the reward."""
    if success is None or (reward is not None and (reward >= SUCCESS_THRESHOLD) == success):
        return {} if reward is None else {"reward": reward}
    total = {} if reward is None else {"total_reward": reward}
    return total | {"reward": float(success)}


def turns_of(value: Any, role: str, reader: MessageReader) -> list[Row]:
    """Converts messages, or a string to one message. Raises UnreadableRowError for other values."""
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    return reader.messages(value, role)


def is_chat_row(row: Row) -> bool:
    """Returns whether a row has a conversation in `messages` and is not a logged call."""
    return not _OTHER_FORMAT_FIELDS & row.keys() and _are_messages(row.get("messages"))


def is_completion_row(row: Row) -> bool:
    """Returns whether a row is a prompt and its completion, as strings or as messages (TRL)."""
    prompt, completion = row.get("prompt"), row.get("completion")
    if isinstance(prompt, str) and isinstance(completion, str):
        return row.keys() <= {"prompt", "completion", "metadata", "id"}
    return _are_messages(prompt) and _are_messages(completion) and "reward" not in row


def _are_messages(value: Any) -> bool:
    messages = as_list(value)
    return bool(messages) and isinstance(as_row(messages[0]).get("role"), str)


def _fine_tuning(row: JsonRow) -> Iterable[SourceRow]:
    """Returns the conversation of a row with messages, or with a prompt and a completion."""
    data, reader = row.data, MessageReader()
    if "messages" in data:
        messages, used = reader.messages(data["messages"]), _CHAT_FIELDS
    elif is_completion_row(data):
        messages = turns_of(data["prompt"], "user", reader)
        messages += turns_of(data["completion"], "assistant", reader)
        used = _COMPLETION_FIELDS
    else:
        raise UnreadableRowError("no messages", "a row needs messages, or prompt and completion")
    tools = data.get("tools") or data.get("functions")
    return [conversation(row, messages, reader, used=used, tools=tools)]


def _preference_pair(
    row: JsonRow, request: Row, prompt_field: str, fields: Mapping[str, str]
) -> Iterator[SourceRow]:
    """Yields a conversation for each answer of a preference row, with a score `preferred`, 1 or 0.

    `request` has the prompt in its field `prompt_field`, unless the answers repeat it. `fields` is
    `_OPENAI_PAIR` or `_TRL_PAIR`.
    """
    for score, (part, field) in zip((1.0, 0.0), fields.items(), strict=True):
        reader = MessageReader()
        prompt = request.get(prompt_field)
        prompt_turns = turns_of(prompt, "user", reader) if prompt else []
        answer = turns_of(row.data.get(field), "assistant", reader)
        has_prompt = answer[0]["role"] != "assistant"
        yield conversation(
            JsonRow(replace(row.location, part=part), row.data),
            answer if has_prompt else [*prompt_turns, *answer],
            reader,
            used=("tools", "prompt" if request is row.data else "input", *fields.values()),
            tools=request.get("tools"),
            scores={"preferred": score},
        )


def _eval_item(row: JsonRow) -> Iterator[SourceRow]:
    """Yields the conversation of an output item of an eval run, with its graders' scores."""
    data, reader = row.data, MessageReader()
    sample = as_row(data.get("sample"))
    error = as_row(sample.get("error")).get("message")
    output = as_list(sample.get("output"))
    if not output and not error:
        raise UnreadableRowError("no reply", "sample.output is empty")
    messages = reader.messages(sample.get("input"), "sample.input")
    messages += reader.messages(output, "sample.output") if output else []
    yield conversation(
        row,
        messages,
        reader,
        used=(),
        provider="openai",
        model=first_text(sample, "model"),
        usage=usage_of(sample.get("usage")),
        finish_reason=first_text(sample, "finish_reason"),
        error=text_of(error),
        scores=dict(_grades(data.get("results"))),
        metadata={"item": as_row(data.get("datasource_item"))},
    )


def _grades(results: Any) -> Iterator[tuple[str, float]]:
    """Yields the name and the score of each grader's result."""
    for grade in map(as_row, as_list(results)):
        score, name = as_number(grade.get("score")), grade.get("name")
        if score is None and isinstance(grade.get("passed"), bool):
            score = float(grade["passed"])
        if isinstance(name, str) and score is not None:
            yield name, score


FINE_TUNING = TraceFormat(
    name="openai_fine_tuning",
    title="OpenAI fine-tuning files (chat rows, also legacy prompt and completion)",
    is_recognised=detect_by_row(lambda row: is_chat_row(row) or is_completion_row(row)),
    read=make_row_reader(_fine_tuning),
)
PREFERENCES = TraceFormat(
    name="openai_preferences",
    title="OpenAI preference fine-tuning files",
    is_recognised=detect_by_row(
        lambda row: "messages" in as_row(row.get("input")) and "non_preferred_output" in row
    ),
    read=make_row_reader(
        lambda row: _preference_pair(row, as_row(row.data.get("input")), "messages", _OPENAI_PAIR)
    ),
)
TRL_PREFERENCES = TraceFormat(
    name="trl_preferences",
    title="TRL preference pairs (prompt, chosen, rejected)",
    is_recognised=detect_by_row(
        lambda row: all(isinstance(row.get(name), str | list) and row[name] for name in _TRL_PAIR)
    ),
    read=make_row_reader(lambda row: _preference_pair(row, row.data, "prompt", _TRL_PAIR)),
)
EVAL_ITEMS = TraceFormat(
    name="openai_evals",
    title="Output items of OpenAI eval runs",
    is_recognised=detect_by_row(lambda row: row.get("object") == "eval.run.output_item"),
    read=make_row_reader(_eval_item),
)


_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "system": "system",
    "function_call": "call",
    "tool_call": "call",
    "observation": "tool",
    "function_response": "tool",
    "tool_response": "tool",
    "tool": "tool",
}
_MEDIA = {
    "images": IMAGES_DROPPED,
    "image": IMAGES_DROPPED,
    "audios": AUDIO_DROPPED,
    "videos": FILES_DROPPED,
}
_FIELDS = ("conversations", "conversation", "system", "tools", "id", "model", *_MEDIA)


def is_sharegpt_row(row: Row) -> bool:
    """Returns whether a row has turns with `from` and `value`, or messages in `conversations`."""
    turns = as_list(row.get("conversations", row.get("conversation")))
    first = as_row(turns[0]) if turns else {}
    are_messages = "conversations" in row and {"role", "content"} <= first.keys()
    return are_messages or ("from" in first and ("value" in first or len(first) == 1))


def conversation_of_sharegpt_row(row: JsonRow) -> LoggedConversation:
    """Returns the conversation of a ShareGPT row. Raises UnreadableRowError if there is none."""
    data, reader = row.data, MessageReader()
    turns = as_list(value := data.get("conversations", data.get("conversation")))
    if not turns:
        detail = f"conversations must be a non-empty list, not {describe(value)}"
        raise UnreadableRowError(NO_MESSAGES, detail)
    are_messages = "role" in as_row(turns[0])
    messages = reader.turns(turns, "conversations") if are_messages else [*_messages(turns)]
    if (system := first_text(data, "system")) and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    for field, media in _MEDIA.items():
        if data.get(field):
            reader.drop(media)
    return conversation(row, messages, reader, used=_FIELDS, tools=data.get("tools"))


def _messages(turns: list[Any]) -> Iterator[Row]:
    """Converts ShareGPT turns to messages; a turn with calls becomes a message with tool calls."""
    open_calls: list[str] = []
    for index, turn in enumerate(turns):
        fields = as_row(turn)
        role, value = _ROLES.get(first_text(fields, "from") or ""), fields.get("value")
        if role is None or not isinstance(value, str):
            detail = f"turn {index} needs a known `from` and a text `value`, not {describe(turn)}"
            raise UnreadableRowError("a turn has no known role or no text", detail)
        message: Row = {"role": role, "content": value}
        if role == "call":
            calls = [
                tool_call({"id": f"call_{index}_{number}"} | as_row(call))
                for number, call in enumerate(_parse_calls(value))
            ]
            open_calls = [call["id"] for call in calls]
            message = {"role": "assistant", "content": "", "tool_calls": calls}
        elif role == "tool" and open_calls:
            message["tool_call_id"] = open_calls.pop(0)
        if fields.get("weight") is not None:
            message["weight"] = fields["weight"]
        yield message


def _parse_calls(value: str) -> list[Any]:
    """Parses the tool calls in a turn's text. Raises UnreadableRowError if it is not JSON."""
    try:
        decoded = msgspec.json.decode(value)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise UnreadableRowError("a tool call is not valid JSON", str(error)) from error
    return as_list(decoded) or [decoded]


_OUTPUTS = ("output", "response")
_INPUTS = ("input", "context")
_ALPACA_FIELDS = ("instruction", "system", "history", "id", *_OUTPUTS, *_INPUTS)


def is_alpaca_row(row: Row) -> bool:
    """Returns whether a row has an instruction and an output, both strings."""
    has_output = any(isinstance(row.get(name), str) for name in _OUTPUTS)
    return isinstance(row.get("instruction"), str) and has_output


def conversation_of_alpaca_row(row: JsonRow) -> LoggedConversation:
    """Returns the conversation of an Alpaca row: the input follows the instruction.

    Raises UnreadableRowError if there is none.
    """
    data = row.data
    if not is_alpaca_row(data):
        kind = describe(data.get("instruction"))
        detail = f"instruction and output must be strings; instruction is {kind}"
        raise UnreadableRowError("no instruction or no output", detail)
    output = next(data[name] for name in _OUTPUTS if isinstance(data.get(name), str))
    texts = (data["instruction"], first_text(data, *_INPUTS))
    system = first_text(data, "system")
    messages = [
        *([{"role": "system", "content": system}] if system else []),
        *_earlier_turns(data.get("history")),
        {"role": "user", "content": "\n\n".join(text for text in texts if text)},
        {"role": "assistant", "content": output},
    ]
    return conversation(row, messages, MessageReader(), used=_ALPACA_FIELDS, model=None)


def _earlier_turns(history: Any) -> Iterator[Row]:
    """Yields the messages of `history`, a list of question and answer pairs."""
    for pair in as_list(history):
        texts = as_list(pair)
        if len(texts) != 2 or not all(isinstance(text, str) for text in texts):
            detail = f"history must be a list of pairs of strings, not {describe(pair)}"
            raise UnreadableRowError("the history cannot be read", detail)
        yield {"role": "user", "content": texts[0]}
        yield {"role": "assistant", "content": texts[1]}


SHAREGPT = TraceFormat(
    name="sharegpt",
    title="ShareGPT datasets",
    is_recognised=detect_by_row(is_sharegpt_row),
    read=make_row_reader(lambda row: [conversation_of_sharegpt_row(row)]),
)
ALPACA = TraceFormat(
    name="alpaca",
    title="Alpaca and Dolly datasets",
    is_recognised=detect_by_row(is_alpaca_row),
    read=make_row_reader(lambda row: [conversation_of_alpaca_row(row)]),
)
