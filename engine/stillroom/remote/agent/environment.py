"""Creates the environment in which Stillroom runs on a machine: `python -E -P environment.py`.

It uses only the standard library, because it runs before any package is installed. The client
writes two lines of JSON and reads replies as lines of JSON:

1. `_ProbeRequest`: which code to look for, and whether to use this interpreter's own packages.
   Reply: `{"code": …, "installed": …, "python_version": …}`.
2. `_InstallRequest`: what to install. Replies: `{"say": …}` as progress, then
   `{"python": …}` or `{"failed": …}`.

There are two layers, so that new code needs no new installation: `packages/KEY` has the installed
packages, and `venvs/KEY` refers to them, to an interpreter's own packages and to the code. A run
that needs fewer packages than an earlier one uses that one's. The file `whole`, which is written
last, marks an environment as complete; without it, the next installation deletes it. Renaming it
into place is not possible, since its scripts contain its path.
"""

import fcntl
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import site
import subprocess
import sys
import sysconfig
import time
import venv
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, TypedDict, cast

_REPORT_EVERY_S = 2.0
_QUICK_TIMEOUT_S = 300.0
_LOCK_POLL_S = 0.2
_LOG_LINES = 30
_UNUSED_S = 60 * 86400
# Conflicts between an image's packages are irrelevant, and slow to detect.
_PIP_OPTIONS = ("--no-warn-conflicts", "--progress-bar", "off")
_COMPLETE_FILE = "whole"
_SET_FILE = "set.json"
"""The file in `packages/KEY` that lists the packages installed there, as a `_PackageSet`."""
_STEP = re.compile(r" *(Looking|Collecting|Downloading|Using cached|Building|Installing|Resolved) ")


class _ProbeRequest(TypedDict):
    root: str
    code: str
    """The hash of the code, which names its folder in `code/`."""
    uses_packages: bool
    """Whether this interpreter's own packages are used."""


class _InstallRequest(TypedDict):
    code: str
    key: str
    """The hash of the whole environment."""
    packages_key: str
    """The hash of the installed packages."""
    requirements: list[str]
    constraints: list[str]
    uv: str | None
    """The path of uv; None to install with pip."""


class _PackageSet(TypedDict):
    python: list[str]
    """The interpreter, its version, and the lines for its own packages."""
    requirements: list[str]
    constraints: list[str]


class _InstallError(Exception):
    """The environment could not be created; the message is the reason."""


def main() -> int:
    """Handles both requests. The installation continues even if the client disconnects."""
    if sys.argv[1:]:
        root, *sites = sys.argv[1:]
        _Installation(Path(root), json.loads(sys.stdin.readline()), sites).run()
        return 0
    probe: _ProbeRequest = json.loads(sys.stdin.readline())
    root = probe["root"]
    sites = _own_site_folders() if probe["uses_packages"] else []
    installed = _installed_packages() if sites else []
    code = code_hash_of(code_files(Path(root, "code", probe["code"], "stillroom")))
    version = platform.python_version()
    _reply({"code": code, "installed": installed, "python_version": version})
    line = sys.stdin.readline()
    if line:  # Without a second request, the code is uploaded again.
        _install_in_child([root, *sites], line)
    return 0


def _install_in_child(arguments: list[str], request: str) -> None:
    """Installs in a separate process, and forwards its replies.

    If the client disconnects, this process exits, but the installation continues, so that the next
    connection finds it complete.
    """
    worker = subprocess.Popen(
        [sys.executable, "-E", "-P", __file__, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
        env=_installer_environment(),
        start_new_session=True,
    )
    with cast("IO[str]", worker.stdin) as stdin:
        stdin.write(request)
    output = ""
    for line in cast("IO[str]", worker.stdout):
        if line.startswith("{"):
            try:
                sys.stdout.write(line)
                sys.stdout.flush()
            except OSError:
                os._exit(1)
        else:
            output = (output + line)[-1500:]
    code = worker.wait()  # no limit: it has closed its output and exits
    if code:
        reason = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        _reply({"failed": output or f"the installer process exited early ({reason})"})


def code_hash_of(files: Iterable[tuple[str, bytes]]) -> str:
    """Returns a hash of a package's files, given as ordered pairs of name and content."""
    digest = hashlib.sha256()
    for name, data in files:
        digest.update(f"{name}\0{len(data)}\0".encode() + data)
    return digest.hexdigest()[:24]


def code_files(package: Path) -> Iterator[tuple[str, bytes]]:
    """Yields the names and contents of a package's files in order, without bytecode files."""
    for path in sorted(package.rglob("*")):
        if "__pycache__" not in path.parts and path.suffix != ".pyc" and path.is_file():
            yield path.relative_to(package).as_posix(), path.read_bytes()


class _Installation:
    """Creates one environment."""

    def __init__(self, root: Path, request: _InstallRequest, sites: list[str]) -> None:
        self._root, self._request = root, request
        self._sites = [_pth_line(site) for site in sites]
        self._venv = root / "venvs" / request["key"]
        self._own_packages = self._packages = root / "packages" / request["packages_key"]
        self._log = self._packages.with_name(f"{self._packages.name}.log")
        self._set = _PackageSet(
            python=[sys.executable, platform.python_version(), *self._sites],
            requirements=request["requirements"],
            constraints=request["constraints"],
        )

    def run(self) -> None:
        """Creates the environment, and replies with its interpreter or with the error."""
        try:
            python = self._ready_python()
        except (_InstallError, OSError, subprocess.SubprocessError) as error:
            log = f" (full log: {self._log} on the machine)" if self._log.exists() else ""
            _reply({"failed": f"{error}{log}"})
        else:
            _reply({"python": str(python)})

    def _ready_python(self) -> Path:
        """Creates the environment if needed, checks that it works, and returns its interpreter."""
        python, problem = self._venv / "bin" / "python", None
        # Some machines delete old files, so that an import fails. Then the venv is created again;
        # if that does not help, the packages as well, which other runs may be using.
        for num_discarded in range(3):
            for folder in [self._venv, self._packages][:num_discarded]:
                (folder / _COMPLETE_FILE).unlink(missing_ok=True)
            self._make_packages_and_venv()
            problem = _import_error(python)
            if problem is None:
                break
        else:
            raise _InstallError(f"stillroom cannot be imported in {self._venv}: {problem}")
        # So that `_delete_unused` keeps them. The venv, if an earlier run made it, may refer to
        # other packages than this run would choose.
        for folder in (self._venv, *self._suitable_packages()):
            with suppress(FileNotFoundError):
                os.utime(folder / _COMPLETE_FILE)
        python_file = self._root / "code" / f"{self._request['code']}.python"
        temporary = python_file.with_name(f".{python_file.name}.{os.getpid()}")
        temporary.write_text(f"{python}\n", encoding="utf-8")
        temporary.replace(python_file)
        _delete_unused(self._root)
        return python

    def _make_packages_and_venv(self) -> None:
        """Installs required packages, if any, and creates the venv; skips what already exists."""
        paths = [str(self._root / "code" / self._request["code"])]
        if self._request["requirements"]:
            self._packages = next(iter(self._suitable_packages()), self._own_packages)
            # Others are never installed here: their runs need packages that this one does not.
            if self._packages == self._own_packages:
                _make_once(self._packages, self._install)
            paths.append(_pth_line(_site_packages_of(self._packages)))
        _make_once(self._venv, lambda: _make_venv(self._venv, [*paths, *self._sites]))

    def _suitable_packages(self) -> list[Path]:
        """Returns complete packages that include the required ones, this set's own first."""
        own = self._own_packages
        folders = [mark.parent for mark in sorted(own.parent.glob(f"*/{_COMPLETE_FILE}"))]
        suitable = [each for each in folders if each == own or _includes(each, self._set)]
        return sorted(suitable, key=lambda folder: folder != own)

    def _install(self) -> None:
        """Installs the packages into a new environment."""
        # So that pip sees the packages that are already installed.
        _make_venv(self._packages, self._sites)
        arguments = list[str]()
        for option, lines in (
            ("-r", self._request["requirements"]),
            ("-c", self._request["constraints"]),
        ):
            name = "requirements.txt" if option == "-r" else "constraints.txt"
            file = self._packages / name
            file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
            arguments += [option, str(file)]
        (self._packages / _SET_FILE).write_text(json.dumps(self._set), encoding="utf-8")
        self._log.write_bytes(b"")
        command = [*self._installer(), *arguments]
        try:
            _run(command, self._log)
        except _InstallError as error:
            if self._request["uv"] is None or "certificate" not in str(error):
                raise
            # Behind a corporate proxy, only the system's certificates work; uv brings its own.
            os.environ.update(UV_SYSTEM_CERTS="1", UV_NATIVE_TLS="1")
            _run(command, self._log)

    def _installer(self) -> list[str]:
        """Returns the install command of uv or pip; installs pip if needed."""
        python, uv = str(self._packages / "bin" / "python"), self._request["uv"]
        if uv is not None:
            return [uv, "pip", "install", "--python", python]
        pip = [python, "-P", "-m", "pip"]
        if _run_quietly([*pip, "--version"]).returncode:
            try:
                _run([python, "-m", "ensurepip", "--default-pip"], self._log)
            except _InstallError as error:
                raise _InstallError(
                    f"{sys.executable} has neither pip nor ensurepip, and there is no uv; "
                    "install one (Debian/Ubuntu: apt-get install python3-venv)"
                ) from error
        return [*pip, "install", "--disable-pip-version-check", "--no-input", *_PIP_OPTIONS]


def _includes(packages: Path, wanted: _PackageSet) -> bool:
    """Returns whether a folder of packages has all that are wanted, at the same versions."""
    try:
        installed: _PackageSet = json.loads((packages / _SET_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):  # Installed by an earlier version of Stillroom, or deleted.
        return False
    requirements = set(installed["requirements"])
    return (
        installed["python"] == wanted["python"]
        and requirements.issuperset(wanted["requirements"])
        and requirements.union(installed["constraints"]).issuperset(wanted["constraints"])
    )


def _import_error(python: Path) -> str | None:
    """Returns the error of importing Stillroom in an environment; None if it works."""
    command = [python, "-P", "-c", "import msgspec, stillroom.remote.agent.store"]
    try:
        check = _run_quietly(command)
    except FileNotFoundError as error:
        return str(error)
    if check.returncode < 0:
        raise _InstallError(f"{python} was killed by signal {-check.returncode}; try again")
    return check.stderr.strip()[-1500:] if check.returncode else None


def _make_once(folder: Path, make: Callable[[], None]) -> None:
    """Creates an environment unless it is complete; a lock serialises concurrent processes."""
    mark = folder / _COMPLETE_FILE
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with (folder.parent / f".{folder.name}.lock").open("w") as lock:
        # The installer inherits the lock, so that if only this process is killed, no other one
        # deletes the files that the installer is still writing.
        os.set_inheritable(lock.fileno(), True)
        _acquire(lock.fileno())
        if mark.exists():
            return
        if folder.exists():
            shutil.rmtree(folder)
        make()
        mark.touch()


def _acquire(lock: int) -> None:
    """Acquires the lock of an open file, and reports while another process holds it."""
    reported_at = 0.0
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() - reported_at > _REPORT_EVERY_S:
                reported_at = time.monotonic()
                _reply({"say": "another run is installing the same packages"})
            time.sleep(_LOCK_POLL_S)
        else:
            return


def _run_quietly(command: list[Any]) -> subprocess.CompletedProcess[str]:
    """Runs a quick command, and returns its exit code and output."""
    try:
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            env=_installer_environment(),
            timeout=_QUICK_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired as error:
        command_line = " ".join(map(str, command))
        raise _InstallError(
            f"`{command_line}` timed out after {_QUICK_TIMEOUT_S:g} s; try again"
        ) from error


def _installer_environment() -> dict[str, str]:
    """Returns the environment of installers: this process's own, with options for pip and uv."""
    options = {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PYTHONUNBUFFERED": "1"}
    # uv then chooses torch's build for the machine's GPU and driver; uv before 0.6.9 does not.
    return {**os.environ, **options, "UV_TORCH_BACKEND": "auto"}


def _run(command: list[str], log: Path) -> None:
    """Runs a program, and periodically reports its current step."""
    with log.open("ab") as stream:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            env=_installer_environment(),
            close_fds=False,
        )
    reported = ""
    while True:
        try:
            code = process.wait(_REPORT_EVERY_S)
        except subprocess.TimeoutExpired:
            step = installation_step(_tail(log, _LOG_LINES)) or reported
            # Sent even without a new step, to keep the connection alive.
            _reply({"say": f"installing packages: {step}"} if step != reported else {})
            reported = step
        else:
            break
    if code:
        raise _InstallError(_tail(log, _LOG_LINES) or f"{command[0]} exited with code {code}")


def installation_step(log: str) -> str:
    """Returns the last progress line of an installer's log; "" if there is none."""
    steps = [line.strip() for line in log.splitlines() if _STEP.match(line)]
    return steps[-1][:80] if steps else ""


def _make_venv(folder: Path, paths: list[str]) -> None:
    """Creates an empty virtual environment that imports packages from other folders."""
    folder.mkdir(mode=0o700, parents=True)
    venv.EnvBuilder(symlinks=True, with_pip=False).create(folder)
    # The name sorts before other .pth files, so that no other Stillroom is imported first.
    file = Path(_site_packages_of(folder)) / "_0_stillroom.pth"
    file.write_text("".join(f"{path}\n" for path in paths), encoding="utf-8")


def _delete_unused(root: Path) -> None:
    """Deletes code and environments that were unused for 60 days, which is longer than any run."""
    cutoff = time.time() - _UNUSED_S
    for mark in [
        *root.glob(f"packages/*/{_COMPLETE_FILE}"),
        *root.glob(f"venvs/*/{_COMPLETE_FILE}"),
    ]:
        _delete_if_old(mark, mark.parent, cutoff)
    for python_file in root.glob("code/*.python"):
        _delete_if_old(python_file, python_file.with_suffix(""), cutoff)


def _delete_if_old(mark: Path, folder: Path, cutoff: float) -> None:
    """Deletes a folder and its mark if the mark was last used before the time `cutoff`."""
    with suppress(FileNotFoundError):  # Another process may be doing the same.
        if mark.stat().st_mtime < cutoff:
            # The mark is deleted first, so that a half-deleted environment is never used.
            mark.unlink()
            shutil.rmtree(folder, ignore_errors=True)


def _pth_line(path: str) -> str:
    """Returns the line of a .pth file that adds a packages folder, including its .pth files."""
    return f"import site; site.addsitedir({path!r})"


def _site_packages_of(folder: Path) -> str:
    return sysconfig.get_path("purelib", "venv", {"base": str(folder), "platbase": str(folder)})


def _own_site_folders() -> list[str]:
    folders = site.getsitepackages()
    if site.ENABLE_USER_SITE is not False:
        folders.append(site.getusersitepackages())
    return [folder for folder in dict.fromkeys(folders) if Path(folder).is_dir()]


def _installed_packages() -> list[tuple[str, str]]:
    """Returns the names and versions of the packages that this interpreter has."""
    # Each access to `metadata` parses the file again.
    texts = [each.metadata for each in importlib.metadata.distributions()]
    packages = [(text["Name"], text["Version"]) for text in texts]
    return [(name, version) for name, version in packages if name and version]


def _tail(log: Path, num_lines: int) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return "\n".join(lines[-num_lines:])[-2000:]


def _reply(value: dict[str, Any]) -> None:
    """Writes one reply as a line of JSON."""
    try:
        sys.stdout.write(json.dumps(value) + "\n")
        sys.stdout.flush()
    except OSError:
        # The client has disconnected; the buffered output must not be flushed again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


if __name__ == "__main__":
    sys.exit(main())
