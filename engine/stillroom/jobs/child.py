"""Calls a function in a child process and waits for it, for work that needs heavy libraries.

The calling process need not load those libraries, and can end the work after a time limit. The
child reads the request from its standard input and writes the result to its standard output.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from pydantic import BaseModel

from stillroom.errors import EngineError, RunError
from stillroom.jobs.operations import ChildWork, load
from stillroom.settings import Workspace, training_environment

_Result = TypeVar("_Result")


class _ChildInput(msgspec.Struct):
    workspace: str
    function: str
    request_type: str
    request: dict[str, Any]


class _Failed(msgspec.Struct, tag="failed"):
    problem: str
    fix: str


class _Done(msgspec.Struct, tag="done"):
    result: msgspec.Raw


def run_in_child(
    workspace: Workspace,
    work: ChildWork,
    request: BaseModel,
    *,
    result: type[_Result],
    environment: dict[str, str] | None = None,
) -> _Result:
    """Calls the function of `work` in a child process and returns its result.

    All memory that the work took is free again afterwards. Without `environment` the child gets
    no secrets but the hub's tokens. Raises EngineError if the function raises one, and RunError
    if the child takes too long or crashes.
    """
    kind = type(request)
    child_input = _ChildInput(
        workspace=str(workspace.root),
        function=work.function,
        request_type=f"{kind.__module__}:{kind.__qualname__}",
        request=request.model_dump(mode="json"),
    )
    action = work.action.format_map(dict(request))
    try:
        finished = subprocess.run(
            [sys.executable, "-P", "-m", "stillroom.jobs.child"],
            input=msgspec.json.encode(child_input),
            capture_output=True,
            timeout=work.timeout_s,
            env=environment or training_environment(),
            check=True,
        )
    except subprocess.TimeoutExpired as error:
        raise RunError(f"{action} took over {work.timeout_s:g} s", work.fix) from error
    except subprocess.CalledProcessError as error:
        last_line = error.stderr.decode("utf-8", errors="replace").strip().splitlines()[-1:]
        raise RunError(f"{action} failed: {''.join(last_line)}", work.fix) from error
    answer = msgspec.json.decode(finished.stdout, type=_Failed | _Done)
    if isinstance(answer, _Failed):
        raise EngineError(answer.problem, answer.fix)
    return msgspec.json.decode(answer.result, type=result)


def main() -> None:
    """Carries out the request on standard input and writes its result to standard output."""
    child_input = msgspec.json.decode(sys.stdin.buffer.read(), type=_ChildInput)
    # From here on, what libraries print goes to standard error and not into the answer.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    try:
        request = load(child_input.request_type).model_validate(child_input.request)
        result = load(child_input.function)(Workspace(Path(child_input.workspace)), request)
        answer = _Done(msgspec.Raw(msgspec.json.encode(result)))
    except EngineError as error:
        answer = _Failed(error.problem, error.fix)
    with answers:
        answers.write(msgspec.json.encode(answer))


if __name__ == "__main__":
    main()
