"""Reads the files of OpenAI's fine-tuning: chat rows, legacy completions, preferences, evals."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

from stillroom.data.checks import as_number
from stillroom.data.layouts.foreign import as_object, count
from stillroom.importing.json_rows import JsonRow, Row, UnreadableRowError, has_row, row_reader
from stillroom.importing.payloads.messages import ChatReader, tool_schemas
from stillroom.importing.records import LoggedConversation, SourceRow, TraceFormat
from stillroom.types import Usage

_OF_OTHER_FORMATS = frozenset(
    (
        "body", "choices", "chosen", "completion", "events", "history", "kind", "object", "output",
        "outputs", "rejected", "request", "response", "scores", "steps", "stop_reason",
        "trajectory", "trajectory_format", "usage",
    )
)  # fmt: skip
"""Fields beside `messages` that a log or a result has, and a dataset has not."""
_CHAT_FIELDS = ("messages", "tools", "functions", "id", "model", "metadata")
_OUTPUTS = {"preferred": 1.0, "non_preferred": 0.0}
_ANSWERS = {"chosen": 1.0, "rejected": 0.0}


def is_chat_row(row: Row) -> bool:
    """Returns whether a row holds a conversation under `messages`, and is no log of a call."""
    messages = row.get("messages")
    if not isinstance(messages, list) or not messages or _OF_OTHER_FORMATS & row.keys():
        return False
    first = as_object(cast("list[Any]", messages)[0])
    return isinstance(first.get("role"), str)


def conversation_of_chat_row(row: JsonRow) -> LoggedConversation:
    """Returns the conversation of a fine-tuning row.

    Raises UnreadableRowError if it holds none.
    """
    data, reader = row.data, ChatReader()
    return LoggedConversation(
        place=row.place,
        messages=reader.messages(data.get("messages")),
        tools=tool_schemas(data.get("tools") or data.get("functions")),
        is_call=False,
        id=data["id"] if isinstance(data.get("id"), str) else None,
        model=data["model"] if isinstance(data.get("model"), str) else None,
        losses=tuple(reader.losses),
        metadata=other_fields(data, _CHAT_FIELDS),
    )


def other_fields(data: Row, read: Sequence[str]) -> Row:
    """Returns the fields of a row that were not read, merged with its metadata."""
    others = {key: value for key, value in data.items() if key not in read and value is not None}
    return others | as_object(data.get("metadata"))


def _fine_tuning(row: JsonRow) -> Iterable[SourceRow]:
    if "messages" in row.data:
        return [conversation_of_chat_row(row)]
    if not is_completion_row(row.data):
        raise UnreadableRowError("has no messages", "a row has messages, or prompt and completion")
    reader = ChatReader()
    return [
        LoggedConversation(
            place=row.place,
            messages=[
                *turns_of(row.data["prompt"], "user", reader),
                *turns_of(row.data["completion"], "assistant", reader),
            ],
            tools=tool_schemas(row.data.get("tools")),
            is_call=False,
            losses=tuple(reader.losses),
            metadata=other_fields(row.data, ("prompt", "completion", "metadata", "tools")),
        )
    ]


def turns_of(value: Any, role: str, reader: ChatReader) -> list[Row]:
    """Returns messages, or the message of a text. Raises UnreadableRowError if it is neither."""
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    return reader.messages(value, role)


def _is_fine_tuning(row: Row) -> bool:
    return is_chat_row(row) or is_completion_row(row)


def is_completion_row(row: Row) -> bool:
    """Returns whether a row is a prompt with its completion: texts, or messages as TRL has them."""
    prompt, completion = row.get("prompt"), row.get("completion")
    if isinstance(prompt, str) and isinstance(completion, str):
        return row.keys() <= {"prompt", "completion", "metadata", "id"}
    lists = (prompt, completion)
    are_messages = all(isinstance(one, list) and one and _is_message(one[0]) for one in lists)
    return are_messages and "reward" not in row


def _is_message(value: Any) -> bool:
    return isinstance(as_object(value).get("role"), str)


def _is_preference(row: Row) -> bool:
    return "messages" in as_object(row.get("input")) and "non_preferred_output" in row


def _is_trl_preference(row: Row) -> bool:
    return all(isinstance(row.get(name), str | list) and row[name] for name in _ANSWERS)


def _trl_preferences(row: JsonRow) -> Iterator[SourceRow]:
    """Yields both answers of a row of TRL's, whose prompt may be within them."""
    data, place = row.data, row.place
    for name, score in _ANSWERS.items():
        reader = ChatReader()
        prompt = turns_of(data["prompt"], "user", reader) if data.get("prompt") else []
        answer = turns_of(data.get(name), "assistant", reader)
        # Some datasets repeat the prompt in the answers.
        is_whole = answer[0]["role"] != "assistant"
        yield LoggedConversation(
            place=type(place)(place.path, place.line, name),
            messages=answer if is_whole else [*prompt, *answer],
            tools=tool_schemas(data.get("tools")),
            is_call=False,
            scores={"preferred": score},
            losses=tuple(reader.losses),
            metadata=other_fields(data, ("prompt", "tools", *_ANSWERS)),
        )


def _preferences(row: JsonRow) -> Iterator[SourceRow]:
    """Yields both answers of a preference row: the score `preferred` is 1 for one, 0 for the other.

    Each is a part of its line.
    """
    request, place = as_object(row.data.get("input")), row.place
    for name, score in _OUTPUTS.items():
        reader = ChatReader()
        prompt = reader.messages(request.get("messages"), "input.messages")
        answer = reader.messages(row.data.get(f"{name}_output"), f"{name}_output")
        yield LoggedConversation(
            place=type(place)(place.path, place.line, name),
            messages=[*prompt, *answer],
            tools=tool_schemas(request.get("tools")),
            is_call=False,
            scores={"preferred": score},
            losses=tuple(reader.losses),
            metadata=other_fields(row.data, ("input", *(f"{n}_output" for n in _OUTPUTS))),
        )


def _eval_items(row: JsonRow) -> Iterator[SourceRow]:
    """Yields the conversation of one output item of an eval's run, with its graders' scores."""
    data, reader = row.data, ChatReader()
    sample = as_object(data.get("sample"))
    error = as_object(sample.get("error")).get("message")
    output = cast("list[Any]", sample.get("output") or [])
    if not output and not error:
        raise UnreadableRowError("has no reply", "sample.output is empty")
    messages = reader.messages(sample.get("input"), "sample.input")
    usage = as_object(sample.get("usage"))
    model, reason = sample.get("model"), sample.get("finish_reason")
    yield LoggedConversation(
        place=row.place,
        messages=[*messages, *(reader.messages(output, "sample.output") if output else [])],
        is_call=False,
        id=data["id"] if isinstance(data.get("id"), str) else None,
        provider="openai",
        model=model if isinstance(model, str) else None,
        usage=Usage(
            prompt_tokens=count(usage.get("prompt_tokens")),
            completion_tokens=count(usage.get("completion_tokens")),
        ),
        finish_reason=reason if isinstance(reason, str) else None,
        error=error if isinstance(error, str) else None,
        scores=dict(_grades(data.get("results"))),
        losses=tuple(reader.losses),
        metadata={"item": as_object(data.get("datasource_item"))},
    )


def _grades(results: Any) -> Iterator[tuple[str, float]]:
    for result in cast("list[Any]", results) if isinstance(results, list) else []:
        grade = as_object(result)
        score, name = as_number(grade.get("score")), grade.get("name")
        if score is None and isinstance(grade.get("passed"), bool):
            score = float(grade["passed"])
        if isinstance(name, str) and score is not None:
            yield name, score


FINE_TUNING = TraceFormat(
    name="openai_fine_tuning",
    title="OpenAI fine-tuning files (chat rows, also legacy prompt and completion)",
    is_recognised=has_row(_is_fine_tuning),
    read=row_reader(_fine_tuning),
)
PREFERENCES = TraceFormat(
    name="openai_preferences",
    title="OpenAI preference fine-tuning files",
    is_recognised=has_row(_is_preference),
    read=row_reader(_preferences),
)
TRL_PREFERENCES = TraceFormat(
    name="trl_preferences",
    title="Preference pairs as TRL has them (prompt, chosen, rejected)",
    is_recognised=has_row(_is_trl_preference),
    read=row_reader(_trl_preferences),
)
EVAL_ITEMS = TraceFormat(
    name="openai_evals",
    title="Output items of OpenAI eval runs",
    is_recognised=has_row(lambda row: row.get("object") == "eval.run.output_item"),
    read=row_reader(_eval_items),
)
