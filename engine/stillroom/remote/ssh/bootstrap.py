"""Installs Stillroom's code on a machine, with a Python environment in which it runs.

The machine only needs a POSIX shell. The first Python of at least 3.11 is used, or one that uv
installs; all files are below the machine's `folder`.
"""

import gzip
import hashlib
import io
import json
import platform
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import msgspec

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
    canonical_versions,
    local_packages,
    packages_to_install,
    run_requirements,
)

_Reply = TypeVar("_Reply")

_MIN_VERSION = ".".join(map(str, MIN_PYTHON))
_UNPACK = """
umask 077
folder={folder}
code="$folder/code/{code}"
mkdir -p "$folder/code" || exit 1
{delete_code}
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


def run_probe(channel: Channel, machine: Machine) -> Probe:
    """Probes a machine without changing anything on it."""
    minor = platform.python_version_tuple()[1]
    names = [f"python3.{minor}", "python3.13", "python3.12", "python3.11", "python3.14"]
    pythons = [machine.python] if machine.python else [*names, "python3", "python"]
    return probe(channel, machine.folder, code=code_hash(), pythons=list(dict.fromkeys(pythons)))


def prepare(
    channel: Channel,
    machine: Machine,
    spec: JobSpec | None,
    report: Callable[[str], None],
    local: LocalPackages | None = None,
) -> str:
    """Installs Stillroom's code and its packages if needed; returns the interpreter to use.

    Without a `spec`, any environment with this code is used, and a new one gets no extras. `local`
    are the packages installed on the user's machine, if this process runs elsewhere.
    """
    probed = run_probe(channel, machine)
    if spec is None and probed.ready_python is not None:
        return probed.ready_python
    if (blocked := probed.facts.blocked_folder) is not None:
        problem = f"{machine.folder} cannot be created: {blocked} is not writable"
        raise MachineError(f"{machine.name}: {problem}", OTHER_FOLDER)
    python, uv = _base_python(channel, machine, probed, report)
    local = local or local_packages()
    extras, packages = (spec.extras, spec.packages) if spec else ([], [])
    needed = _RunPackages(local, extras, packages)
    if not probed.facts.has_same_code:
        report("upload code")
        _send_code(channel, machine)
    if (ready := _make_environment(channel, machine, (python, uv), needed, report)) is not None:
        return ready
    report("upload code again")
    _send_code(channel, machine, replace=True)
    if (ready := _make_environment(channel, machine, (python, uv), needed, report)) is not None:
        return ready
    raise MachineError(
        f"the files of stillroom's code in {machine.folder} keep changing on {machine.name}",
        "find out which process deletes or edits files in that folder, or " + OTHER_FOLDER,
    )


@dataclass(frozen=True, slots=True)
class _RunPackages:
    """What a run needs: extras and additional packages, at the versions installed locally."""

    local: LocalPackages
    extras: Sequence[str]
    packages: Sequence[str]


def _base_python(
    channel: Channel, machine: Machine, probed: Probe, report: Callable[[str], None]
) -> tuple[str, str | None]:
    """Returns the interpreter to create environments with, and the path of uv; None to use pip."""
    if machine.python is not None:
        return _configured_python(machine, probed), None
    if probed.python is not None and (probed.python.has_pip or probed.uv is not None):
        return probed.python.path, probed.uv
    uv = probed.uv
    if uv is None and probed.pythons:
        report("install uv")
        uv = _install_uv(channel, machine, probed.pythons)
    if uv is None:
        raise MachineError(_no_python_problem(machine, probed.pythons), _INSTALL_PYTHON_FIX)
    report("install Python")
    version = ".".join(platform.python_version_tuple()[:2])
    folder = shell_words([machine.folder])
    script = _GET_PYTHON.format(folder=folder, uv=shell_words([uv]), version=version)
    return _last_line(channel, script), uv


_INSTALL_PYTHON_FIX = (
    f"install Python {_MIN_VERSION} or newer on the machine (Debian/Ubuntu: apt-get install "
    "python3 python3-venv), or uv, which installs Python (https://docs.astral.sh/uv), or set "
    "`python:` in machines.yml to an interpreter"
)


def _configured_python(machine: Machine, probed: Probe) -> str:
    """Returns the interpreter that machines.yml names. Raises MachineError if it is unusable."""
    python = next(iter(probed.pythons), None)
    if python is None:
        raise MachineError(
            f"{machine.name}: the interpreter {machine.python!r} in machines.yml does not run",
            "set `python:` to the path of a working interpreter, or remove it",
        )
    if not python.is_new_enough:
        version = ".".join(map(str, python.version))
        raise MachineError(
            f"{machine.name}: {machine.python!r} is Python {version}, but stillroom needs "
            f"{_MIN_VERSION} or newer",
            "set `python:` to a newer interpreter, or remove it",
        )
    return python.path


def _no_python_problem(machine: Machine, pythons: Sequence[RemotePython]) -> str:
    """Returns why none of the machine's interpreters can be used."""
    if not pythons:
        return f"{machine.name} has no Python"
    versions = ", ".join(".".join(map(str, python.version)) for python in pythons)
    if any(python.is_new_enough for python in pythons):
        return f"{machine.name} has Python ({versions}), but neither pip nor uv"
    return f"{machine.name} has only Python {versions}, and uv could not be installed"


def _install_uv(channel: Channel, machine: Machine, pythons: Sequence[RemotePython]) -> str | None:
    """Installs uv with the pip of an old Python; returns its path, or None if no Python has pip."""
    for python in pythons:
        script = _GET_UV.format(
            paths=PATHS, folder=shell_words([machine.folder]), python=shell_words([python.path])
        )
        try:
            return _last_line(channel, script)
        except MachineError:
            continue
    return None


def _last_line(channel: Channel, script: str) -> str:
    """Runs a script and returns the last non-empty line that it prints."""
    with run_script(channel, script) as script_run:
        script_run.write(b"")
        return next(reversed([line for line in script_run.lines() if line]), "")


def _send_code(channel: Channel, machine: Machine, *, replace: bool = False) -> None:
    """Sends the code and unpacks it; with `replace`, deletes the machine's copy first."""
    archive = code_archive()
    script = _UNPACK.format(
        folder=shell_words([machine.folder]),
        code=code_hash(),
        size=len(archive),
        delete_code='rm -rf "$code"' if replace else "",
    )
    with run_script(channel, script) as script_run:
        script_run.write(archive)
        for _ in script_run.lines():
            pass


def _make_environment(
    channel: Channel,
    machine: Machine,
    base: tuple[str, str | None],
    needed: _RunPackages,
    report: Callable[[str], None],
) -> str | None:
    """Creates the environment on the machine unless it exists; returns its interpreter.

    Returns None if the code on the machine differs from the code that was sent.
    base: as `_base_python` returns.
    """
    python, uv = base
    script = _ENVIRONMENT.format(
        paths=PATHS,
        folder=shell_words([machine.folder]),
        python=shell_words([python]),
        code=code_hash(),
    )
    with run_script(channel, script) as script_run:
        lines = script_run.lines()
        root = next(lines, "")
        uses_packages = machine.python is not None
        _send_request(
            script_run, {"root": root, "code": code_hash(), "uses_packages": uses_packages}
        )
        reply = _read_reply(machine, next(lines, ""), _Installed)
        if reply.code != code_hash():
            return None
        try:
            requirements = run_requirements(
                needed.local, needed.extras, needed.packages, python_version=reply.python_version
            )
        except ValueError as error:  # An invalid version.
            raise _invalid_reply_error(machine, reply.python_version) from error
        missing = packages_to_install(
            requirements, local=needed.local.versions, remote=canonical_versions(reply.installed)
        )
        request = _install_request(python, uv, missing, reply.python_version)
        _send_request(script_run, request, is_last=True)
        return _wait_for_python(machine, lines, report)


class _Installed(msgspec.Struct, frozen=True):
    """The first reply of `environment.py`: the machine's code, packages and Python version."""

    code: str
    installed: list[tuple[str, str]]
    python_version: str


class _Progress(msgspec.Struct, frozen=True):
    """A later reply of `environment.py`: the installation's progress or result."""

    say: str | None = None
    failed: str | None = None
    python: str | None = None


def _read_reply(machine: Machine, line: str, kind: type[_Reply]) -> _Reply:
    try:
        return msgspec.json.decode(line, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise _invalid_reply_error(machine, line) from error


def _invalid_reply_error(machine: Machine, line: str) -> MachineError:
    return MachineError(
        f"{machine.name} sent {line[:200]!r} instead of a reply of stillroom's installer",
        "find out which program or shell start file prints this on the machine, and silence it",
    )


def _wait_for_python(machine: Machine, lines: Iterator[str], report: Callable[[str], None]) -> str:
    """Reports the installation's progress until it ends; returns the environment's interpreter."""
    for line in filter(None, lines):
        reply = _read_reply(machine, line, _Progress)
        if reply.failed is not None:
            raise _install_error(machine, reply.failed)
        if reply.python is not None:
            return reply.python
        report("" if reply.say is None else f"{machine.name}: {reply.say}")
    raise MachineError(
        f"creating the Python environment on {machine.name} failed without a message",
        "check the machine's disk and memory with check_setup, then try again",
    )


def _install_request(
    python: str, uv: str | None, missing: PackagesToInstall, python_version: str
) -> dict[str, Any]:
    """Returns the second request to `environment.py`: what to install."""
    base = [python, python_version, missing.requirements, missing.constraints]
    packages_key = _short_hash(base)
    return {
        "code": code_hash(),
        "key": _short_hash([packages_key, code_hash()]),
        "packages_key": packages_key,
        "requirements": missing.requirements,
        "constraints": missing.constraints,
        "uv": uv,
    }


def _short_hash(parts: Sequence[object]) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def _send_request(
    script_run: RemoteScript, value: Mapping[str, Any], *, is_last: bool = False
) -> None:
    script_run.write(json.dumps(value).encode() + b"\n", is_last=is_last)


def _install_error(machine: Machine, failure: str) -> MachineError:
    """Returns the error for packages that could not be installed."""
    error = script_error(machine.name, failure)
    if error.fix == FREE_DISK:
        return error
    return MachineError(
        f"the packages could not be installed on {machine.name}: {failure}",
        "fix the cause (such as a package index that the machine cannot reach, or a version "
        "without a wheel for its Python), or set `python:` in machines.yml to an interpreter that "
        "has the packages",
    )


@cache
def code_hash() -> str:
    """Returns a hash of the files of the installed `stillroom` package."""
    return code_hash_of(_package_files())


@cache
def code_archive() -> bytes:
    """Returns the package's files as a tar.gz, which is the same for the same files."""
    archive = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=archive, mode="wb", mtime=0, compresslevel=4) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.USTAR_FORMAT) as files,
    ):
        for name, data in _package_files():
            entry = tarfile.TarInfo(f"stillroom/{name}")
            entry.size, entry.mode = len(data), 0o600
            files.addfile(entry, io.BytesIO(data))
    return archive.getvalue()


@cache
def _package_files() -> list[tuple[str, bytes]]:
    """Returns the package's files as of the first call, so that hash and archive match."""
    return list(code_files(Path(stillroom.__file__).parent))
