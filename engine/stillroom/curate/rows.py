"""Rollout rows as curation sees them: the few fields that decide, beside the untouched bytes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from stillroom.data.checks import Problem, decode_row
from stillroom.data.foreign import ORIGIN
from stillroom.data.layouts import RULES, RolloutLayout, layout_of
from stillroom.data.row_files import RowLine, read_row_lines, rollout_files
from stillroom.errors import DataError, InputError
from stillroom.rollout.journal import holds_rollouts
from stillroom.rollout.rewards import SUCCESS_THRESHOLD


class CallFunction(msgspec.Struct, frozen=True):
    """The name of a called function."""

    name: str = ""


class CallFacts(msgspec.Struct, frozen=True):
    """A tool call, as far as it decides."""

    function: CallFunction = CallFunction()


class MessageFacts(msgspec.Struct, frozen=True):
    """A message, as far as it decides."""

    role: str
    content: Any = None
    tool_calls: list[CallFacts] | None = None


class RolloutFacts(msgspec.Struct, frozen=True):
    """A rollout row, as far as it decides."""

    messages: list[MessageFacts]
    stop_reason: str
    id: str | None = None
    task_id: str | None = None
    reward: float | None = None
    success: bool | None = None
    tool_errors: int | None = None
    metadata: dict[str, Any] | None = None
    error: Any = None

    @property
    def num_turns(self) -> int:
        """Assistant turns."""
        return sum(message.role == "assistant" for message in self.messages)

    @property
    def has_final_answer(self) -> bool:
        """Whether it ends with an assistant's text and not with a tool call."""
        last = self.messages[-1] if self.messages else None
        if last is None or last.role != "assistant" or last.tool_calls:
            return False
        return bool(last.content.strip() if isinstance(last.content, str) else last.content)

    @property
    def tools_used(self) -> set[str]:
        """Names of the tools that were called."""
        return {
            call.function.name for message in self.messages for call in message.tool_calls or ()
        }

    @property
    def is_success(self) -> bool:
        """The row's own word; without one the reward decides, then whether the answer is complete.

        What infrastructure ended is no success.
        """
        if self.success is not None:
            return self.success
        if self.error is not None:
            return False
        if self.reward is not None:
            return self.reward >= SUCCESS_THRESHOLD
        return self.has_final_answer and self.stop_reason == "answered"

    @property
    def is_success_derived(self) -> bool:
        """Whether the row itself does not say if it succeeded."""
        return self.success is None


@dataclass(frozen=True, slots=True)
class RolloutLine:
    """One row of a rollouts file; `facts` is None for what is not a rollout."""

    path: Path
    line: RowLine
    facts: RolloutFacts | None
    problem: str | None
    own: bytes
    """The row in our layout: the very bytes of `line`, unless another system wrote it."""

    @property
    def where(self) -> str:
        """`file:line`."""
        return f"{self.path}:{self.line.number}"


_DECODER = msgspec.json.Decoder(RolloutFacts)


def read_rollouts(path: Path) -> Iterator[RolloutLine]:
    """Yields the rows of a rollouts file, or of all files of a folder, one at a time."""
    for file in rollout_files(path):
        for line in read_row_lines(file):
            yield _rollout_line(file, line)


def _rollout_line(file: Path, line: RowLine) -> RolloutLine:
    try:
        if not line.data.isascii():
            line.data.decode()  # what the decoder passes over may be no UTF-8
        return RolloutLine(file, line, _DECODER.decode(line.data), None, line.data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return _foreign_line(file, line, problem=str(error))


def _foreign_line(file: Path, line: RowLine, *, problem: str) -> RolloutLine:
    try:
        own = own_row(line.data)
        if own is not None:
            return RolloutLine(file, line, _DECODER.decode(own), None, own)
    except DataError as error:
        problem = error.problem
    except (msgspec.DecodeError, RecursionError) as error:
        problem = str(error)
    return RolloutLine(file, line, None, problem, line.data)


def own_row(data: bytes) -> bytes | None:
    """Returns a row that another system wrote in our layout; None of what none did.

    Raises DataError for a row of theirs that has a problem.
    """
    row = decode_row(data)
    layout = None if isinstance(row, Problem) else layout_of(row)
    if isinstance(row, Problem) or layout is None or layout is RolloutLayout.STILLROOM:
        return None
    problem = next(iter(RULES[layout].problems(row)), None)
    if problem is not None:
        raise DataError(f"{problem.field} {problem.message}", problem.fix)
    own = RULES[layout].read(row)
    # Curation needs no way back, and with it every row would be twice as long.
    return msgspec.json.encode({key: own[key] for key in own if key != ORIGIN})


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    """Returns what a message says, without the ids of its tool calls, which differ by chance."""
    plain = {key: value for key, value in message.items() if key != "tool_call_id"}
    if plain.get("tool_calls"):
        plain["tool_calls"] = [call.get("function") for call in plain["tool_calls"]]
    return plain


def check_output(output: Path, sources: Sequence[Path]) -> None:
    """Raises InputError if writing the output would replace rollouts, which cost money to make."""
    if output.resolve() in {file.resolve() for path in sources for file in rollout_files(path)}:
        raise InputError(f"the output {output} is the input itself", "choose another output")
    if holds_rollouts(output):
        raise InputError(
            f"the output {output} holds rollouts that generate_rollouts wrote",
            "choose another output; delete the file yourself if it is not needed any more",
        )
