"""Reads machines.yml, which lists the machines on which runs can be executed.

The project's file, in the workspace, takes precedence over the user's own, next to keys.yml. Files
in the workspace are not trusted, since an agent or a third party may have written them: they may
not set `ssh` options, which can run local programs, and their machines receive no keys by default.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, cast, get_args

import msgspec
import yaml
from pydantic import Field, ValidationError, field_validator, model_validator

from stillroom.errors import ConfigError, InputError
from stillroom.remote.machine import Kind, Machine
from stillroom.secrecy.keys import check_host, is_loopback, keys_file
from stillroom.secrecy.readable import check_readable, parse_error_message
from stillroom.settings import Workspace
from stillroom.validation import StrictModel, describe_errors, did_you_mean
from stillroom.yaml_text import read_yaml

MACHINES_FILE = "machines.yml"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_LOCAL_NAMES = frozenset({"local", "localhost", "here", "this"})
_RESERVED_NAMES = frozenset({"start", "first_difference", "critic"})
"""Values of an earlier `where` option of generate_rollouts, which older requests still use."""
_EXAMPLE = "gpu-box: {ssh: me@host, price_per_hour: 2.40}"
_SSH_PORT = 22
_YAML_ERRORS = (OSError, yaml.YAMLError, ValueError, RecursionError)

_Line = Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f]+$", max_length=1000)]


class _Ssh(StrictModel):
    host: _Line
    port: Annotated[int, Field(ge=1, le=65535)] | None = None
    options: tuple[_Line, ...] = ()

    @field_validator("host")
    @classmethod
    def _check_host(cls, host: str) -> str:
        if host.startswith("-"):
            raise ValueError("a host cannot begin with `-`: ssh would parse it as an option")
        if "://" in host or any(map(str.isspace, host)):
            raise ValueError("must be a host as ssh accepts it: an alias, or user@host")
        if re.fullmatch(r"[^:]+:\d+", host):
            name, _, port = host.partition(":")
            raise ValueError(f"give the port separately: {{host: {name}, port: {port}}}")
        if not host.rpartition("@")[2]:
            raise ValueError("the host name is missing")
        return host

    @model_validator(mode="after")
    def _check_not_local(self) -> "_Ssh":
        # A forwarded port leads to another host: a container, a virtual machine, a tunnel's end.
        if is_loopback(self.host.rpartition("@")[2].lower()) and self.port in (None, _SSH_PORT):
            raise ValueError(
                "host is this machine: leave `where` out to run locally "
                "(for a forwarded port, set `port`)"
            )
        return self


class _SkyPilot(StrictModel):
    autostop: Annotated[int, Field(ge=1)] = 10
    resources: Annotated[dict[str, Any], Field(min_length=1)]


class _HfJobs(StrictModel):
    flavor: _Line
    timeout: Annotated[str, Field(pattern=r"^\d+(\.\d+)?[smhd]?$")] = "4h"
    namespace: _Line | None = None
    image: _Line | None = None


class _Ray(StrictModel):
    address: _Line
    workers: Annotated[int, Field(ge=1, le=999)] | None = None


_SHORT_FORMS = {"ssh": "host", "hf_jobs": "flavor", "ray": "address"}
"""The key that a section's value is expanded to if the value is a plain string."""


class MachineEntry(StrictModel):
    """One machine of machines.yml, with short forms expanded."""

    ssh: _Ssh | None = None
    skypilot: _SkyPilot | None = None
    hf_jobs: _HfJobs | None = None
    ray: _Ray | None = None
    price_per_hour: Annotated[float, Field(ge=0)] | None = None
    budget_usd: Annotated[float, Field(gt=0)] | None = None
    folder: _Line = "~/.stillroom-remote"
    python: _Line | None = None
    max_hours: Annotated[float, Field(gt=0, le=24 * 365)] = 24.0
    keep_remote: bool = False

    def machine(self, name: str, file: str) -> Machine:
        """Returns the entry as a Machine; `file` is the machines.yml that has the entry."""
        values = {"name": name, "file": file, **self.model_dump(exclude_none=True)}
        return msgspec.convert(values, Machine)

    @field_validator("folder")
    @classmethod
    def _check_folder(cls, folder: str) -> str:
        parts = folder.rstrip("/").split("/")
        if parts[0] not in ("~", "") or len(parts) == 1 or ".." in parts:
            raise ValueError("must be an absolute path or begin with ~/, e.g. /data/runs")
        return folder

    @field_validator("python")
    @classmethod
    def _check_python(cls, python: str | None) -> str | None:
        if python is not None and python.startswith("-"):
            raise ValueError("must be the path of an interpreter on that machine")
        return python

    @model_validator(mode="before")
    @classmethod
    def _expand_short_forms(cls, value: Any) -> Any:
        """Expands e.g. `ssh: HOST` to `ssh: {host: HOST}`."""
        if not isinstance(value, dict):
            raise ValueError(f"must be a mapping, e.g. {_EXAMPLE}")
        entry = dict(cast("dict[str, Any]", value))
        kinds = get_args(Kind)
        if sum(entry.get(kind) is not None for kind in kinds) != 1:
            hint = "; write `host` and `user` as ssh: user@host" if "host" in entry else ""
            raise ValueError(f"needs exactly one of {', '.join(kinds)}{hint}")
        for kind, key in _SHORT_FORMS.items():
            if isinstance(entry.get(kind), str):
                entry[kind] = {key: entry[kind]}
        sky = entry.get("skypilot")
        if isinstance(sky, dict):
            resources = dict(cast("dict[str, Any]", sky))
            autostop = {"autostop": resources.pop("autostop")} if "autostop" in resources else {}
            entry["skypilot"] = {**autostop, "resources": resources}
        return entry

    @model_validator(mode="after")
    def _check_budget(self) -> "MachineEntry":
        if self.budget_usd is not None and self.price_per_hour is None and self.ssh is not None:
            raise ValueError("budget_usd limits the machine's cost, so it needs price_per_hour")
        if self.budget_usd is not None and self.ray is not None:
            raise ValueError("budget_usd is not supported for a Ray cluster: its price is unknown")
        return self

    @model_validator(mode="after")
    def _check_keep_remote(self) -> "MachineEntry":
        if self.keep_remote and self.skypilot is not None:
            raise ValueError(
                "keep_remote is not supported with skypilot: a cluster is deleted with its disk "
                "after its last run"
            )
        return self


def users_machines_file() -> Path:
    """Returns the path of the user's own machines.yml, next to keys.yml."""
    return keys_file().with_name(MACHINES_FILE)


def find_machine(workspace: Workspace, name: str) -> Machine:
    """Returns the machine with this name.

    Raises InputError if no machines.yml has it, and ConfigError if a machines.yml is malformed.
    """
    machines = {machine.name: machine for machine in all_machines(workspace)}
    if name in machines:
        return machines[name]
    if name.lower() in _LOCAL_NAMES:
        raise InputError(
            f"where: {name!r} is not a machine in machines.yml", "leave `where` out to run locally"
        )
    known = ", ".join(machines) or "none yet"
    entry = (
        _EXAMPLE.replace("gpu-box", name).replace("me@host", name)
        if _is_valid_name(name)
        else _EXAMPLE
    )
    raise InputError(
        f"where: there is no machine {name[:80]!r}{did_you_mean(name, list(machines))} "
        f"(known: {known})",
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
        for machine in _read_machines(path, is_trusted=is_user_owned(workspace, path)):
            machines.setdefault(machine.name, machine)
    return list(machines.values())


def is_user_owned(workspace: Workspace, path: Path) -> bool:
    """Returns whether a machines.yml is the user's own file, and is outside of the workspace."""
    is_users_file = path.resolve() == users_machines_file().resolve()
    return is_users_file and not path.resolve().is_relative_to(workspace.root)


def check_keys_allowed(workspace: Workspace, machine: Machine, key_names: Sequence[str]) -> None:
    """Raises InputError if one of these secrets may not be sent to a machine.

    Machines of the user's own machines.yml may get all secrets, other machines only those that
    keys.yml allows for their hosts.
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
                provider_variables=(),
            )
        except InputError as error:
            raise InputError(
                f"the run needs {name}, but {machine.name!r} is defined in the workspace "
                f"({machine.file}), whose machines are not trusted with keys",
                f"ask the user to move the entry out of the workspace to {users_machines_file()}, "
                f"which trusts the machine with all keys. For this key only: {error.fix}",
            ) from error


def _read_machines(path: Path, *, is_trusted: bool) -> list[Machine]:
    """Returns the machines of a file; none if it does not exist. Raises ConfigError."""
    if not path.is_file():
        return []
    check_readable(path)
    try:
        text = path.read_bytes()
        raw: Any = read_yaml(text)
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except _YAML_ERRORS as error:
        raise ConfigError(
            parse_error_message(path, error), f"correct the syntax; example entry: {_EXAMPLE}"
        ) from error
    if raw is None or root is None:
        return []
    _check_duplicate_keys(path, root)
    if not isinstance(raw, dict):
        raise ConfigError(
            f"{path}:1: must be a mapping of machine names, not {type(raw).__name__}",
            f"write e.g. {_EXAMPLE}",
        )
    entries = cast("dict[object, object]", raw).items()
    return [_parse_entry(path, root, name, value, is_trusted=is_trusted) for name, value in entries]


def _parse_entry(
    path: Path, root: yaml.Node, name: object, value: object, *, is_trusted: bool
) -> Machine:
    """Returns the machine of an entry of machines.yml. Raises ConfigError."""
    fix = f"correct the file; example entry: {_EXAMPLE}"
    position = f"{path}:{_line_of(root, (name,))}: "
    if not isinstance(name, str) or not _is_valid_name(name):
        quoted = repr(name)[:80]
        raise ConfigError(
            f"{position}{quoted} is not a valid machine name",
            "use up to 64 letters, digits, `.`, `_` and `-`, beginning with a letter or digit, "
            "and no reserved word such as local or start",
        )
    try:
        entry = MachineEntry.model_validate(value)
    except ValidationError as error:
        line = _line_of(root, (name, *error.errors()[0]["loc"]))
        raise ConfigError(
            f"{path}:{line}: {name}: {describe_errors(error, MachineEntry)}", fix
        ) from error
    if entry.ssh is not None and entry.ssh.options and not is_trusted:
        raise ConfigError(
            f"{path}:{_line_of(root, (name, 'ssh', 'options'))}: {name}: ssh.options can make ssh "
            "run any local program, so they are not allowed in the workspace's machines.yml",
            "ask the user to set them in ~/.ssh/config, or to move the entry to "
            f"{users_machines_file()}",
        )
    return entry.machine(name, str(path))


def _is_valid_name(name: str) -> bool:
    return _NAME.fullmatch(name) is not None and name.lower() not in _LOCAL_NAMES | _RESERVED_NAMES


def _check_duplicate_keys(path: Path, node: yaml.Node) -> None:
    """Raises ConfigError for a duplicate key, whose first value YAML would silently drop."""
    if not isinstance(node, yaml.MappingNode):
        return
    lines = dict[str, int]()
    for key, value in cast("list[tuple[yaml.Node, yaml.Node]]", node.value):
        line = key.start_mark.line + 1
        # A list or a mapping as a key has no text; `read_yaml` rejects it if its value is read.
        if isinstance(key, yaml.ScalarNode) and lines.setdefault(key.value, line) != line:
            raise ConfigError(
                f"{path}:{line}: duplicate key {key.value!r}, already on line {lines[key.value]}",
                "remove one of them",
            )
        _check_duplicate_keys(path, value)


def _line_of(root: yaml.Node, key_path: Sequence[object]) -> int:
    """Returns the line of the value at `key_path`, or of its innermost parent that exists."""
    node, line = root, root.start_mark.line + 1
    for part in key_path:
        inner = _child_of(node, part)
        if inner is None:
            continue  # a key that exists only after short forms are expanded
        line, node = inner
    return line


def _child_of(node: yaml.Node, part: object) -> tuple[int, yaml.Node] | None:
    """Returns the line and the node at a mapping's key or a list's index; None if it is absent."""
    if isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
        return node.value[part].start_mark.line + 1, node.value[part]
    if isinstance(node, yaml.MappingNode):
        for key, value in cast("list[tuple[yaml.Node, yaml.Node]]", node.value):
            if key.value == str(part):
                return key.start_mark.line + 1, value
    return None
