"""The agent hosts that `stillroom setup` knows: their files, and the entry that each reads."""

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from stillroom_mcp.host_setup.config_text import (
    json_with_entry,
    json_without_entry,
    parse_json,
    parse_toml,
    toml_with_entry,
    toml_without_entry,
)

SERVER_NAME = "stillroom"
SERVE = ("stillroom", "serve")
"""The command that documents name, of an installation that the PATH finds."""
_STARTUP_S = 30
# Longer than the longest wait of `get_run`.
_CALL_S = 150

Entry = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Host:
    """An agent host, where it keeps its MCP servers, and what to do there afterwards."""

    name: str
    title: str
    project_file: str
    user_file: Callable[[], Path] | None
    """The file for all projects; None where the host keeps other things of its own in it."""
    section: tuple[str, ...]
    """The keys that lead to the servers by their names."""
    entry: Callable[[Sequence[str]], Entry]
    """The host's entry for a server that a command starts."""
    afterwards: str
    syntax: Literal["json", "toml"] = "json"
    other_project_files: tuple[str, ...] = ()
    """Other names that the host reads too; one that is there is changed in place of a new file."""
    skills_folder: str | None = ".agents/skills"
    """Where it looks for skills, in the project and in the home folder; None if it has none."""

    def with_entry(self, text: str, command: Sequence[str]) -> str:
        """Returns the text of the host's file with the entry added, or brought up to date.

        All else stays as it is, byte for byte. Raises ValueError with the place and reason if
        the text cannot be read, or the entry cannot be put in without changing something else.
        """
        edit = toml_with_entry if self.syntax == "toml" else json_with_entry
        return edit(text, (*self.section, SERVER_NAME), self.entry(command))

    def entry_in(self, text: str) -> Any:
        """Returns the entry in the text of the host's file; None if there is none.

        Raises ValueError if the text cannot be read.
        """
        found = parse_toml(text) if self.syntax == "toml" else parse_json(text or "{}")
        for key in (*self.section, SERVER_NAME):
            found = found.get(key) if isinstance(found, dict) else None
        return found

    def without_entry(self, text: str) -> str:
        """Returns the text of the host's file without the entry. Raises ValueError if it cannot."""
        edit = toml_without_entry if self.syntax == "toml" else json_without_entry
        return edit(text, (*self.section, SERVER_NAME))

    def snippet(self, command: Sequence[str] = SERVE) -> str:
        """Returns what the host's file holds if stillroom is its only server."""
        return self.with_entry("", command)


def _home(*parts: str, variable: str | None = None) -> Callable[[], Path]:
    """Returns a function that gives a path in the home folder, or in the variable's folder."""

    def place() -> Path:
        named = os.environ.get(variable) if variable else None
        return Path(named, parts[-1]) if named else Path.home().joinpath(*parts)

    return place


def _in_config(*parts: str) -> Callable[[], Path]:
    """Returns a function that gives a path in the user's folder of configurations."""

    def place() -> Path:
        named = os.environ.get("XDG_CONFIG_HOME")
        return (Path(named) if named else Path.home() / ".config").joinpath(*parts)

    return place


def _vscode_file() -> Path:
    if sys.platform == "darwin":
        return Path.home() / "Library/Application Support/Code/User/mcp.json"
    return _in_config("Code", "User", "mcp.json")()


def _plain(command: Sequence[str]) -> Entry:
    return {"command": command[0], "args": list(command[1:])}


def _in_editor(command: Sequence[str]) -> Entry:
    """An editor starts its servers in a folder of its own choice, so that the project is named."""
    return _plain((*command, "--workspace", "${workspaceFolder}"))


def _with_limits(command: Sequence[str]) -> Entry:
    limits = {"startup_timeout_sec": _STARTUP_S, "tool_timeout_sec": _CALL_S}
    return {**_plain(command), **limits}


def _as_list(command: Sequence[str]) -> Entry:
    return {"type": "local", "command": list(command), "timeout": _CALL_S * 1000}


HOSTS = (
    Host(
        name="claude-code",
        title="Claude Code",
        project_file=".mcp.json",
        user_file=None,
        section=("mcpServers",),
        entry=_plain,
        afterwards="start `claude` in this folder and approve the server; `/mcp` shows it",
        skills_folder=".claude/skills",
    ),
    Host(
        name="cursor",
        title="Cursor",
        project_file=".cursor/mcp.json",
        user_file=_home(".cursor", "mcp.json"),
        section=("mcpServers",),
        entry=_in_editor,
        afterwards="turn it on under Settings, MCP",
    ),
    Host(
        name="vscode",
        title="VS Code",
        project_file=".vscode/mcp.json",
        user_file=_vscode_file,
        section=("servers",),
        entry=lambda command: {"type": "stdio", **_in_editor(command)},
        afterwards="run the command `MCP: List Servers` and start it",
    ),
    Host(
        name="codex",
        title="Codex",
        project_file=".codex/config.toml",
        user_file=_home(".codex", "config.toml", variable="CODEX_HOME"),
        section=("mcp_servers",),
        entry=_with_limits,
        afterwards="start `codex` in your project and trust its folder; `/mcp` shows the server",
        syntax="toml",
    ),
    Host(
        name="gemini",
        title="Gemini CLI",
        project_file=".gemini/settings.json",
        user_file=_home(".gemini", "settings.json"),
        section=("mcpServers",),
        entry=lambda command: {**_plain(command), "timeout": _CALL_S * 1000},
        afterwards="start `gemini` in your project and trust its folder; `/mcp` shows the server",
    ),
    Host(
        name="opencode",
        title="opencode",
        project_file="opencode.json",
        user_file=_in_config("opencode", "opencode.json"),
        section=("mcp",),
        entry=_as_list,
        afterwards="start `opencode` in your project; `opencode mcp list` shows the server",
        other_project_files=("opencode.jsonc",),
    ),
    Host(
        name="zed",
        title="Zed",
        project_file=".zed/settings.json",
        user_file=_in_config("zed", "settings.json"),
        section=("context_servers",),
        entry=_plain,
        afterwards="open the agent panel's settings: the server's dot is green",
        skills_folder=None,
    ),
)
