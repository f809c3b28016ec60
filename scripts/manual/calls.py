"""How the site shows the calls in skills and guides: under their tool's name, and as a CLI command.

A skill's fence names the tool after its language (```` ```json evaluate_model as=base ````), and
`<base>` in later calls is the run which that call started.
"""

import json
import re
import shlex
import textwrap
from typing import Any

from stillroom.api import OPERATIONS, Operation

_FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>\w+) (?P<title>\w[^\n=]*(?: as=\w+)?)\n"
    r"(?P<text>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)
_NUMBERED = re.compile(r"\d+\. ")
_WIDTH = 88
_OPERATIONS = {operation.name: operation for operation in OPERATIONS}


def with_tabs(text: str) -> str:
    """Returns a page whose calls have two tabs: the tool's arguments, and the CLI command.

    Every other fence with a title, such as the name of a file, shows it.
    """

    def shown(fence: re.Match[str]) -> str:
        tool, _, run = fence["title"].partition(" as=")
        code = textwrap.dedent(fence["text"])
        if tool not in _OPERATIONS:
            shown = _fence(fence["language"], tool, code)
        else:
            title = tool + (f", whose run is <{run}> below" if run else "")
            command = command_line(_OPERATIONS[tool], json.loads(code))
            shown = (
                _tab('===! "Tool"', _fence(fence["language"], title, code))
                + _tab('=== "Shell"', _fence("bash", title, command + "\n"))
            )  # fmt: skip
        return textwrap.indent(shown, fence["indent"])

    return _FENCE.sub(shown, text)


def _tab(head: str, block: str) -> str:
    return f"\n{head}\n\n{textwrap.indent(block, '    ')}\n"


def _fence(language: str, title: str, code: str) -> str:
    return f'```{language} title="{title}"\n{code}```'


def command_line(operation: Operation, arguments: dict[str, Any]) -> str:
    r"""Returns the CLI command of a tool call, its lines broken by `\` as in a shell."""
    positional = [name for name in operation.positional if name in arguments]
    parts = [_words(arguments[name]) for name in positional]
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            parts.append(f"--{flag}" if value else f"--no-{flag}")
        elif name not in positional:
            parts.append(f"--{flag} {_words(value)}")
    lines = ["stillroom " + operation.command]
    for part in parts:
        if len(lines[-1]) + len(part) < _WIDTH:
            lines[-1] += " " + part
        else:
            lines.append("  " + part)
    return " \\\n".join(lines)


def _words(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(_words, value))
    return shlex.quote(value if isinstance(value, str) else json.dumps(value))


def with_wide_lists(text: str) -> str:
    """Returns a page whose numbered lists are indented by four spaces, which MkDocs requires.

    With three, as Markdown elsewhere has it, MkDocs would begin each list anew after a code block.
    """
    lines: list[str] = []
    is_in_list = False
    for line in text.split("\n"):
        if _NUMBERED.match(line):
            is_in_list = True
        elif line and not line.startswith("   "):
            # A line of a paragraph may continue an item without indentation.
            is_in_list = is_in_list and bool(lines[-1]) and not line.startswith(("#", "```"))
        lines.append(f" {line}" if is_in_list and line.startswith("   ") else line)
    return "\n".join(lines)
