"""The decorators `@tool` and `@reward`, their argument types, and loading of user files."""

import hashlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from stillroom.errors import ToolFileError
from stillroom.secrecy.readable import check_readable
from stillroom.tools.user.modules import (
    InMemoryModules,
    RnowModules,
    how_to_install,
    modules_missing_in_functions,
    names_not_imported,
    read_modules,
)
from stillroom.types import Message

_MARK = "__stillroom__"


@dataclass(frozen=True, slots=True)
class ToolArgs:
    """The part of a task that a tool may read; a parameter named `args` receives it."""

    metadata: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class RewardArgs:
    """The part of a task that a reward may read."""

    metadata: dict[str, Any] = field(default_factory=dict[str, Any])
    variables: dict[str, Any] = field(default_factory=dict[str, Any])
    secrets: dict[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True)
class ToolMark:
    """The options of a `@tool`."""

    sandbox: bool
    timeout_s: float | None


@dataclass(frozen=True, slots=True)
class RewardMark:
    """The options of a `@reward`."""

    precondition: bool
    sandbox: bool
    timeout_s: float | None


def tool(
    function: Callable[..., Any] | None = None,
    *,
    sandbox: bool = False,
    timeout: float | None = None,
) -> Any:
    """Marks a sync or async function as a tool. Write `@tool` or `@tool(timeout=10)`.

    The docstring is the tool's description for the model; every parameter needs a type. A parameter
    named `args` receives `ToolArgs` and is hidden from the model. `timeout` is in seconds.
    """
    return _attach_mark(function, ToolMark(sandbox=sandbox, timeout_s=timeout))


def reward(
    function: Callable[..., Any] | None = None,
    *,
    precondition: bool = False,
    sandbox: bool = False,
    timeout: float | None = None,
) -> Any:
    """Marks a function `(args: RewardArgs, messages: list) -> float` as a reward.

    The reward of a rollout is the sum of its rewards, and 0 if a precondition returns 0.
    """
    return _attach_mark(
        function, RewardMark(precondition=precondition, sandbox=sandbox, timeout_s=timeout)
    )


def get_response(messages: list[Message]) -> str:
    """Returns the text of the last assistant message; "" if there is none.

    Reasoning in a field of its own is not part of the text.
    """
    for message in reversed(messages):
        if message.get("role") == "assistant":
            content = message.get("content")
            if not isinstance(content, list):
                return content or ""
            return "".join(part.get("text") or "" for part in content if part.get("type") == "text")
    return ""


_PROVIDED = {each.__name__: each for each in (tool, reward, ToolArgs, RewardArgs, get_response)}
"""The names that a user's file may use without importing them."""


def _attach_mark(function: Any, mark: ToolMark | RewardMark) -> Any:
    def apply(target: Any) -> Any:
        setattr(target, _MARK, mark)
        return target

    return apply if function is None else apply(function)


class UserFile(msgspec.Struct, frozen=True):
    """A user's Python file, read once; later edits have no effect."""

    location: str
    code: bytes
    modules: dict[str, bytes] = {}
    """The code of the modules that it imports from its folder, by path relative to the folder."""

    @property
    def path(self) -> Path:
        """The path of the file."""
        return Path(self.location)

    @property
    def paths(self) -> list[Path]:
        """The paths of the file and of the modules."""
        return [self.path, *(self.path.parent / relative for relative in sorted(self.modules))]

    @property
    def sha256(self) -> str:
        """The SHA-256 of the code, in hex."""
        return hashlib.sha256(self.code).hexdigest()

    @property
    def modules_sha256(self) -> dict[str, str] | None:
        """The SHA-256 of each module's code, in hex; None if it imports none."""
        shas = {name: hashlib.sha256(code).hexdigest() for name, code in self.modules.items()}
        return dict(sorted(shas.items())) or None


def read_user_file(path: Path) -> UserFile:
    """Returns a user's Python file, with the modules next to it that it imports.

    Raises ToolFileError if it cannot be read, and InputError if reading it is not allowed.
    """
    check_readable(path)
    try:
        # The file's functions run in its own folder, where a relative path would lead elsewhere.
        code = path.read_bytes()
        return UserFile(str(path.absolute()), code, read_modules(path.absolute(), code))
    except OSError as error:
        raise ToolFileError(
            f"{path} cannot be read: {error}", "check its path and permissions"
        ) from error


@dataclass(frozen=True, slots=True)
class LoadedFile:
    """A user's Python file that has been run."""

    module: ModuleType
    notes: list[str]
    """Notes for the user on the names provided to the file, and on modules that are not
    installed."""


def load_user_file(file: UserFile) -> ModuleType:
    """Runs a user's Python file, with its folder first on the path, and returns the module.

    Raises ToolFileError, which names the file and line, if that fails.
    """
    return run_user_file(file).module


def run_user_file(file: UserFile) -> LoadedFile:
    """Runs a user's Python file like load_user_file, and returns notes for the user too."""
    path = file.path
    folder = str(path.parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    rnow = next((finder for finder in sys.meta_path if isinstance(finder, RnowModules)), None)
    if rnow is None:
        rnow = RnowModules(_PROVIDED)
        sys.meta_path.insert(0, rnow)
    sys.meta_path.insert(0, InMemoryModules(path.parent, file.modules))
    spec = importlib.util.spec_from_file_location(f"_user_{path.stem}", path)
    if spec is None:
        raise ToolFileError(f"{path} is not a Python file", "give a file that ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    unimported = names_not_imported(file.code, frozenset(_PROVIDED))
    module.__dict__.update({name: _PROVIDED[name] for name in unimported})
    try:
        # Not the spec's loader, which would read the file again, or bytecode of another version.
        exec(compile(file.code, str(path), "exec", dont_inherit=True), module.__dict__)  # noqa: S102
    except ToolFileError as error:
        raise ToolFileError(
            f"{path}:{_line_of(error, path)}: {error.problem}", error.fix
        ) from error
    except Exception as error:
        fix = "fix the file; run it with python to see the whole traceback"
        if isinstance(error, ModuleNotFoundError) and error.name is not None:
            fix = how_to_install(error.name, path.parent)
        raise ToolFileError(
            f"{path}:{_line_of(error, path)}: loading failed: {type(error).__name__}: {error}", fix
        ) from error
    codes = (file.code, *file.modules.values())
    imports_rnow = rnow.is_used and any(b"rnow" in code for code in codes)
    missing = modules_missing_in_functions(file.code, path.parent)
    return LoadedFile(module, _notes(path, unimported, missing, imports_rnow=imports_rnow))


def _notes(
    path: Path, unimported: frozenset[str], missing: list[str], *, imports_rnow: bool
) -> list[str]:
    """Returns notes on the names provided to a file, and on imports that will fail when called."""
    provided = ["the rnow modules that it imports"] if imports_rnow else []
    if unimported:
        provided.append(", ".join(sorted(unimported)) + " (used without an import)")
    notes = [f"{path.name}: stillroom provides {' and '.join(provided)}"] if provided else []
    return notes + [
        f"{path.name}: a function imports {name}, which is not installed, so its calls will fail; "
        + how_to_install(name, path.parent)
        for name in missing
    ]


def _line_of(error: BaseException, path: Path) -> int:
    """Returns the line of a file in which an error was raised; 0 if unknown."""
    if isinstance(error, SyntaxError) and error.lineno:
        return error.lineno
    line, trace = 0, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == str(path):
            line = trace.tb_lineno
        trace = trace.tb_next
    return line


def marked_functions(
    module: ModuleType, kind: type[ToolMark] | type[RewardMark]
) -> dict[str, Callable[..., Any]]:
    """Returns the functions of a loaded user file that carry `@tool` (or `@reward`), by name."""
    return {
        name: value
        for name, value in vars(module).items()
        if inspect.isfunction(value) and isinstance(getattr(value, _MARK, None), kind)
    }


def mark_of(function: Callable[..., Any]) -> Any:
    """Returns the ToolMark or the RewardMark of a marked function."""
    return getattr(function, _MARK)
