"""`stillroom chat`: a person, or an agent with --message, talks with a model and its tools."""

import argparse
import functools
import json
import sys
from collections.abc import Callable, Sequence

import anyio
from pydantic.fields import FieldInfo

from stillroom.api.chat import ChatWithModel, as_trained, open_chat
from stillroom.fences import printable
from stillroom.settings import Workspace, open_workspace
from stillroom.types import Message

FLAGS = (
    "provider",
    "base_url",
    "api_key_env",
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
"""The fields of the request that are flags of their names."""
_HELP = "Type a message. /new starts over, /quit (or Ctrl-D) ends.\n"
_NO_TOOLS = "none"


def run(options: argparse.Namespace, request: ChatWithModel) -> int:
    """Carries out the command as it was given; returns 1 if an answer failed or was cut."""
    workspace = open_workspace(options.workspace)
    if request.tools == _NO_TOOLS and "tools" not in vars(options):
        # A student is tried with the tools that it was trained with: those of the project.
        tools = "tools.py" if (workspace.root / "tools.py").is_file() else _NO_TOOLS
        request = request.model_copy(update={"tools": tools})
    talk = functools.partial(_talk, workspace, request, options.message or (), as_json=options.json)
    return anyio.run(talk)


async def _talk(
    workspace: Workspace, request: ChatWithModel, said: Sequence[str], *, as_json: bool
) -> int:
    trained = as_trained(workspace, request)
    show = functools.partial(_show, workspace, as_json=as_json)
    is_whole = True
    async with open_chat(workspace, trained, show) as (conversation, notes):
        system = f"system message as in training: {trained.system!r}"
        said_first = [] if trained.system == request.system else [system]
        for note in (*notes, *said_first, f"tools: {trained.tools}"):
            sys.stderr.write(printable(f"({note})\n"))
        if request.data is not None:
            for message in conversation.messages:
                show(message)
            is_whole = _told(await conversation.say(None))
        if said:
            for text in said:
                is_whole = _told(await conversation.say(text)) and is_whole
            return 0 if is_whole else 1
        sys.stderr.write(_HELP)
        while (text := await anyio.to_thread.run_sync(_read, abandon_on_cancel=True)) is not None:
            if text == "/new":
                conversation.start_over()
            elif text:
                _told(await conversation.say(text))
    return 0


def _told(problem: str | None) -> bool:
    """Says why an answer ended early; returns whether it is whole."""
    if problem is not None:
        sys.stderr.write(printable(f"({problem})\n"))
    return problem is None


def _read() -> str | None:
    """Returns the next message, or None at the end."""
    sys.stderr.write("> ")
    sys.stderr.flush()
    line = sys.stdin.readline()
    return None if not line or line.strip() in ("/quit", "/exit") else line.strip()


def _show(workspace: Workspace, message: Message, *, as_json: bool) -> None:
    """Writes a turn or a tool's reply to standard output."""
    if as_json:
        text = json.dumps(workspace.redactor().value(dict(message)), ensure_ascii=False)
    else:
        text = workspace.redactor().text("\n".join(_lines(message)))
    sys.stdout.write(printable(text) + "\n")
    sys.stdout.flush()


def _lines(message: Message) -> list[str]:
    content = message.get("content")
    lines = [content] if isinstance(content, str) and content else []
    if message["role"] == "tool":
        return [f"  <- {line}" for line in lines]
    if message["role"] != "assistant":
        return [f"{message['role']}: {line}" for line in lines]
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    return [*lines, *(f"  -> {call['name']}({call['arguments']})" for call in calls)]


def add_flags(parser: argparse.ArgumentParser, add_field: Callable[[str, FieldInfo], None]) -> None:
    """Adds the command's flags: those of the request by `add_field`, and its own."""
    for name in FLAGS:
        add_field(name, ChatWithModel.model_fields[name])
    parser.add_argument(
        "--message", action="append", help="say this and end (again: the next message)"
    )
    parser.add_argument("--workspace", help="folder that holds the project (default: this folder)")
    parser.add_argument("--json", action="store_true", help="print each message as one JSON line")
