"""Plans the verification of an export: the evaluation to repeat, and the program to load it."""

import importlib.util
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from stillroom.errors import DataError, EngineError, InputError
from stillroom.evaluate.files import RESULT_FILE, Evaluation
from stillroom.evaluate.request import EvaluateModel, EvaluationPlan, plan_evaluation
from stillroom.files import read_json
from stillroom.models.resolve import ModelLocation, locate_model
from stillroom.run_folder import RunFolder
from stillroom.settings import Workspace

LLAMA_SERVER = "llama-server"
_SERVER_FOLDERS = ("build/bin", "bin", ".")
XLLAMACPP_SERVER = (sys.executable, "-P", "-m", "stillroom.export.gguf.server")


@dataclass(frozen=True, slots=True)
class Verification:
    """A validated plan for verifying an export."""

    run_folder: Path
    """The folder of the run that evaluated the checkpoint."""
    evaluation: Evaluation
    request: EvaluateModel
    """The request that evaluated the checkpoint, limited to the number of prompts to verify."""
    plan: EvaluationPlan
    llama_server: Sequence[str]
    """The command of llama.cpp's server, for format gguf."""

    @property
    def run_id(self) -> str:
        """The run that evaluated the checkpoint."""
        return self.run_folder.name

    def plan_for_files(self, workspace: Workspace, **changes: Any) -> EvaluationPlan:
        """Returns the plan of the same evaluation for the written files; `changes` name them."""
        return plan_evaluation(workspace, self.request.model_copy(update=changes))


def plan_verification(
    workspace: Workspace, checkpoint: ModelLocation, *, n: int, is_gguf: bool, checkout: str | None
) -> Verification:
    """Returns the plan for verifying an export. checkout: a checkout of llama.cpp with its server.

    Raises InputError if the checkpoint was not evaluated, or if llama.cpp's server, which verifies
    GGUF files, is not installed.
    """
    for file in sorted(workspace.runs.glob(f"*/{RESULT_FILE}"), key=_start_time, reverse=True):
        request = _request_of(file)
        if request is None or not _is_evaluation_of(workspace, request, checkpoint):
            continue
        request = request.model_copy(update={"n": min(n, request.n or n)})
        return Verification(
            file.parent,
            read_json(file, Evaluation),
            request,
            plan_evaluation(workspace, request),
            _llama_server(workspace, checkout) if is_gguf else (),
        )
    raise InputError(
        f"verify compares with an evaluation of {checkpoint.name!r}, but there is none",
        f"call evaluate_model(model={checkpoint.name}, data=<held-out prompts>) first, or leave "
        "out verify",
    )


def _start_time(path: Path) -> str:
    """Returns an evaluation's recorded start time; copied files may have other times."""
    with suppress(OSError, DataError):
        return RunFolder(path.parent).read().created_at
    return ""


def _request_of(result_file: Path) -> EvaluateModel | None:
    """Returns an evaluation's request, changed to one answer per task, without guard and teacher.

    Returns None if it cannot be read.
    """
    try:
        document: Mapping[str, Any] = RunFolder(result_file.parent).read_request().request
        overrides = {"sampled_prompts": 0, "guard": None, "teacher": None, "budget_usd": None}
        return EvaluateModel.model_validate({**document, **overrides, "samples_per_prompt": 1})
    except (OSError, DataError, ValidationError):
        return None


def _is_evaluation_of(
    workspace: Workspace, request: EvaluateModel, checkpoint: ModelLocation
) -> bool:
    try:
        name = request.model
        if request.provider == "demo" and not name.startswith("demo/"):
            name = f"demo/{name}"
        return locate_model(workspace, name).location == checkpoint.location
    except EngineError:
        return False  # the model was moved or deleted


def has_llama_server() -> bool:
    """Returns whether llama.cpp's server, which verifies GGUF files, is installed."""
    return bool(shutil.which(LLAMA_SERVER) or importlib.util.find_spec("xllamacpp"))


def _llama_server(workspace: Workspace, checkout: str | None) -> Sequence[str]:
    """Returns the command of llama.cpp's server. Raises InputError if it is not installed."""
    folders = (
        []
        if checkout is None
        else [workspace.path(checkout) / subfolder for subfolder in _SERVER_FOLDERS]
    )
    built = next((f / LLAMA_SERVER for f in folders if (f / LLAMA_SERVER).is_file()), None)
    installed = built or shutil.which(LLAMA_SERVER)
    if installed is not None:
        return [str(installed)]
    if importlib.util.find_spec("xllamacpp") is not None:
        return XLLAMACPP_SERVER
    raise InputError(
        "verify loads the GGUF file with llama.cpp, but the package xllamacpp is not installed, "
        f"and {LLAMA_SERVER} is neither on the PATH nor in the checkout (build/bin)",
        "run `pip install 'stillroom[gguf]'`, or install llama.cpp; or leave out verify and test "
        "the file by hand",
    )
