"""Makes the environment in which our code runs on a machine: `python -E -P environment.py`.

It runs before any of our packages is installed, so that it needs the standard library only. The
other side writes two lines of JSON, and gets lines of JSON:

1. `_Question`: which code to look for, and whether this interpreter's own packages may be used.
   Answer: `{"code": …, "installed": …, "marks": …}`.
2. `_InstallRequest`: what to install. Answers: `{"say": …}` from time to time, then
   `{"python": …}` or `{"failed": …}`.

There are two layers. `packages/KEY` holds installed packages, and `venvs/KEY` only names them, an
interpreter's own packages and the code, so that new code costs no new installation. An environment
counts when it has the file `whole`, which is written last: what a killed installation has left is
deleted by the next. It isn't renamed into place instead, since its programs name its folder.
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

_SAY_EVERY_S = 2.0
_TRY_S = 300.0
_LOCK_POLL_S = 0.2
_LOG_LINES = 30
_FORGOTTEN_S = 60 * 86400
# Conflicts within an image are not ours to report, and take longer to find than an installation.
_QUIET = ("--no-warn-conflicts", "--progress-bar", "off")
_WHOLE = "whole"
_STEP = re.compile(r" *(Looking|Collecting|Downloading|Using cached|Building|Installing|Resolved) ")


class _Question(TypedDict):
    root: str
    code: str
    """The hash of the code, which is a folder in `code/`."""
    uses_packages: bool
    """Whether this interpreter's own packages are used."""


class _InstallRequest(TypedDict):
    code: str
    key: str
    """The hash of all of the environment."""
    packages_key: str
    """The hash of what is installed."""
    requirements: list[str]
    constraints: list[str]
    uv: str | None
    """The program that installs; pip does it if there is none."""


class _FailedError(Exception):
    """The environment cannot be made; the text says why."""


def main() -> int:
    """Answers the two lines. The installation continues even if nobody listens any more."""
    if sys.argv[1:]:
        root, *sites = sys.argv[1:]
        _Installation(Path(root), json.loads(sys.stdin.readline()), sites).answer()
        return 0
    question: _Question = json.loads(sys.stdin.readline())
    root = question["root"]
    sites = _own_sites() if question["uses_packages"] else []
    installed = _installed() if sites else []
    code = code_hash_of(code_files(Path(root, "code", question["code"], "stillroom")))
    _answer({"code": code, "installed": installed, "marks": _marks()})
    line = sys.stdin.readline()
    if line:  # Without a line, the code is sent again.
        _relay([root, *sites], line)
    return 0


def _relay(arguments: list[str], request: str) -> None:
    """Installs in a process of its own, and passes that one's answers on.

    If nobody listens any more, this process ends, and with it the connection; the other continues,
    so that the next connection finds done what this one has begun.
    """
    worker = subprocess.Popen(
        [sys.executable, "-E", "-P", __file__, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
        env=_login_environment(),
        start_new_session=True,
    )
    with cast("IO[str]", worker.stdin) as stdin:
        stdin.write(request)
    printed = ""
    for line in cast("IO[str]", worker.stdout):
        if line.startswith("{"):
            try:
                sys.stdout.write(line)
                sys.stdout.flush()
            except OSError:
                os._exit(1)
        else:
            printed = (printed + line)[-1500:]
    code = worker.wait()  # no limit: it has closed its output and ends
    if code:
        killed = f"it was killed by signal {-code}" if code < 0 else f"it ended with {code}"
        _answer({"failed": printed or f"the process that installs them ended early: {killed}"})


def code_hash_of(files: Iterable[tuple[str, bytes]]) -> str:
    """Returns a name for the files of a package, given in order with their contents."""
    digest = hashlib.sha256()
    for name, data in files:
        digest.update(f"{name}\0{len(data)}\0".encode() + data)
    return digest.hexdigest()[:24]


def code_files(package: Path) -> Iterator[tuple[str, bytes]]:
    """Yields the names and contents of a package's files in order, but for what Python makes."""
    for path in sorted(package.rglob("*")):
        if "__pycache__" not in path.parts and path.suffix != ".pyc" and path.is_file():
            yield path.relative_to(package).as_posix(), path.read_bytes()


class _Installation:
    """Makes one environment."""

    def __init__(self, root: Path, request: _InstallRequest, sites: list[str]) -> None:
        self._root, self._request = root, request
        self._sites = [_adding(site) for site in sites]
        self._venv = root / "venvs" / request["key"]
        self._packages = root / "packages" / request["packages_key"]
        self._log = self._packages.with_name(f"{self._packages.name}.log")

    def answer(self) -> None:
        """Makes the environment, and answers with its interpreter or with why it has none."""
        try:
            python = self._python()
        except (_FailedError, OSError, subprocess.SubprocessError) as error:
            log = f" (all of it is in {self._log} on the machine)" if self._log.exists() else ""
            _answer({"failed": f"{error}{log}"})
        else:
            _answer({"python": str(python)})

    def _python(self) -> Path:
        """Returns the environment's interpreter, which is made first if need be."""
        python, problem = self._venv / "bin" / "python", None
        # Some machines delete old files. Packages, which other runs may use, are made again last.
        for broken in ([], [self._venv], [self._packages, self._venv]):
            for old in broken:
                (old / _WHOLE).unlink(missing_ok=True)
            self._make()
            problem = _fault_of(python)
            if problem is None:
                break
        else:
            raise _FailedError(f"{self._venv} does not run stillroom: {problem}")
        for used in (self._venv, self._packages):
            with suppress(FileNotFoundError):
                os.utime(used / _WHOLE)
        named = self._root / "code" / f"{self._request['code']}.python"
        temporary = named.with_name(f".{named.name}.{os.getpid()}")
        temporary.write_text(f"{python}\n", encoding="utf-8")
        temporary.replace(named)
        _forget_old(self._root)
        return python

    def _make(self) -> None:
        paths = [str(self._root / "code" / self._request["code"])]
        if self._request["requirements"]:
            _make_whole(self._packages, self._install)
            paths.append(_adding(_site_of(self._packages)))
        _make_whole(self._venv, lambda: _make_venv(self._venv, [*paths, *self._sites]))

    def _install(self) -> None:
        # pip then sees what is installed already.
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
        self._log.write_bytes(b"")
        command = [*self._installer(), *arguments]
        try:
            _run(command, self._log)
        except _FailedError as error:
            if self._request["uv"] is None or "certificate" not in str(error):
                raise
            # Behind a company's proxy only the system knows whom to trust; uv has its own list.
            os.environ.update(UV_SYSTEM_CERTS="1", UV_NATIVE_TLS="1")
            _run(command, self._log)

    def _installer(self) -> list[str]:
        """Returns the command that installs the packages; makes sure that there is one."""
        python, uv = str(self._packages / "bin" / "python"), self._request["uv"]
        if uv is not None:
            command = [uv, "pip", "install", "--python", python]
            options = _tried([*command, "--help"]).stdout
            # It chooses torch's build by the machine's GPU and driver.
            return [*command, *(["--torch-backend=auto"] if "--torch-backend" in options else [])]
        pip = [python, "-P", "-m", "pip"]
        if _tried([*pip, "--version"]).returncode:
            try:
                _run([python, "-m", "ensurepip", "--default-pip"], self._log)
            except _FailedError as error:
                raise _FailedError(
                    f"{sys.executable} has neither pip nor ensurepip, and there is no uv; "
                    "install one (Debian/Ubuntu: apt-get install python3-venv)"
                ) from error
        return [*pip, "install", "--disable-pip-version-check", "--no-input", *_QUIET]


def _fault_of(python: Path) -> str | None:
    """Returns why our code does not run in an environment, before a run finds out; or None."""
    command = [python, "-P", "-c", "import msgspec, stillroom.remote.agent.store"]
    try:
        check = _tried(command)
    except FileNotFoundError as error:
        return str(error)
    if check.returncode < 0:
        raise _FailedError(f"{python} was killed by signal {-check.returncode}; try again")
    return check.stderr.strip()[-1500:] if check.returncode else None


def _make_whole(folder: Path, make: Callable[[], None]) -> None:
    """Makes an environment unless it is whole; two that want the same one wait for each other."""
    mark = folder / _WHOLE
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with (folder.parent / f".{folder.name}.lock").open("w") as lock:
        # The installer inherits it: if only this process is killed, nobody deletes what the
        # installer still writes.
        os.set_inheritable(lock.fileno(), True)
        _take(lock.fileno())
        if mark.exists():
            return
        if folder.exists():
            shutil.rmtree(folder)
        make()
        mark.touch()


def _take(lock: int) -> None:
    said_at = 0.0
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() - said_at > _SAY_EVERY_S:
                said_at = time.monotonic()
                _answer({"say": "another run is installing the same packages"})
            time.sleep(_LOCK_POLL_S)
        else:
            return


def _tried(command: list[Any]) -> subprocess.CompletedProcess[str]:
    """Runs a command that installs nothing, and returns how it ended and what it printed."""
    try:
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            env=_login_environment(),
            timeout=_TRY_S,
        )
    except subprocess.TimeoutExpired as late:
        named = " ".join(map(str, command))
        raise _FailedError(f"`{named}` did not end within {_TRY_S:g} s; try again") from late


def _login_environment() -> dict[str, str]:
    """Returns the environment of installers: that of a login on this machine, without our keys."""
    return {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PYTHONUNBUFFERED": "1"}


def _run(command: list[str], log: Path) -> None:
    """Runs a program and says the last line that it prints from time to time."""
    with log.open("ab") as stream:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            env=_login_environment(),
            close_fds=False,
        )
    said = ""
    while True:
        try:
            code = process.wait(_SAY_EVERY_S)
        except subprocess.TimeoutExpired:
            step = installation_step(_tail(log, _LOG_LINES)) or said
            # Also without news now and then, so that the connection stays alive.
            _answer({"say": f"installing packages: {step}"} if step != said else {})
            said = step
        else:
            break
    if code:
        raise _FailedError(_tail(log, _LOG_LINES) or f"{command[0]} ended with exit code {code}")


def installation_step(log: str) -> str:
    """Returns the last line of an installer's log that says what it does now; "" without one."""
    steps = [line.strip() for line in log.splitlines() if _STEP.match(line)]
    return steps[-1][:80] if steps else ""


def _make_venv(folder: Path, paths: list[str]) -> None:
    """Makes an environment without packages of its own, which finds those of other folders."""
    folder.mkdir(mode=0o700, parents=True)
    venv.EnvBuilder(symlinks=True, with_pip=False).create(folder)
    # The name comes before those of other files, so that no other Stillroom is found first.
    file = Path(_site_of(folder)) / "_0_stillroom.pth"
    file.write_text("".join(f"{path}\n" for path in paths), encoding="utf-8")


def _forget_old(root: Path) -> None:
    """Deletes code and environments that were not used for two months, longer than any run."""
    limit = time.time() - _FORGOTTEN_S
    for mark in [*root.glob(f"packages/*/{_WHOLE}"), *root.glob(f"venvs/*/{_WHOLE}")]:
        _forget(mark, mark.parent, limit)
    for named in root.glob("code/*.python"):
        _forget(named, named.with_suffix(""), limit)


def _forget(mark: Path, folder: Path, limit: float) -> None:
    with suppress(FileNotFoundError):  # Another process may be doing the same.
        if mark.stat().st_mtime < limit:
            # Without its mark it is not used while it is being deleted.
            mark.unlink()
            shutil.rmtree(folder, ignore_errors=True)


def _adding(path: str) -> str:
    """Returns a line of a .pth file that adds a folder of packages with its own .pth files."""
    return f"import site; site.addsitedir({path!r})"


def _site_of(folder: Path) -> str:
    return sysconfig.get_path("purelib", "venv", {"base": str(folder), "platbase": str(folder)})


def _own_sites() -> list[str]:
    folders = site.getsitepackages()
    if site.ENABLE_USER_SITE is not False:
        folders.append(site.getusersitepackages())
    return [folder for folder in dict.fromkeys(folders) if Path(folder).is_dir()]


def _installed() -> list[tuple[str, str]]:
    # Each `metadata` parses a file anew.
    texts = [each.metadata for each in importlib.metadata.distributions()]
    found = [(text["Name"], text["Version"]) for text in texts]
    return [(name, version) for name, version in found if name and version]


def _marks() -> dict[str, str]:
    """Returns what requirements' markers ask (PEP 508)."""
    major, minor = sys.version_info[:2]
    return {
        "implementation_name": sys.implementation.name,
        "implementation_version": platform.python_version(),
        "os_name": os.name,
        "platform_machine": platform.machine(),
        "platform_python_implementation": platform.python_implementation(),
        "platform_release": platform.release(),
        "platform_system": platform.system(),
        "platform_version": platform.version(),
        "python_full_version": platform.python_version(),
        "python_version": f"{major}.{minor}",
        "sys_platform": sys.platform,
    }


def _tail(log: Path, num_lines: int) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return "\n".join(lines[-num_lines:])[-2000:]


def _answer(value: dict[str, Any]) -> None:
    try:
        sys.stdout.write(json.dumps(value) + "\n")
        sys.stdout.flush()
    except OSError:
        # Nobody listens any more; what cannot be written must not be tried again at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


if __name__ == "__main__":
    sys.exit(main())
