"""What an operation is: its request, its result, the function that does it, and where that runs."""

import functools
import importlib
import importlib.util
import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import msgspec
from pydantic import BaseModel

from stillroom.reporting import Reporter
from stillroom.run_folder import RunFolder
from stillroom.settings import Workspace
from stillroom.types import RunKind


@dataclass(frozen=True, slots=True)
class RunWork:
    """The work of a run, done in a detached process (`jobs/worker.py`)."""

    kinds: tuple[RunKind, ...]
    function: str
    """`module:function`, called with a workspace, the request, `folder=` and `reporter=`."""
    on_ray: str | None = None
    """The function instead where the request names a Ray cluster."""


@dataclass(frozen=True, slots=True)
class ChildWork:
    """Work that is waited for but needs heavy libraries, done in a child (`jobs/child.py`)."""

    function: str
    """`module:function`, called with a workspace and a request."""
    timeout_s: float
    action: str
    """What the child does, for error messages; fields of the request stand in braces."""
    fix: str
    """What to do where the child fails or takes too long."""


@dataclass(frozen=True, slots=True)
class Operation:
    """Something a user can ask for, in the MCP server's and the command line's words alike.

    Functions are named as `module:function`, so that the table loads none of their libraries.
    """

    name: str
    request: type[BaseModel]
    result: type[msgspec.Struct]
    function: str
    """Called with a workspace and the request: does the work, or checks it and starts a run."""
    run: RunWork | None = None
    """The work of the run that the function starts; None if it starts none."""
    child: ChildWork | None = None
    """The part of the work that a child process does; None if there is none."""

    def call(self, workspace: Workspace, request: BaseModel) -> msgspec.Struct:
        """Carries out the operation in this process and returns its result."""
        return load(self.function)(workspace, request)


def load(name: str) -> Any:
    """Returns what `module:name` stands for, importing the module."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def run_operation(operation: Operation, folder: RunFolder, reporter: Reporter) -> Any:
    """Does the work of a run of this operation and returns its result."""
    work, run_request = operation.run, folder.read_request()
    if work is None:
        raise ValueError(f"{operation.name} starts no run")
    request = operation.request.model_validate(run_request.request)
    is_on_ray = work.on_ray is not None and getattr(request, "ray_address", None)
    function = load(work.on_ray if work.on_ray and is_on_ray else work.function)
    stage = functools.partial(function, folder=folder.path, reporter=reporter)
    workspace = Workspace(Path(run_request.workspace))
    if not inspect.iscoroutinefunction(function):
        return stage(workspace, request)
    # Thousands of connections at once: uvloop is the faster event loop, where it is installed.
    has_uvloop = importlib.util.find_spec("uvloop") is not None
    return anyio.run(stage, workspace, request, backend_options={"use_uvloop": has_uvloop})
