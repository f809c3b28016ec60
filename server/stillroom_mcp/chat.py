"""`stillroom chat`: a user, or an agent with --message, chats with a model that may call tools."""

import argparse
import functools
import json
import sys
from collections.abc import Callable, Sequence

import anyio
from pydantic.fields import FieldInfo

from stillroom.errors import EngineError
from stillroom.export.folder import read_export
from stillroom.export.history import read_history
from stillroom.fences import printable
from stillroom.models.resolve import adapter_base, locate_model
from stillroom.rollout.chat import ChatWithModel, open_chat
from stillroom.settings import Workspace, open_workspace
from stillroom.teachers.providers import IN_PROCESS
from stillroom.types import Message

FLAGS = (
    "provider",
    "base_url",
    "api_key_env",
    "chat_template",
    "tools",
    "mcp_servers",
    "system",
    "context_file",
    "data",
    "row",
    "temperature",
    "max_tokens",
    "max_turns",
    "seed",
)
"""The fields of the request that are flags."""
_HELP = "Type a message. /new starts over, /quit (or Ctrl-D) exits.\n"
_NO_TOOLS = "none"


def run(options: argparse.Namespace, request: ChatWithModel) -> int:
    """Runs the command; returns 1 if an answer failed or was truncated."""
    workspace = open_workspace(options.workspace)
    if request.tools == _NO_TOOLS and "tools" not in vars(options):
        # By default, a student gets the project's tools, with which it was trained.
        tools = "tools.py" if (workspace.root / "tools.py").is_file() else _NO_TOOLS
        request = request.model_copy(update={"tools": tools})
    chat = functools.partial(_chat, workspace, request, options.message or (), as_json=options.json)
    return anyio.run(chat)


def with_training_system(workspace: Workspace, request: ChatWithModel) -> ChatWithModel:
    """Returns the request with the system message of the model's training, if it has none.

    A request is returned unchanged if its model's training is not recorded, or if its chat begins
    with a row.
    """
    if request.provider not in IN_PROCESS or request.system is not None or request.data is not None:
        return request
    try:
        location = locate_model(workspace, request.model)
        if location.is_local and (export := read_export(location.path)) is not None:
            location = locate_model(workspace, export.run_id or request.model)
        base = adapter_base(workspace, location) if location.is_adapter else None
        training = read_history(workspace, location, base).conversation
    except EngineError:
        return request  # open_chat reports the problem with the model
    if training is None or training.system is None:
        return request
    return request.model_copy(update={"system": training.system})


async def _chat(
    workspace: Workspace, request: ChatWithModel, texts: Sequence[str], *, as_json: bool
) -> int:
    completed = with_training_system(workspace, request)
    show = functools.partial(_show, workspace, as_json=as_json)
    is_complete = True
    async with open_chat(workspace, completed, show) as (conversation, notes):
        system = f"system message as in training: {completed.system!r}"
        system_notes = [] if completed.system == request.system else [system]
        for note in (*notes, *system_notes, f"tools: {completed.tools}"):
            sys.stderr.write(printable(f"({note})\n"))
        if request.data is not None:
            for message in conversation.messages:
                show(message)
            is_complete = _print_problem(await conversation.send(None))
        if texts:
            for text in texts:
                is_complete = _print_problem(await conversation.send(text)) and is_complete
            return 0 if is_complete else 1
        sys.stderr.write(_HELP)
        while (
            text := await anyio.to_thread.run_sync(_read_message, abandon_on_cancel=True)
        ) is not None:
            if text == "/new":
                conversation.start_over()
            elif text:
                _print_problem(await conversation.send(text))
    return 0


def _print_problem(problem: str | None) -> bool:
    """Prints the reason why an answer ended early; returns whether it is complete."""
    if problem is not None:
        sys.stderr.write(printable(f"({problem})\n"))
    return problem is None


def _read_message() -> str | None:
    """Reads the user's next message; returns None at the end of the chat."""
    sys.stderr.write("> ")
    sys.stderr.flush()
    line = sys.stdin.readline()
    return None if not line or line.strip() in ("/quit", "/exit") else line.strip()


def _show(workspace: Workspace, message: Message, *, as_json: bool) -> None:
    """Prints a turn or a tool's reply to standard output."""
    if as_json:
        text = json.dumps(workspace.redactor().redact_value(dict(message)), ensure_ascii=False)
    else:
        text = workspace.redactor().redact_text("\n".join(_lines(message)))
    sys.stdout.write(printable(text) + "\n")
    sys.stdout.flush()


def _lines(message: Message) -> list[str]:
    """Returns the lines that show a message and its tool calls."""
    content = message.get("content")
    lines = [content] if isinstance(content, str) and content else []
    if message["role"] == "tool":
        return [f"  <- {line}" for line in lines]
    if message["role"] != "assistant":
        return [f"{message['role']}: {line}" for line in lines]
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    return [*lines, *(f"  -> {call['name']}({call['arguments']})" for call in calls)]


def add_flags(parser: argparse.ArgumentParser, add_field: Callable[[str, FieldInfo], None]) -> None:
    """Adds the flags of the command; `add_field` adds the flag of a field of the request."""
    for name in FLAGS:
        add_field(name, ChatWithModel.model_fields[name])
    parser.add_argument(
        "--message", action="append", help="send this message and exit; repeat it for more messages"
    )
    parser.add_argument("--workspace", help="the project's folder (default: this folder)")
    parser.add_argument("--json", action="store_true", help="print each message as one JSON line")
