"""The definition of an operation: its request, its result, its function and where that runs."""

import functools
import gc
import importlib
import importlib.util
import inspect
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import msgspec
from pydantic import BaseModel

from stillroom.errors import EngineError
from stillroom.reporting import Reporter
from stillroom.run_folder import RunFolder
from stillroom.settings import Workspace
from stillroom.types import RunKind


@dataclass(frozen=True, slots=True)
class RunWork:
    """The work of a run, which a detached process does (`jobs/worker.py`)."""

    kinds: tuple[RunKind, ...]
    """The kinds of runs that do this work; training has several, one for each dataset_type."""
    function: str
    """`module:function`, called with a workspace, the request, `folder=` and `reporter=`."""
    on_ray: str | None = None
    """The function called instead if the request names a Ray cluster; None if there is none."""
    failure: str | None = None
    """`module:function` that turns a failed run's result into an error; it returns None for a
    success. None if every result is a success."""
    result: type[msgspec.Struct] | None = None
    """The type of the result, which says which of its texts are Stillroom's own; None if all of its
    strings are names or text from others."""

    def error_of(self, result: Any) -> EngineError | None:
        """Returns the error for a failed run's result; None if the run succeeded."""
        return None if self.failure is None else load(self.failure)(result)


@dataclass(frozen=True, slots=True)
class ChildWork:
    """Work that needs heavy libraries and runs in a child process (`jobs/child.py`).

    Unlike with a run, the caller waits for the result.
    """

    function: str
    """`module:function`, called with a workspace and a request."""
    timeout_s: float
    """The number of seconds for the function, after which the child is killed."""
    action: str
    """What the child does, for error messages; names in braces are fields of the request."""
    fix: str
    """What the user can do if the child crashes or takes too long, for error messages."""
    memory_gb: float | None = None
    """The child's memory limit in GB; None for half of the machine's memory."""
    libraries: str | None = None
    """A module that the function imports, whose loading `timeout_s` does not count."""


@dataclass(frozen=True, slots=True)
class Operation:
    """An action that users request as an MCP tool or as a command of the command line.

    Functions are named as `module:function`, so that the table loads none of their libraries.
    """

    function: str
    """`module:function`, called with a workspace and the request; the operation has its name.

    It does the work and returns the result, or checks the request and starts a run.
    """
    request: type[BaseModel]
    """The model of the request, which defines the schema and checks the arguments."""
    result: type[msgspec.Struct]
    title: str
    description: str
    """One line that says what the operation does and when to use it."""
    positional: tuple[str, ...] = ()
    """The request's fields that the command line takes without a flag, in order."""
    explained_by: type[BaseModel] | None = None
    """The request of another operation whose schema describes the shared options.

    None if this operation describes all of its options itself.
    """
    is_read_only: bool = False
    is_destructive: bool = False
    is_idempotent: bool = False
    is_open_world: bool = False
    """Whether the operation may reach beyond this machine, to endpoints or the model hub."""
    run: RunWork | None = None
    """The work of the run that the function starts; None if it starts none."""
    child: ChildWork | None = None
    """The part of the work that a child process does; None if there is none."""
    run_if_large: RunKind | None = None
    """The kind of run that processes large input files; None if the work is never done in a run."""

    @property
    def name(self) -> str:
        """The operation's name, which is its function's name."""
        return self.function.partition(":")[2]

    @property
    def command(self) -> str:
        """The operation's name on the command line, with hyphens."""
        return self.name.replace("_", "-")

    @property
    def starts_run(self) -> bool:
        """Whether the operation starts a run, which continues after the call has returned."""
        return self.run is not None

    @property
    def may_become_run(self) -> bool:
        """Whether the operation is executed as a run if its input files are large."""
        return self.run_if_large is not None

    @property
    def has_child(self) -> bool:
        """Whether the operation may start a child process and wait for it."""
        return self.child is not None

    def call(self, workspace: Workspace, request: BaseModel) -> msgspec.Struct:
        """Executes the operation in this process and returns its result."""
        return load(self.function)(workspace, request)


def load(name: str) -> Any:
    """Imports and returns the object at `module:name`."""
    module, _, attribute = name.partition(":")
    with _gc_disabled():
        return getattr(importlib.import_module(module), attribute)


@contextmanager
def _gc_disabled() -> Generator[None]:
    """Disables garbage collection while libraries load, which takes a sixth of that time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def run_operation(
    operation: Operation, folder: RunFolder, reporter: Reporter, secrets: Mapping[str, str]
) -> Any:
    """Executes the operation of the run in this folder and returns its result.

    Raises ValueError if the operation starts no run.
    """
    work, run_request = operation.run, folder.read_request()
    request = operation.request.model_validate(run_request.request)
    if operation.run_if_large is not None:
        return operation.call(Workspace(Path(run_request.workspace), secrets), request)
    if work is None:
        raise ValueError(f"{operation.name} starts no run")
    is_on_ray = work.on_ray is not None and getattr(request, "ray_address", None)
    function = load(work.on_ray if work.on_ray and is_on_ray else work.function)
    work_function = functools.partial(function, folder=folder.path, reporter=reporter)
    workspace = Workspace(Path(run_request.workspace), secrets)
    if not inspect.iscoroutinefunction(function):
        return work_function(workspace, request)
    # A run may hold thousands of connections at once, for which uvloop is the faster event loop.
    has_uvloop = importlib.util.find_spec("uvloop") is not None
    return anyio.run(work_function, workspace, request, backend_options={"use_uvloop": has_uvloop})
