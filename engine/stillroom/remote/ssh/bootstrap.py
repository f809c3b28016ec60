"""Puts our code on a machine, and makes an environment in which it runs.

The machine needs a POSIX shell only. The first Python of at least 3.11 is used, or one that uv
installs; all our files are in the machine's one folder.
"""

import gzip
import hashlib
import io
import json
import platform
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from packaging.requirements import Requirement

import stillroom
from stillroom.remote.agent.environment import code_files, code_hash_of
from stillroom.remote.channel import (
    Channel,
    RemoteScript,
    run_script,
    script_error,
    shell_words,
)
from stillroom.remote.host import FREE_DISK, OTHER_FOLDER, MachineError
from stillroom.remote.machine import Machine
from stillroom.remote.records import JobSpec
from stillroom.remote.ssh.probe import MIN_PYTHON, PATHS, Probe, RemotePython, probe
from stillroom.remote.ssh.requirements import (
    LocalPackages,
    PackagesToInstall,
    canonical,
    local_packages,
    own_requirements,
    packages_to_install,
)

_Answer = TypeVar("_Answer")

_NEWEST = ".".join(map(str, MIN_PYTHON))
_UNPACK = """
umask 077
folder={folder}
code="$folder/code/{code}"
mkdir -p "$folder/code" || exit 1
{forget}
find "$folder/code" -maxdepth 1 -name '.new-*' -mmin +60 -exec rm -rf {{}} + 2>/dev/null
new=$(mktemp -d "$folder/code/.new-XXXXXX") || exit 1
cat >"$new/archive" && [ "$(wc -c <"$new/archive")" -eq {size} ] &&
  gzip -dc "$new/archive" >"$new/files" && tar -xf "$new/files" -C "$new" &&
  rm "$new/archive" "$new/files" && {{ [ -d "$code" ] || mv "$new" "$code"; }}
result=$?
rm -rf "$new"
exit $result
"""
_GET_UV = """
{paths}
umask 077
folder={folder}
mkdir -p "$folder" && {python} -m pip install -q --disable-pip-version-check \
  --target "$folder/uv" uv >&2 </dev/null && echo "$folder/uv/bin/uv"
"""
_GET_PYTHON = """
umask 077
folder={folder}
mkdir -p "$folder" || exit 1
export UV_PYTHON_INSTALL_DIR="$folder/python" UV_PYTHON_PREFERENCE=only-managed
{uv} python install -q {version} >&2 </dev/null ||
  UV_SYSTEM_CERTS=1 UV_NATIVE_TLS=1 {uv} python install -q {version} >&2 </dev/null || exit 1
{uv} python find {version}
"""
_ENVIRONMENT = """
{paths}
umask 077
folder={folder}
case $folder in /*) ;; *) folder=$PWD/$folder ;; esac
echo "$folder"
exec {python} -E -P "$folder/code/{code}/stillroom/remote/agent/environment.py"
"""


def look(channel: Channel, machine: Machine) -> Probe:
    """Looks at a machine without changing anything on it."""
    minor = platform.python_version_tuple()[1]
    names = [f"python3.{minor}", "python3.13", "python3.12", "python3.11", "python3.14"]
    pythons = [machine.python] if machine.python else [*names, "python3", "python"]
    return probe(channel, machine.folder, code=code_hash(), pythons=list(dict.fromkeys(pythons)))


def prepare(
    channel: Channel,
    machine: Machine,
    spec: JobSpec | None,
    say: Callable[[str], None],
    local: LocalPackages | None = None,
) -> str:
    """Makes sure that the machine has our code and its packages; returns the interpreter to use.

    Without a `spec` any environment of this code will do, and a new one has none of the extras.
    `local` says what is installed on the user's machine, where this process does not run on it.
    """
    found = look(channel, machine)
    if spec is None and found.ready is not None:
        return found.ready
    if (blocked := found.facts.blocked_folder) is not None:
        problem = f"{machine.folder} cannot be made, as {blocked} must not be written to"
        raise MachineError(f"{machine.name}: {problem}", OTHER_FOLDER)
    tools = _base_python(channel, machine, found, say)
    local = local or local_packages()
    extras, packages = (spec.extras, spec.packages) if spec else ([], [])
    wanted = own_requirements(local, extras, packages), local.versions
    if not found.facts.has_same_code:
        say(f"sending stillroom's code to {machine.name}")
        _send_code(channel, machine)
    if (ready := _environment(channel, machine, tools, wanted, say)) is not None:
        return ready
    say(f"sending stillroom's code to {machine.name} again: files of it have changed on it")
    _send_code(channel, machine, anew=True)
    if (ready := _environment(channel, machine, tools, wanted, say)) is not None:
        return ready
    raise MachineError(
        f"{machine.name} changes the files of stillroom's code in {machine.folder}",
        "find out what deletes or edits files in that folder, or " + OTHER_FOLDER,
    )


def _base_python(
    channel: Channel, machine: Machine, found: Probe, say: Callable[[str], None]
) -> tuple[str, str | None]:
    """Returns the interpreter under the environment, and uv if that is to install the packages."""
    if machine.python is not None:
        return _given_python(machine, found), None
    if found.python is not None and (found.python.has_pip or found.uv is not None):
        return found.python.path, found.uv
    uv = found.uv
    if uv is None and found.pythons:
        say(f"getting uv on {machine.name}, which installs a newer Python")
        uv = _uv_by_pip(channel, machine, found.pythons)
    if uv is None:
        raise MachineError(_no_python(machine, found.pythons), _GET_ONE)
    say(f"getting Python on {machine.name}")
    wanted = ".".join(platform.python_version_tuple()[:2])
    folder = shell_words([machine.folder])
    script = _GET_PYTHON.format(folder=folder, uv=shell_words([uv]), version=wanted)
    return _only_line(channel, script), uv


_GET_ONE = (
    f"install Python {_NEWEST} or newer on it (Debian/Ubuntu: apt-get install python3 "
    "python3-venv), or uv, which installs one (https://docs.astral.sh/uv), or name an interpreter "
    "with `python:` in machines.yml"
)


def _given_python(machine: Machine, found: Probe) -> str:
    python = next(iter(found.pythons), None)
    if python is None:
        raise MachineError(
            f"{machine.name}: the interpreter {machine.python!r} of machines.yml does not run",
            "give `python:` the path of one that does, or leave it out",
        )
    if not python.is_new_enough:
        version = ".".join(map(str, python.version))
        raise MachineError(
            f"{machine.name}: {machine.python!r} is Python {version}, and stillroom needs "
            f"{_NEWEST} or newer",
            "give `python:` a newer one, or leave it out",
        )
    return python.path


def _no_python(machine: Machine, pythons: Sequence[RemotePython]) -> str:
    if not pythons:
        return f"{machine.name} has no Python"
    versions = ", ".join(".".join(map(str, python.version)) for python in pythons)
    if any(python.is_new_enough for python in pythons):
        return f"{machine.name} has Python ({versions}), but neither pip nor uv"
    return f"{machine.name} has only Python {versions}, and uv could not be installed"


def _uv_by_pip(channel: Channel, machine: Machine, pythons: Sequence[RemotePython]) -> str | None:
    """Returns uv as an old Python's pip installs it; None if no Python of the machine has a pip."""
    for python in pythons:
        script = _GET_UV.format(
            paths=PATHS, folder=shell_words([machine.folder]), python=shell_words([python.path])
        )
        try:
            return _only_line(channel, script)
        except MachineError:
            continue
    return None


def _only_line(channel: Channel, script: str) -> str:
    """Returns the last line that a script prints which is not empty."""
    with run_script(channel, script) as running:
        running.write(b"")
        return next(reversed([line for line in running.lines() if line]), "")


def _send_code(channel: Channel, machine: Machine, *, anew: bool = False) -> None:
    archive = code_archive()
    script = _UNPACK.format(
        folder=shell_words([machine.folder]),
        code=code_hash(),
        size=len(archive),
        forget='rm -rf "$code"' if anew else "",
    )
    with run_script(channel, script) as running:
        running.write(archive)
        for _ in running.lines():
            pass


def _environment(
    channel: Channel,
    machine: Machine,
    tools: tuple[str, str | None],
    wanted: tuple[Sequence[Requirement], Mapping[str, str]],
    say: Callable[[str], None],
) -> str | None:
    """Has the machine make the environment, unless it has it, and returns its interpreter.

    None if the code on the machine is not what was sent.
    """
    python, uv = tools
    script = _ENVIRONMENT.format(
        paths=PATHS,
        folder=shell_words([machine.folder]),
        python=shell_words([python]),
        code=code_hash(),
    )
    with run_script(channel, script) as running:
        lines = running.lines()
        root = next(lines, "")
        uses_packages = machine.python is not None
        _ask(running, {"root": root, "code": code_hash(), "uses_packages": uses_packages})
        answer = _read_answer(machine, next(lines, ""), _Installed)
        if answer.code != code_hash():
            return None
        try:
            missing = packages_to_install(
                wanted[0],
                local=wanted[1],
                remote=canonical(answer.installed),
                marks=answer.marks,
            )
        except ValueError as error:  # of a version that is none
            raise _unreadable(machine, str(answer.marks)) from error
        _ask(running, _install_request(python, uv, missing, answer.marks), is_last=True)
        return _outcome(machine, lines, say)


class _Installed(msgspec.Struct, frozen=True):
    """What the machine has: the first answer of `environment.py`."""

    code: str
    installed: list[tuple[str, str]]
    marks: dict[str, str]


class _Progress(msgspec.Struct, frozen=True):
    """A later answer: how far the installation is, or how it ended."""

    say: str | None = None
    failed: str | None = None
    python: str | None = None


def _read_answer(machine: Machine, line: str, kind: type[_Answer]) -> _Answer:
    try:
        return msgspec.json.decode(line, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise _unreadable(machine, line) from error


def _unreadable(machine: Machine, line: str) -> MachineError:
    return MachineError(
        f"{machine.name} answered with {line[:200]!r} where it should describe its packages",
        "look at the machine with check_setup; something on it prints into the connection",
    )


def _outcome(machine: Machine, lines: Iterator[str], say: Callable[[str], None]) -> str:
    """Returns the interpreter that the machine names last; passes on what it says before."""
    for line in filter(None, lines):
        answer = _read_answer(machine, line, _Progress)
        if answer.failed is not None:
            raise _not_made(machine, answer.failed)
        if answer.python is not None:
            return answer.python
        say("" if answer.say is None else f"{machine.name}: {answer.say}")
    raise MachineError(
        f"creating the Python environment on {machine.name} failed without a message", _GET_ONE
    )


def _install_request(
    python: str, uv: str | None, missing: PackagesToInstall, marks: Mapping[str, str]
) -> dict[str, Any]:
    base = [python, marks.get("python_full_version"), missing.requirements, missing.constraints]
    packages_key = _key(base)
    return {
        "code": code_hash(),
        "key": _key([packages_key, code_hash()]),
        "packages_key": packages_key,
        "requirements": missing.requirements,
        "constraints": missing.constraints,
        "uv": uv,
    }


def _key(parts: Sequence[object]) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def _ask(running: RemoteScript, value: Mapping[str, Any], *, is_last: bool = False) -> None:
    running.write(json.dumps(value).encode() + b"\n", is_last=is_last)


def _not_made(machine: Machine, failure: str) -> MachineError:
    known = script_error(machine.name, failure)
    if known.fix == FREE_DISK:
        return known
    return MachineError(
        f"the packages could not be installed on {machine.name}: {failure}",
        "fix the cause (a package index that it cannot reach, a version without a wheel "
        "for its Python), or name an interpreter that has them with `python:` in machines.yml",
    )


@cache
def code_hash() -> str:
    """Returns a name for the code of this process's own package, as its files are."""
    return code_hash_of(_files())


@cache
def code_archive() -> bytes:
    """Returns the package's files as a tar.gz; the same files give the same bytes."""
    archive = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=archive, mode="wb", mtime=0, compresslevel=4) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.USTAR_FORMAT) as files,
    ):
        for name, data in _files():
            entry = tarfile.TarInfo(f"stillroom/{name}")
            entry.size, entry.mode = len(data), 0o600
            files.addfile(entry, io.BytesIO(data))
    return archive.getvalue()


@cache
def _files() -> list[tuple[str, bytes]]:
    """Returns the files as they were at the first call, so that hash and archive agree."""
    return list(code_files(Path(stillroom.__file__).parent))
