"""The instruction that a model reads before a conversation: a system message and a context file."""

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

_MAX_BYTES = bounds.INSTRUCTION.limit
"""A larger file does not fit into any model's context."""

_MAX_SHOWN = 120
_NO_SYSTEM = "no system message"


@dataclass(frozen=True, slots=True)
class Instruction:
    """The system message to set in each conversation, and the context to append to it."""

    system: str | None = None
    """Replaces the system message of each conversation; "" removes it; None keeps it."""
    context: str | None = None
    """A text that is appended to the system message; None appends nothing."""

    @property
    def is_empty(self) -> bool:
        """Whether the instruction leaves conversations unchanged."""
        return self.system is None and self.context is None

    def apply_to(self, messages: Sequence[Message]) -> list[Message]:
        """Returns a conversation with this instruction in its system message.

        The context, if any, follows the system message after a blank line.
        """
        if self.is_empty:
            return list(messages)
        system, others = list[Message](), list(messages)
        if self.system is not None:
            others = [message for message in others if message["role"] != "system"]
        elif others and others[0]["role"] == "system":
            system, others = others[:1], others[1:]
        first = self.system if self.system is not None else "".join(map(plain_text, system))
        text = "\n\n".join(part for part in (first, self.context) if part)
        return [{"role": "system", "content": text}, *others] if text else others

    def apply_to_task(self, task: Task) -> Task:
        """Returns the task with this instruction in its system message; its id does not change."""
        if self.is_empty:
            return task
        return msgspec.structs.replace(task, messages=self.apply_to(task.messages))

    def describe(self) -> str:
        """Returns a short description of the system message that a model reads."""
        text = "the prompts' own system messages"
        if self.system is not None:
            text = f"the system message {_excerpt(self.system)}" if self.system else _NO_SYSTEM
        if self.context is None:
            return text
        return f"{text}, then {_excerpt(self.context)}"


def _excerpt(text: str) -> str:
    """Returns the first line of a text, with the size of the text if it is longer."""
    line = text.splitlines()[0][:_MAX_SHOWN]
    return repr(line) if line == text else f"{line!r} … ({len(text)} characters)"


UNINSTRUCTED = Instruction()
"""The instruction that leaves conversations unchanged."""


class RemovedSystem(msgspec.Struct, frozen=True):
    """The record of a system message that was removed from a training row."""

    sha256: str
    """The first 16 digits of its SHA-256."""
    begins: str
    """Its first line."""


def removed_system(messages: Sequence[Message]) -> RemovedSystem | None:
    """Returns the record of a conversation's system messages; None if it has none."""
    systems = (message for message in messages if message["role"] == "system")
    text = "\n\n".join(map(plain_text, systems))
    if not text:
        return None
    return RemovedSystem(content_hash(text), next(iter(text.splitlines()), "")[:_MAX_SHOWN])


@dataclass(frozen=True, slots=True)
class PromptViews:
    """The instructions with which a student and its teacher read the same prompts."""

    student: Instruction = UNINSTRUCTED
    teacher: Instruction = UNINSTRUCTED

    @property
    def are_equal(self) -> bool:
        """Whether student and teacher have the same instruction."""
        return self.student == self.teacher

    def for_student(self, task: Task) -> Task:
        """Returns the task as the student reads it; its id does not change."""
        return self.student.apply_to_task(task)


UNCHANGED = PromptViews()
"""The views in which student and teacher read the prompts unchanged."""


def read_context(workspace: Workspace, path: str | Path, *, label: str) -> str:
    """Returns the text of a context file.

    `label` is the name of the setting with the path, for errors. Raises InputError for a file
    that does not exist or must not be read (see `check_readable`), and ConfigError unless it is
    UTF-8 text.
    """
    file = workspace.existing(path, label=label)
    fix = f"set {label} to a plain-text file, e.g. Markdown"
    name = f"{label} {str(path)!r}"
    if not file.is_file():
        raise ConfigError(f"{name} is not a file", fix)
    if (size := file.stat().st_size) > _MAX_BYTES:
        raise ConfigError(
            f"{name} has {size / 1e6:.0f} MB, more than any model's context",
            "shorten it to what the model must know",
        )
    try:
        text = file.read_text(encoding="utf-8").strip()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name} is not UTF-8 text ({error.reason})", fix) from error
    if not text:
        raise ConfigError(f"{name} is empty", "write what the model must know into it")
    return text
