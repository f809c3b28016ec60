"""Rollout rows as curation sees them: the few fields that decide, beside the untouched bytes."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from stillroom.data.formats import rollout_files
from stillroom.files import Line, read_lines


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
    id: str = ""
    task_id: str = ""
    reward: float | None = None
    success: bool | None = None
    tool_errors: int = 0
    metadata: dict[str, Any] = {}
    error: Any = None

    @property
    def num_turns(self) -> int:
        """Assistant turns."""
        return sum(message.role == "assistant" for message in self.messages)

    @property
    def has_final_answer(self) -> bool:
        """Whether it ends with an assistant's text and not with a tool call."""
        last = self.messages[-1] if self.messages else None
        return last is not None and last.role == "assistant" and not last.tool_calls

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
                facts = _DECODER.decode(line.data)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                yield RolloutLine(file, line, None, str(error))
            else:
                yield RolloutLine(file, line, facts, None)
