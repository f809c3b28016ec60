"""The instruction that a model gets before a conversation: a system message, a long context."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from stillroom import bounds
from stillroom.data.chat.template import plain_text
from stillroom.data.formats import Task
from stillroom.errors import ConfigError
from stillroom.files import content_hash
from stillroom.settings import Workspace
from stillroom.types import Message

_MOST_BYTES = bounds.INSTRUCTION.most
"""More than any model's context can hold; such a file is data, not an instruction."""

_SHOWN = 120
_NO_SYSTEM = "no system message"


@dataclass(frozen=True, slots=True)
class Instruction:
    """What a model reads before conversations, after or in place of their own system message."""

    system: str | None = None
    """Replaces the system message of each conversation; "" removes it; None keeps it."""
    context: str | None = None
    """A text that is appended to the system message; None appends nothing."""

    @property
    def is_empty(self) -> bool:
        """Whether conversations stay as they are."""
        return self.system is None and self.context is None

    def put_before(self, messages: Sequence[Message]) -> list[Message]:
        """Returns a conversation as a model with this instruction reads it.

        The system message comes first, and its context, if any, after a blank line.
        """
        if self.is_empty:
            return list(messages)
        own, rest = list[Message](), list(messages)
        if self.system is not None:
            rest = [message for message in rest if message["role"] != "system"]
        elif rest and rest[0]["role"] == "system":
            own, rest = rest[:1], rest[1:]
        first = self.system if self.system is not None else "".join(map(plain_text, own))
        text = "\n\n".join(part for part in (first, self.context) if part)
        return [{"role": "system", "content": text}, *rest] if text else rest

    def put_before_task(self, task: Task) -> Task:
        """Returns the task as a model with this instruction reads it, with the id of its row."""
        if self.is_empty:
            return task
        return msgspec.structs.replace(task, messages=self.put_before(task.messages))

    def describe(self) -> str:
        """Returns what a model with this instruction reads, in a few words."""
        if self.is_empty:
            return "the prompts' own system messages"
        named = "the prompts' own system messages"
        if self.system is not None:
            named = f"the system message {_start(self.system)}" if self.system else _NO_SYSTEM
        if self.context is None:
            return named
        return f"{named}, then {_start(self.context)}"


def _start(text: str) -> str:
    """Returns the first line of a text, with its size if there is more."""
    line = text.splitlines()[0][:_SHOWN]
    return repr(line) if line == text else f"{line!r} … ({len(text)} characters)"


UNINSTRUCTED = Instruction()
"""Conversations are read as they are."""


class RemovedSystem(msgspec.Struct, frozen=True):
    """The system message that a conversation had, and that its training row does not have."""

    sha256: str
    """The first 16 digits of its SHA-256."""
    begins: str
    """Its first line."""


def removed_system(messages: Sequence[Message]) -> RemovedSystem | None:
    """Returns what a row keeps of the system messages that were taken from it; None if none."""
    text = "\n\n".join(plain_text(one) for one in messages if one["role"] == "system")
    if not text:
        return None
    return RemovedSystem(content_hash(text), next(iter(text.splitlines()), "")[:_SHOWN])


@dataclass(frozen=True, slots=True)
class PromptViews:
    """What a student and its teacher read of the same prompt row."""

    student: Instruction = UNINSTRUCTED
    teacher: Instruction = UNINSTRUCTED

    @property
    def are_equal(self) -> bool:
        """Whether both read every prompt alike."""
        return self.student == self.teacher

    def for_student(self, task: Task) -> Task:
        """Returns the task as the student reads it; its id stays that of its row."""
        return self.student.put_before_task(task)


UNCHANGED = PromptViews()
"""Student and teacher read the rows' own messages."""


def read_context(workspace: Workspace, path: str | Path, *, label: str) -> str:
    """Returns the text of a file that a model is to read before conversations.

    `label` is the name of the setting that gives the file, for errors. Raises InputError for a file
    that does not exist or must not be read (see `check_readable`), and ConfigError unless it is
    UTF-8 text.
    """
    file = workspace.existing(path, label=label)
    fix = f"name a file of plain text for {label}: Markdown, say"
    named = f"{label} {str(path)!r}"
    if not file.is_file():
        raise ConfigError(f"{named} is not a file", fix)
    if (size := file.stat().st_size) > _MOST_BYTES:
        raise ConfigError(
            f"{named} has {size / 1e6:.0f} MB, more than any model reads at once",
            "leave in it what the model must know",
        )
    try:
        text = file.read_text(encoding="utf-8").strip()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{named} is not UTF-8 text ({error.reason})", fix) from error
    if not text:
        raise ConfigError(f"{named} is empty", "write into it what the model must know")
    return text
