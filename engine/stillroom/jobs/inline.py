"""Short work that needs heavy libraries or runs a model's chat template: in a child, at once.

The child reads the request from its standard input and writes the result to its standard output.
"""

import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import msgspec

from stillroom.data.inspect import InspectExamples, Inspection, inspect_examples
from stillroom.errors import EngineError, RunError, missing_extra
from stillroom.settings import Workspace, training_environment

TIMEOUT_S = 60.0


class _Asked(msgspec.Struct):
    workspace: str
    request: dict[str, Any]


class _Failed(msgspec.Struct, tag="failed"):
    problem: str
    fix: str


class _Done(msgspec.Struct, tag="done"):
    inspection: Inspection


def inspect_with_model(workspace: Workspace, request: InspectExamples) -> Inspection:
    """Returns the rows with the model's mask, rendered in a child process with a deadline."""
    asked = _Asked(str(workspace.root), request.model_dump(mode="json"))
    try:
        finished = subprocess.run(
            [sys.executable, "-P", "-m", "stillroom.jobs.inline"],
            input=msgspec.json.encode(asked),
            capture_output=True,
            timeout=TIMEOUT_S,
            env=training_environment(),
            check=True,
        )
    except subprocess.TimeoutExpired as error:
        raise RunError(
            f"rendering with the chat template of {request.model!r} took over {TIMEOUT_S:g} s",
            "look at fewer rows, or check the template of the model",
        ) from error
    except subprocess.CalledProcessError as error:
        last = error.stderr.decode("utf-8", errors="replace").strip().splitlines()[-1:]
        raise RunError(
            f"rendering with the chat template of {request.model!r} failed: {''.join(last)}",
            "check the model's tokenizer files",
        ) from error
    answer = msgspec.json.decode(finished.stdout, type=_Failed | _Done)
    if isinstance(answer, _Failed):
        raise EngineError(answer.problem, answer.fix)
    return answer.inspection


def _inspect(asked: _Asked) -> Inspection:
    workspace = Workspace(Path(asked.workspace))
    request = InspectExamples.model_validate(asked.request)
    try:
        from stillroom.models.load import load_tokenizer
        from stillroom.models.resolve import locate_model
    except ModuleNotFoundError as error:
        raise missing_extra("train", "showing a model's mask") from error
    location = locate_model(workspace, cast("str", request.model))
    return inspect_examples(workspace, request, tokenizer=load_tokenizer(location))


def main() -> None:
    """Answers one request."""
    asked = msgspec.json.decode(sys.stdin.buffer.read(), type=_Asked)
    try:
        answer: _Done | _Failed = _Done(_inspect(asked))
    except EngineError as error:
        answer = _Failed(error.problem, error.fix)
    sys.stdout.buffer.write(msgspec.json.encode(answer))


if __name__ == "__main__":
    main()
