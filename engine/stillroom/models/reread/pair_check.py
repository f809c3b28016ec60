"""Checks, before any rollout, that a teacher with another tokenizer can read the student's text."""

from collections.abc import Sequence
from typing import Any

from stillroom.data.chat.render import ChatRenderer
from stillroom.data.chat.template import ReasoningMode, reasoning_variables
from stillroom.errors import ConfigError, ModelError
from stillroom.models.load import LoadedModel, stop_ids_of_tokenizer
from stillroom.models.pairing import (
    OFF_POLICY_ROUTE,
    alternatives,
    check_pair,
    check_tokenizers,
)
from stillroom.models.reread.comparison_points import TurnFormat
from stillroom.models.reread.rereading import Reader, ReadingPair, render_turn
from stillroom.models.reread.token_bytes import PROBE, encode
from stillroom.models.reread.turns import TurnPart, TurnParts
from stillroom.types import Message, ToolCall, ToolSchema

_TOOL: ToolSchema = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look it up.",
        "parameters": {"type": "object", "properties": {"key": {"type": "string"}}},
    },
}
# Some templates escape non-ASCII letters; the teacher gets them as the student wrote them.
_ARGUMENTS = '{"key": "a \\"quoted\\" \\\\ {x}", "n": [1, 2.5, null]}'


def open_pair(
    student: LoadedModel, teacher: LoadedModel, reasoning_mode: ReasoningMode | None = None
) -> ReadingPair | None:
    """Returns the pair if the models' tokenizers or chat templates differ, else None.

    Raises EngineError, with a fix, if the teacher cannot read what the student writes.
    """
    try:
        check_pair(student, teacher)
    except ModelError:
        pass
    else:
        return None
    for model in (student, teacher):
        model.check_vocabulary()
    readers = (
        _reader(role, model.location.name, model.tokenizer, model.stop_ids, reasoning_mode)
        for role, model in (("student", student), ("teacher", teacher))
    )
    return _checked(ReadingPair(*readers, max_context=teacher.max_context))


def open_pair_with_tokenizer(
    student: LoadedModel,
    tokenizer: Any,
    teacher_name: str,
    reasoning_mode: ReasoningMode | None = None,
    *,
    max_context: int,
) -> ReadingPair | None:
    """Like `open_pair`, for a teacher on a server, of which only the tokenizer is loaded."""
    name = student.location.name
    try:
        check_tokenizers(
            f"student {name!r} and teacher {teacher_name!r}", student.tokenizer, tokenizer
        )
    except ModelError:
        pass
    else:
        return None
    student.check_vocabulary()
    readers = (
        _reader("student", name, student.tokenizer, student.stop_ids, reasoning_mode),
        _reader(
            "teacher", teacher_name, tokenizer, stop_ids_of_tokenizer(tokenizer), reasoning_mode
        ),
    )
    return _checked(ReadingPair(*readers, max_context=max_context))


def reading_note(teacher: str, pair: ReadingPair | None, *, is_served: bool = False) -> str:
    """Returns the note to the user on how a teacher scores the student's text."""
    if pair is None:
        loss_fn = "top_k_reverse_kl" if is_served else "full_reverse_kl"
        return (
            f"teacher {teacher!r} has the student's tokenizer and chat template, so it scores the "
            f"student's own tokens ({loss_fn})"
        )
    probe = "The answer is 1234. What do seven red lamps cost in the shop?"
    counts = [len(encode(model.tokenizer, probe)) for model in (pair.student, pair.teacher)]
    return (
        f"{pair.teacher.name} scores the student's text with its own tokenizer ({counts[1]} tokens "
        f"where the student has {counts[0]}), and the two models are compared byte by byte "
        "(byte_reverse_kl); see the metrics byte_share, not_compared and teacher_tokens"
    )


def check_reading(pair: ReadingPair) -> None:
    """Raises ModelError unless the teacher's template can render what the student may write.

    Needs no weights. Tool calls matter only to students with tools: see `check_calls`.
    """
    names = f"{pair.student.name} and {pair.teacher.name}"
    always_thinks = [
        reader.renderer.header.rstrip().endswith("<think>")
        for reader in (pair.student, pair.teacher)
    ]
    if always_thinks[1] and not always_thinks[0]:
        raise ModelError(
            f"{names}: with its chat template the teacher always thinks before an answer, but the "
            "student does not",
            alternatives(
                "set rollout.reasoning_mode: disabled if the teacher's template supports it",
                "use a teacher that answers without thinking",
                OFF_POLICY_ROUTE,
            ),
        )
    for tools in ([], [_TOOL]):
        symbol_sets = pair.symbol_sets(tools)
        for turn_format, reader in (
            (symbol_sets.student, pair.student),
            (symbol_sets.teacher, pair.teacher),
        ):
            if not turn_format.markers.end_text:
                raise ModelError(
                    f"the chat template of {reader.name} writes no end of turn after an answer, so "
                    "the ends of answers cannot be compared",
                    alternatives(
                        "add an end-of-turn token to chat_template.jinja", OFF_POLICY_ROUTE
                    ),
                )
            _check_rendering(turn_format, reader, tools)
    plain = pair.symbol_sets([])
    if plain.student.markers.supports_thinking and not plain.teacher.markers.supports_thinking:
        raise ModelError(
            f"{names}: the student may think before it answers, but the teacher's chat template "
            "does not render thinking",
            alternatives(
                "set rollout.reasoning_mode: disabled if the student's template supports it",
                "use a teacher that thinks",
                OFF_POLICY_ROUTE,
            ),
        )


def check_calls(pair: ReadingPair) -> None:
    """Raises ModelError unless both templates render tool calls in a form that can be compared."""
    symbol_sets = pair.symbol_sets([_TOOL])
    for turn_format, reader in (
        (symbol_sets.student, pair.student),
        (symbol_sets.teacher, pair.teacher),
    ):
        if not turn_format.markers.supports_calls:
            raise ModelError(
                f"the chat template of {reader.name} does not render tool calls verbatim, so turns "
                "with calls cannot be compared with the teacher and would train nothing",
                alternatives(
                    "use a model whose chat template renders tool calls",
                    "add tool calls to its chat_template.jinja",
                    "train without tools (move tools.py away, and remove rollout.mcp_url and "
                    "rollout.browse)",
                    OFF_POLICY_ROUTE,
                ),
            )


def _check_rendering(turn_format: TurnFormat, reader: Reader, tools: Sequence[ToolSchema]) -> None:
    """Raises ModelError unless the template renders the parts of a turn verbatim."""
    probe = PROBE.strip()
    turns: list[tuple[Message, list[TurnPart]]] = [
        ({"role": "assistant", "content": probe}, [TurnPart("text", probe.encode())])
    ]
    if tools and turn_format.markers.supports_calls:
        call: ToolCall = {
            "id": "abcdefghi",
            "type": "function",
            "function": {"name": "look_up", "arguments": _ARGUMENTS},
        }
        message: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
        parts = [TurnPart("name", b"look_up"), TurnPart("arguments", _ARGUMENTS.encode())]
        turns.append((message, parts))
    for message, parts in turns:
        rendered = render_turn(turn_format, TurnParts(parts, [], is_ended=True), has_end=True)
        written = reader.renderer.turn_text(message, tools)
        if rendered is None or rendered.text != written:
            changed = "tool calls" if parts[-1].kind == "arguments" else "text"
            raise ModelError(
                f"the chat template of {reader.name} does not render an assistant's {changed} "
                "verbatim, so the student's text cannot be found in it",
                alternatives("fix its chat_template.jinja", OFF_POLICY_ROUTE),
            )


def _reader(
    role: str,
    name: str,
    tokenizer: Any,
    stop_ids: frozenset[int],
    reasoning_mode: ReasoningMode | None,
) -> Reader:
    """Returns a model as a `Reader`, in the reasoning mode if its chat template supports it."""
    try:
        variables = reasoning_variables(tokenizer.chat_template, reasoning_mode)
    except ConfigError:
        variables = {}
    renderer = ChatRenderer(tokenizer, include_thinking=True, variables=variables)
    return Reader(f"{role} {name!r}", tokenizer, renderer, stop_ids)


def _checked(pair: ReadingPair) -> ReadingPair:
    """Returns the pair after `check_reading`, whose errors it raises."""
    check_reading(pair)
    return pair
