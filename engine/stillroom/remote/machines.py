"""Reads machines.yml, which lists the machines on which runs can be executed.

The project's file, in the workspace, takes precedence over the user's own, next to keys.yml. Files
in the workspace are not trusted, since an agent or a third party may have written them: they may
not set `ssh` options, which can run local programs, and their machines receive no keys by default.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import yaml
from pydantic import ValidationError

from stillroom.errors import ConfigError, InputError
from stillroom.remote.machine import EXAMPLE, Machine, MachineEntry
from stillroom.secrecy.keys import check_host, keys_file
from stillroom.secrecy.readable import check_readable, parse_error_message
from stillroom.settings import Workspace
from stillroom.validation import describe_errors, nearest
from stillroom.yaml_text import read_yaml

MACHINES_FILE = "machines.yml"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_LOCAL_NAMES = frozenset({"local", "localhost", "here", "this"})
_RESERVED_NAMES = frozenset({"start", "first_difference", "critic"})
"""Values of an earlier `where` option of generate_rollouts, which older requests still use."""
_UNREADABLE = (OSError, yaml.YAMLError, ValueError, RecursionError)


def users_machines_file() -> Path:
    """Returns the path of the user's own machines.yml, next to keys.yml."""
    return keys_file().with_name(MACHINES_FILE)


def find_machine(workspace: Workspace, name: str) -> Machine:
    """Returns the machine with this name.

    Raises InputError if neither machines.yml has it, and ConfigError if one is malformed.
    """
    machines = {machine.name: machine for machine in all_machines(workspace)}
    if name in machines:
        return machines[name]
    if name.lower() in _LOCAL_NAMES:
        raise InputError(
            f"where: {name!r} is not a machine in machines.yml", "leave `where` out to run locally"
        )
    known = ", ".join(machines) or "none yet"
    entry = EXAMPLE.replace("gpu-box", name).replace("me@host", name) if _is_name(name) else EXAMPLE
    raise InputError(
        f"where: there is no machine {name[:80]!r}{nearest(name, list(machines))} (known: {known})",
        f"add it to {workspace.root / MACHINES_FILE} or {users_machines_file()}, e.g. {entry} "
        "(ssh: an alias of ~/.ssh/config, or user@host; ask the user for the price)",
    )


def all_machines(workspace: Workspace) -> list[Machine]:
    """Returns all machines, the project's first; the project's entry wins if names are equal.

    Raises ConfigError, with the line, if a file is malformed.
    """
    files = [workspace.root / MACHINES_FILE, users_machines_file()]
    machines = dict[str, Machine]()
    for path in files:
        for machine in _machines_of(path, is_own=is_user_owned(workspace, path)):
            machines.setdefault(machine.name, machine)
    return list(machines.values())


def is_user_owned(workspace: Workspace, path: Path) -> bool:
    """Whether a machines.yml is the user's own and lies outside of the workspace."""
    is_users_file = path.resolve() == users_machines_file().resolve()
    return is_users_file and not path.resolve().is_relative_to(workspace.root)


def check_keys_allowed(workspace: Workspace, machine: Machine, key_names: Sequence[str]) -> None:
    """Raises InputError if a secret may not be sent to a machine.

    It may if the machine is in the user's own machines.yml, or if keys.yml allows the key for its
    host.
    """
    if machine.file and is_user_owned(workspace, Path(machine.file)):
        return
    for name in key_names:
        try:
            check_host(
                name,
                machine.access.key_host or machine.name,
                None,
                workspace=workspace.root,
                own=(),
            )
        except InputError as error:
            raise InputError(
                f"the run needs {name}, but {machine.name!r} is defined in the workspace "
                f"({machine.file}), whose machines are not trusted with keys",
                f"ask the user to move the entry to {users_machines_file()}, which trusts the "
                "machine with all keys (an entry left in the workspace takes precedence), or to "
                f"allow this key only: {error.fix}",
            ) from error


def _machines_of(path: Path, *, is_own: bool) -> list[Machine]:
    if not path.is_file():
        return []
    check_readable(path)
    try:
        text = path.read_bytes()
        raw: Any = read_yaml(text)
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except _UNREADABLE as error:
        raise ConfigError(
            parse_error_message(path, error), f"correct the syntax; example entry: {EXAMPLE}"
        ) from error
    if raw is None or root is None:
        return []
    _check_duplicate_keys(path, root)
    if not isinstance(raw, dict):
        raise ConfigError(
            f"{path}:1: must be a mapping of machine names, not {type(raw).__name__}",
            f"write e.g. {EXAMPLE}",
        )
    entries = cast("dict[object, object]", raw).items()
    return [_machine(path, root, name, value, is_own=is_own) for name, value in entries]


def _machine(path: Path, root: yaml.Node, name: object, value: object, *, is_own: bool) -> Machine:
    fix = f"correct the file; example entry: {EXAMPLE}"
    where = f"{path}:{_line_of(root, (name,))}: "
    if not isinstance(name, str) or not _is_name(name):
        shown = repr(name)[:80]
        raise ConfigError(
            f"{where}{shown} is not a valid machine name",
            "use letters, digits, `.`, `_` and `-`, and no reserved word such as local or start",
        )
    try:
        entry = MachineEntry.model_validate(value)
    except ValidationError as error:
        line = _line_of(root, (name, *error.errors()[0]["loc"]))
        raise ConfigError(
            f"{path}:{line}: {name}: {describe_errors(error, MachineEntry)}", fix
        ) from error
    if entry.ssh is not None and entry.ssh.options and not is_own:
        raise ConfigError(
            f"{path}:{_line_of(root, (name, 'ssh', 'options'))}: {name}: ssh.options can make ssh "
            "run any local program, so they are not allowed in the workspace's machines.yml",
            "ask the user to set them in ~/.ssh/config, or to move the entry to "
            f"{users_machines_file()}",
        )
    return entry.machine(name, str(path))


def _is_name(name: str) -> bool:
    return _NAME.fullmatch(name) is not None and name.lower() not in _LOCAL_NAMES | _RESERVED_NAMES


def _check_duplicate_keys(path: Path, node: yaml.Node) -> None:
    """Raises ConfigError for a duplicate key, whose first value YAML would silently drop."""
    if not isinstance(node, yaml.MappingNode):
        return
    lines = dict[str, int]()
    for key, value in node.value:
        line = key.start_mark.line + 1
        if lines.setdefault(key.value if isinstance(key.value, str) else "", line) != line:
            raise ConfigError(
                f"{path}:{line}: duplicate key {key.value!r}, already on line {lines[key.value]}",
                "remove one of them",
            )
        _check_duplicate_keys(path, value)


def _line_of(root: yaml.Node, place: Sequence[object]) -> int:
    """Returns the line of the value at `place`, or of its innermost parent in the file."""
    node, line = root, root.start_mark.line + 1
    for part in place:
        inner = _child_of(node, part)
        if inner is None:
            continue  # a key that only the expanded form has
        line, node = inner
    return line


def _child_of(node: yaml.Node, part: object) -> tuple[int, yaml.Node] | None:
    if isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
        return node.value[part].start_mark.line + 1, node.value[part]
    if isinstance(node, yaml.MappingNode):
        for key, value in cast("list[tuple[yaml.Node, yaml.Node]]", node.value):
            if key.value == str(part):
                return key.start_mark.line + 1, value
    return None
