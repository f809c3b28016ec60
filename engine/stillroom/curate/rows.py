"""Rollout rows as curation sees them: the few fields that decide, beside the untouched bytes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from stillroom.data.formats import rollout_files
from stillroom.errors import InputError
from stillroom.files import Line, read_lines
from stillroom.rollout.journal import holds_rollouts


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
        """The row's own word; without one, a complete answer counts as a success."""
        if self.success is not None:
            return self.success
        return self.has_final_answer and self.stop_reason == "answered"


@dataclass(frozen=True, slots=True)
class RolloutLine:
    """One row of a rollouts file; `facts` is None for what is not a rollout."""

    path: Path
    line: Line
    facts: RolloutFacts | None
    problem: str | None

    @property
    def where(self) -> str:
        """`file:line`."""
        return f"{self.path}:{self.line.number}"


_DECODER = msgspec.json.Decoder(RolloutFacts)


def read_rollouts(path: Path) -> Iterator[RolloutLine]:
    """Yields the rows of a rollouts file, or of all .jsonl files of a folder, one at a time."""
    for file in rollout_files(path):
        for line in read_lines(file):
            try:
                if not line.data.isascii():
                    line.data.decode()  # what the decoder passes over may be no UTF-8
                facts = _DECODER.decode(line.data)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                yield RolloutLine(file, line, None, str(error))
            else:
                yield RolloutLine(file, line, facts, None)


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
