"""Decides which API key may be sent to which host, and which variables tools may read.

A key may be sent to its provider's own hosts. Every other pair of key and host must be allowed by
the user: in `keys.yml`, which is outside the workspace that agents write to, or, for a key in the
project's `.env`, by NAME_HOST in that file.
"""

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from stillroom.errors import InputError
from stillroom.files import write_atomic
from stillroom.home_paths import is_remote_process, local_path
from stillroom.secrecy.readable import parse_error_message

_FILE = "keys.yml"
_FIX = "write entries such as - {key: MY_KEY, host: gateway.example.com}"
_LOOPBACK = re.compile(r"localhost|127\.\d+\.\d+\.\d+|::1")
_LOCAL_SERVERS = re.compile(
    r"(VLLM|SGLANG|OLLAMA|LLAMA_?CPP|LM_?STUDIO|TGI|LITELLM|LOCAL)"
    r"(_[A-Z0-9]+)*_(KEY|TOKEN)"
)
"""Names of the variables with keys for a model server on the user's own machine."""


class KeyNotAllowedError(InputError):
    """Raised if the user has not allowed an API key to be sent to a host."""

    def __init__(self, problem: str, fix: str, name: str, host: str) -> None:
        super().__init__(problem, fix)
        self.args = (problem, fix, name, host)
        self.name, self.host = name, host


class KeyRule(BaseModel):
    """One entry of keys.yml: allows a host, or the user's tools, to receive a variable."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    key: Annotated[str, Field(pattern=r"^\w+$")]
    """The name of the environment variable."""
    host: str | None = None
    """A host, or `host:port`, to which the key may be sent."""
    tools: bool = False
    """Whether tools.py, rewards.py and MCP servers get the variable."""

    def allows(self, name: str, host: str, port: int | None) -> bool:
        """Returns whether the entry allows a key to be sent to a host."""
        return self.key == name and self.host in (host, f"{host}:{port}")


_RULES = TypeAdapter(tuple[KeyRule, ...])


def keys_file() -> Path:
    """Returns the path of keys.yml, in $STILLROOM_CONFIG or in ~/.config/stillroom.

    A run on another machine reads a copy of the user's file, which has names and hosts but no keys.
    """
    if is_remote_process():
        return local_path(f"~/.config/stillroom/{_FILE}")
    folder = os.environ.get("STILLROOM_CONFIG")
    if folder:
        return Path(folder) / _FILE
    base = os.environ.get("XDG_CONFIG_HOME")
    return (Path(base) if base else Path.home() / ".config") / "stillroom" / _FILE


def tool_variables(workspace: Path | None = None) -> frozenset[str]:
    """Returns the names of the variables that keys.yml allows for the user's tools."""
    return frozenset(rule.key for rule in _rules(workspace) if rule.tools)


def is_loopback(host: str) -> bool:
    """Returns whether a host is `localhost` or a loopback address."""
    return _LOOPBACK.fullmatch(host) is not None


def check_host(
    name: str, host: str, port: int | None, *, workspace: Path, provider_variables: Sequence[str]
) -> None:
    """Raises KeyNotAllowedError unless the key in the variable `name` may be sent to a host.

    `provider_variables` are the key variables of the host's provider. A variable whose name
    contains one of them, such as OPENAI_API_KEY_2, counts as another key of that provider. A key
    named after a local server, such as VLLM_API_KEY, may be sent to this machine.
    """
    if any(variable in name for variable in provider_variables):
        return
    if is_loopback(host) and _LOCAL_SERVERS.fullmatch(name):
        return
    if any(rule.allows(name, host, port) for rule in _rules(workspace)):
        return
    url_host = f"[{host}]" if ":" in host else host
    raise KeyNotAllowedError(
        f"the key in {name} may not be sent to {host}: the user has not allowed this host for it",
        f"to allow it, the user writes {name}_HOST={url_host} below the key in the project's .env, "
        f"or adds this line to {keys_file()}, outside the workspace: "
        f"- {{key: {name}, host: {url_host if ':' not in host else repr(host)}}}",
        name,
        host if port is None else f"{host}:{port}",
    )


def allow_host(name: str, host: str) -> None:
    """Appends an entry to keys.yml that allows a key to be sent to a host.

    The caller must have asked the user first.

    Raises InputError if the file is malformed, or is in a form to which no entry can be appended.
    """
    path = keys_file().resolve()
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    entry = f"- {{key: {name}, host: {json.dumps(host)}}}\n"
    text = f"{text.rstrip()}\n{entry}".lstrip()
    _parse_rules(path, text)
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_atomic(path, text.encode())


def _rules(workspace: Path | None) -> tuple[KeyRule, ...]:
    """Returns the entries of keys.yml; empty if the file does not exist.

    Raises InputError if the file is malformed, or is in the workspace, where agents write.
    """
    path = keys_file()
    if not path.is_file():
        return ()
    if workspace is not None and path.resolve().is_relative_to(workspace.resolve()):
        raise InputError(
            f"{path} is inside the workspace, where an agent could edit it to allow any host",
            "set STILLROOM_CONFIG to a folder outside the workspace, and move the file there",
        )
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise InputError(parse_error_message(path, error), _FIX) from error
    return _parse_rules(path, text)


def _parse_rules(path: Path, text: str) -> tuple[KeyRule, ...]:
    """Returns the entries in the text of a keys.yml. Raises InputError if it is malformed."""
    try:
        raw: Any = yaml.safe_load(text)
        return _RULES.validate_python(tuple(raw or ()))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(map(str, first["loc"]))
        raise InputError(f"{path}: {field}: {first['msg']}", _FIX) from error
    except (ValueError, TypeError, RecursionError, yaml.YAMLError) as error:
        raise InputError(parse_error_message(path, error), _FIX) from error
