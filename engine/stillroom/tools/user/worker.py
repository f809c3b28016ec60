"""The child process that runs a user's tools.py and rewards.py, one call at a time.

The first line of its standard input contains the files. It loads them and writes one JSON line to
its standard output, a Ready or LoadFailed. Then it reads calls as JSON lines, and writes a
CallResult for each. What the user's code prints goes to standard error. When the parent exits, the
worker kills its process group.
"""

import inspect
import math
import os
import select
import threading
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO

import msgspec

from stillroom import bounds
from stillroom.errors import ToolFileError
from stillroom.processes import (
    RUN_MARK_VARIABLE,
    end_with_parent,
    kill_family,
    limit_this_process,
    user_code_memory_limit,
)
from stillroom.tools.schema import ArgumentChecker, ArgumentError, has_task_parameter, tool_schema
from stillroom.tools.user.file import (
    RewardArgs,
    RewardMark,
    ToolArgs,
    ToolMark,
    UserFile,
    mark_of,
    marked_functions,
    run_user_file,
)
from stillroom.types import ToolSchema

MAX_RESULT_CHARACTERS = bounds.TOOL_RESULT.limit
_CPU_SLACK_S = 5.0
_NUM_PROCESSORS = os.cpu_count() or 1


class _ToolDescription(msgspec.Struct, frozen=True, kw_only=True):
    """A tool in the worker's first line: its schema, and its own deadline if it has one."""

    schema: ToolSchema
    timeout_s: float | None


class RewardDescription(msgspec.Struct, frozen=True, kw_only=True):
    """A reward in the worker's first line; `timeout_s` is None for the default deadline."""

    name: str
    precondition: bool
    timeout_s: float | None


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """The worker's first line when it has loaded the user's files."""

    tools: list[_ToolDescription]
    rewards: list[RewardDescription]
    notes: list[str] = []
    """Notes for the user on the names provided to the files, and on missing modules."""


class LoadFailed(msgspec.Struct, frozen=True, kw_only=True, tag="broken"):
    """The worker's first line when it cannot load the user's files."""

    problem: str
    fix: str


class CallTool(msgspec.Struct, frozen=True, kw_only=True, tag="tool"):
    """A request to run one tool."""

    name: str
    arguments: dict[str, Any]
    metadata: dict[str, Any]
    timeout_s: float | None = None
    """The deadline, which also limits the processor time of the worker; None for no limit."""
    number: int = 0
    """The number of the call among those of its worker, which the result repeats."""


class CallReward(msgspec.Struct, frozen=True, kw_only=True, tag="reward"):
    """A request to compute one reward of a finished conversation."""

    name: str
    messages: list[Any]
    metadata: dict[str, Any]
    variables: dict[str, Any]
    timeout_s: float | None = None
    """The deadline, as in CallTool."""
    number: int = 0


class CallResult(msgspec.Struct, frozen=True, kw_only=True, tag="answer"):
    """The result of one call: the tool's text or the reward, or the error."""

    content: str = ""
    is_none: bool = False
    """Whether the tool returned None, whose text is "null"."""
    reward: float = 0.0
    error: str | None = None
    number: int = 0
    """The number of the call."""


class UserFiles(msgspec.Struct, frozen=True, kw_only=True):
    """The first line that a worker reads: the files that it loads."""

    tools: UserFile | None
    rewards: UserFile | None
    parent: int
    """The pid of the process that has started the worker."""
    secrets: list[str] = []
    """The names of the variables that keys.yml gives to tools and rewards."""


class _Secrets(dict[str, str]):
    """The secrets that a reward may read; any other name raises an error that explains keys.yml."""

    def __missing__(self, name: str) -> str:
        raise ValueError(
            f"the secret {name!r} is not available to rewards: set the environment variable "
            f"{name}, and add the line `- {{key: {name}, tools: true}}` to keys.yml"
        )


class UserCode:
    """The loaded functions of tools.py and rewards.py."""

    def __init__(
        self,
        tools_file: UserFile | None,
        rewards_file: UserFile | None,
        secrets: Sequence[str] = (),
    ) -> None:
        """`secrets` are the names of the variables that rewards receive as their secrets."""
        self._notes: list[str] = []
        self._secrets = {name: os.environ[name] for name in secrets if name in os.environ}
        self.tools = self._load(tools_file, ToolMark, "@tool")
        self.rewards = self._load(rewards_file, RewardMark, "@reward")
        # Made before the checkers, since its error names the tool whose type is not supported.
        self._schemas = {name: tool_schema(tool, name=name) for name, tool in self.tools.items()}
        self._checkers = {name: ArgumentChecker(tool) for name, tool in self.tools.items()}
        self._with_task = {name for name, tool in self.tools.items() if has_task_parameter(tool)}

    def _load(
        self, file: UserFile | None, kind: type[ToolMark] | type[RewardMark], decorator: str
    ) -> dict[str, Callable[..., Any]]:
        """Runs a file and returns its marked functions. Raises ToolFileError."""
        if file is None:
            return {}
        loaded = run_user_file(file)
        path, functions = file.path, marked_functions(loaded.module, kind)
        if not functions:
            raise ToolFileError(
                f"{path} has no function marked with {decorator}",
                f"write `from stillroom.tools import {decorator[1:]}` and {decorator} above a "
                "function",
            )
        for name, function in functions.items():
            if mark_of(function).sandbox:
                raise ToolFileError(
                    f"{path}: {name!r} has sandbox=True, which is not supported yet",
                    "remove sandbox; the function then runs in a child process with your "
                    "permissions",
                )
        self._notes += loaded.notes
        return functions

    def describe(self) -> Ready:
        """Returns the first line of a worker that has loaded these functions."""
        return Ready(
            tools=[
                _ToolDescription(schema=self._schemas[name], timeout_s=mark_of(tool).timeout_s)
                for name, tool in self.tools.items()
            ],
            rewards=[
                RewardDescription(
                    name=name,
                    precondition=mark_of(function).precondition,
                    timeout_s=mark_of(function).timeout_s,
                )
                for name, function in self.rewards.items()
            ],
            notes=self._notes,
        )

    def run(self, call: CallTool | CallReward) -> CallResult:
        """Runs one call; an exception in the user's code becomes the result's error."""
        try:
            if isinstance(call, CallTool):
                return self._call_tool(call)
            return self._call_reward(call)
        except ArgumentError as error:
            return CallResult(error=str(error))
        # The user's code may raise anything, SystemExit included; the model reads the message.
        except BaseException as error:
            return CallResult(error=_truncate(_message_of(error)))

    def _call_tool(self, call: CallTool) -> CallResult:
        function = self.tools[call.name]
        arguments = self._checkers[call.name].check(call.arguments)
        if call.name in self._with_task:
            arguments["args"] = ToolArgs(metadata=call.metadata)
        value = _run(function, **arguments)
        return CallResult(content=_as_text(value), is_none=value is None)

    def _call_reward(self, call: CallReward) -> CallResult:
        """Computes one reward; a value that is not a finite number is an error."""
        secrets = _Secrets(self._secrets)
        args = RewardArgs(metadata=call.metadata, variables=call.variables, secrets=secrets)
        value = _run(self.rewards[call.name], args, call.messages)
        if not isinstance(value, int | float):
            return CallResult(error=_truncate(f"a reward must return a number, not {value!r}"))
        if not math.isfinite(value):
            return CallResult(error=f"a reward must return a finite number, not {value!r}")
        return CallResult(reward=float(value))


def _run(function: Callable[..., Any], *positional: Any, **named: Any) -> Any:
    value = function(*positional, **named)
    if not inspect.isawaitable(value):
        return value
    # Not at the top: most workers never need it, and imports are most of a worker's start time.
    import asyncio

    return asyncio.run(_await_value(value))


async def _await_value(value: Any) -> Any:
    return await value


def _message_of(error: BaseException) -> str:
    """Returns the type and text of an exception.

    For a ValueError the type is left out, since its text is written for the model.
    """
    try:
        text = str(error)
    except Exception:  # its __str__ is the user's code too
        text = ""
    if isinstance(error, ValueError) and text:
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _as_text(value: Any) -> str:
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode("utf-8")
    return _truncate(text)


def _truncate(text: str) -> str:
    """Truncates a text to the limit of a tool's result; lone surrogates become "?".

    The note that it was cut is added beyond the limit.
    """
    shortened = text[:MAX_RESULT_CHARACTERS].encode("utf-8", errors="replace").decode("utf-8")
    if len(text) <= MAX_RESULT_CHARACTERS:
        return shortened
    return shortened + f"… (cut; {len(text)} characters in all)"


def _serve(code: UserCode, stream: BinaryIO, replies: BinaryIO) -> None:
    """Runs calls until the parent closes the input."""
    decoder, worker_pid = msgspec.json.Decoder(CallTool | CallReward), os.getpid()
    for line in stream:
        call = decoder.decode(line)
        if call.timeout_s is not None:
            limit_this_process(cpu_s=(call.timeout_s + _CPU_SLACK_S) * _NUM_PROCESSORS)
        result = code.run(call)
        if os.getpid() != worker_pid:
            # The user's code has forked and this is the child; only the parent may reply.
            os._exit(0)
        _send(replies, msgspec.structs.replace(result, number=call.number))
    _kill_and_exit()


def _kill_when_parent_exits(calls_fd: int) -> None:
    """Waits until the parent exits, then kills this process, even during a hung call."""
    poll = select.poll()
    # With an empty event mask poll still reports a hang-up, and nothing else.
    poll.register(calls_fd, 0)
    poll.poll()
    _kill_and_exit()


def _kill_and_exit() -> None:
    kill_family(os.getpid())
    os._exit(1)  # reached if it was started manually, when it leads no process group


def _send(stream: BinaryIO, message: Ready | LoadFailed | CallResult) -> None:
    stream.write(msgspec.json.encode(message) + b"\n")
    stream.flush()


def _redirect_stdin() -> BinaryIO:
    """Returns the real standard input, and gives the user's code and its children an empty one."""
    calls = os.fdopen(os.dup(0), "rb")
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    return calls


def _redirect_stdout() -> BinaryIO:
    """Returns the real standard output and sends what the user's code prints to stderr."""
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return replies


def main() -> None:
    """Loads the given files, announces their functions, and runs calls."""
    calls, replies = _redirect_stdin(), _redirect_stdout()
    # The user's code may hang already while it is imported.
    threading.Thread(target=_kill_when_parent_exits, args=(calls.fileno(),), daemon=True).start()
    files = msgspec.json.decode(calls.readline(), type=UserFiles)
    if RUN_MARK_VARIABLE in os.environ:
        # The thread cannot act while a call holds the interpreter, but the system can; what the
        # call has started is then killed by the run's keeper.
        end_with_parent(files.parent)
    limit_this_process(memory_bytes=user_code_memory_limit())
    try:
        code = UserCode(files.tools, files.rewards, files.secrets)
        ready = code.describe()
    except ToolFileError as error:
        _send(replies, LoadFailed(problem=error.problem, fix=error.fix))
        return
    _send(replies, ready)
    _serve(code, calls, replies)


if __name__ == "__main__":
    main()
