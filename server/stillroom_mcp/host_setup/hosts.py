"""The agent hosts that `stillroom setup` supports: their config files and server entries."""

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
"""The command that starts the server if stillroom is on the PATH, as the docs show it."""
_STARTUP_S = 30
# Longer than the longest wait of get_run.
_CALL_S = 150

Entry = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Host:
    """An agent host, where it configures MCP servers, and what the user does after setup."""

    name: str
    title: str
    project_file: str
    user_file: Callable[[], Path] | None
    """The config file for all projects; None if the host also keeps other state in it."""
    section: tuple[str, ...]
    """The keys under which the file lists the servers by name."""
    entry: Callable[[Sequence[str]], Entry]
    """Builds the host's entry for a server from the command that starts it."""
    next_step: str
    syntax: Literal["json", "toml"] = "json"
    other_project_files: tuple[str, ...] = ()
    """Other file names that the host reads; an existing one is changed instead of a new file."""
    skills_folder: str | None = ".agents/skills"
    """The folder of skills in the project or the home folder; None if it reads none."""

    def with_entry(self, text: str, command: Sequence[str]) -> str:
        """Returns the text of the host's file with the entry added or updated.

        Everything else is kept byte for byte. Raises ValueError with the line and reason if the
        text cannot be parsed, or if the entry cannot be added without changing something else.
        """
        edit = toml_with_entry if self.syntax == "toml" else json_with_entry
        return edit(text, (*self.section, SERVER_NAME), self.entry(command))

    def entry_in(self, text: str) -> Any:
        """Returns the entry in the text of the host's file; None if there is none.

        Raises ValueError if the text cannot be parsed.
        """
        value = parse_toml(text) if self.syntax == "toml" else parse_json(text or "{}")
        for key in (*self.section, SERVER_NAME):
            value = value.get(key) if isinstance(value, dict) else None
        return value

    def others_in(self, text: str) -> Any:
        """Returns everything in the text of the host's file but the entry.

        Raises ValueError if the text cannot be parsed.
        """
        value = parse_toml(text) if self.syntax == "toml" else parse_json(text or "{}")
        return _without(value, (*self.section, SERVER_NAME))

    def without_entry(self, text: str) -> str:
        """Returns the file's text without the entry. Raises ValueError if it cannot be removed."""
        edit = toml_without_entry if self.syntax == "toml" else json_without_entry
        return edit(text, (*self.section, SERVER_NAME))

    def snippet(self, command: Sequence[str] = SERVE) -> str:
        """Returns the text of a host's file whose only server is stillroom."""
        return self.with_entry("", command)


def _without(value: Any, path: Sequence[str]) -> Any:
    """Returns a value without what is at `path`, and without objects that are empty then."""
    if not path:
        return {}
    if not isinstance(value, dict) or path[0] not in value:
        return value
    inner = _without(value[path[0]], path[1:])
    return {
        key: inner if key == path[0] else value[key] for key in value if inner or key != path[0]
    }


def _home_path(*parts: str, variable: str | None = None) -> Callable[[], Path]:
    """Returns a function for a path in the home folder, or in the folder that `variable` names."""

    def path() -> Path:
        folder = os.environ.get(variable) if variable else None
        return Path(folder, parts[-1]) if folder else Path.home().joinpath(*parts)

    return path


def _config_path(*parts: str) -> Callable[[], Path]:
    """Returns a function for a path in the user's config folder (XDG_CONFIG_HOME)."""

    def path() -> Path:
        folder = os.environ.get("XDG_CONFIG_HOME")
        return (Path(folder) if folder else Path.home() / ".config").joinpath(*parts)

    return path


def _vscode_file() -> Path:
    if sys.platform == "darwin":
        return Path.home() / "Library/Application Support/Code/User/mcp.json"
    return _config_path("Code", "User", "mcp.json")()


def _plain_entry(command: Sequence[str]) -> Entry:
    return {"command": command[0], "args": list(command[1:])}


def _editor_entry(command: Sequence[str]) -> Entry:
    """Returns an entry that names the project, since editors start servers in other folders."""
    return _plain_entry((*command, "--workspace", "${workspaceFolder}"))


def _entry_with_limits(command: Sequence[str]) -> Entry:
    limits = {"startup_timeout_sec": _STARTUP_S, "tool_timeout_sec": _CALL_S}
    return {**_plain_entry(command), **limits}


def _command_list_entry(command: Sequence[str]) -> Entry:
    """Returns an entry whose command and arguments are one list."""
    return {"type": "local", "command": list(command), "timeout": _CALL_S * 1000}


HOSTS = (
    Host(
        name="claude-code",
        title="Claude Code",
        project_file=".mcp.json",
        user_file=None,
        section=("mcpServers",),
        entry=_plain_entry,
        next_step="start `claude` in this folder and approve the server; `/mcp` shows it",
        skills_folder=".claude/skills",
    ),
    Host(
        name="cursor",
        title="Cursor",
        project_file=".cursor/mcp.json",
        user_file=_home_path(".cursor", "mcp.json"),
        section=("mcpServers",),
        entry=_editor_entry,
        next_step="turn the stillroom server on under Settings, MCP",
    ),
    Host(
        name="vscode",
        title="VS Code",
        project_file=".vscode/mcp.json",
        user_file=_vscode_file,
        section=("servers",),
        entry=lambda command: {"type": "stdio", **_editor_entry(command)},
        next_step="run `MCP: List Servers` from the Command Palette and start the stillroom server",
    ),
    Host(
        name="codex",
        title="Codex",
        project_file=".codex/config.toml",
        user_file=_home_path(".codex", "config.toml", variable="CODEX_HOME"),
        section=("mcp_servers",),
        entry=_entry_with_limits,
        next_step="start `codex` in your project and trust its folder; `/mcp` shows the server",
        syntax="toml",
    ),
    Host(
        name="gemini",
        title="Gemini CLI",
        project_file=".gemini/settings.json",
        user_file=_home_path(".gemini", "settings.json"),
        section=("mcpServers",),
        entry=lambda command: {**_plain_entry(command), "timeout": _CALL_S * 1000},
        next_step="start `gemini` in your project and trust its folder; `/mcp` shows the server",
    ),
    Host(
        name="opencode",
        title="opencode",
        project_file="opencode.json",
        user_file=_config_path("opencode", "opencode.json"),
        section=("mcp",),
        entry=_command_list_entry,
        next_step="start `opencode` in your project; `opencode mcp list` shows the server",
        other_project_files=("opencode.jsonc",),
    ),
    Host(
        name="zed",
        title="Zed",
        project_file=".zed/settings.json",
        user_file=_config_path("zed", "settings.json"),
        section=("context_servers",),
        entry=_plain_entry,
        next_step="open the agent panel's settings: the server's dot is green",
        skills_folder=None,
    ),
)
