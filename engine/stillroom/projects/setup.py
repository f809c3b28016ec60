"""Checks this machine before a run: what is installed, what is missing, and how to install it."""

import importlib.metadata
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import Annotated

import msgspec
from pydantic import Field

from stillroom import __version__
from stillroom.demo import DEMO_MODELS
from stillroom.errors import EngineError
from stillroom.models.resolve import locate_model
from stillroom.secrecy.environments import bare_environment
from stillroom.settings import Workspace
from stillroom.teachers.providers import IN_PROCESS, ProviderName, endpoint_for
from stillroom.types import OthersText, OwnText
from stillroom.validation import StrictModel, Where

_EXTRAS = {
    "train": ("torch", "transformers", "peft"),
    "qlora": ("bitsandbytes",),
    "gguf": ("gguf", "xllamacpp"),
    "curate": ("rensa", "eld"),
    "traces": ("pyarrow", "brotli"),
    "browse": ("playwright",),
    "ray": ("ray",),
    "track": ("tensorboard", "wandb", "trackio"),
}
_LOW_DISK_GB = 5


class CheckSetup(StrictModel):
    """The request to check whether a machine is ready for the planned work."""

    model: Annotated[str | None, Field(description="Student or in-process teacher")] = None
    provider: Annotated[
        ProviderName | None, Field(description="Teacher's provider: is its key set?")
    ] = None
    base_url: str | None = None
    api_key_env: str | None = None
    where: Where = None


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of one check."""

    name: str
    status: str
    """One of `ok`, `missing` (required for some work) and `note`."""
    detail: OwnText
    fix: OwnText | None = None
    machine_says: OthersText | None = None
    """The response of another machine, unchanged."""


class SetupReport(msgspec.Struct, frozen=True, kw_only=True):
    """The outcomes of all checks; `ready` if none of them is `missing`."""

    ready: bool
    checks: list[Check]


def check_setup(workspace: Workspace, request: CheckSetup) -> SetupReport:
    """Runs all checks and returns their outcomes, without network requests or loading a model."""
    checks = [
        Check(
            name="stillroom",
            status="ok",
            detail=f"{__version__} on Python {platform.python_version()} ({sys.platform})",
        ),
        _workspace_check(workspace),
        *(_extra_check(extra, packages) for extra, packages in _EXTRAS.items()),
        _gpu_check(),
        _demo_check(),
        *_requested_checks(workspace, request),
    ]
    return SetupReport(ready=all(check.status != "missing" for check in checks), checks=checks)


def _workspace_check(workspace: Workspace) -> Check:
    free_gb = shutil.disk_usage(workspace.root).free / 1e9
    detail = f"{workspace.root}, {free_gb:.0f} GB free"
    if free_gb < _LOW_DISK_GB:
        return Check(
            name="workspace",
            status="note",
            detail=detail,
            fix="free up disk space: models and checkpoints need several GB",
        )
    return Check(name="workspace", status="ok", detail=detail)


def _extra_check(extra: str, packages: tuple[str, ...]) -> Check:
    try:
        versions = [f"{name} {importlib.metadata.version(name)}" for name in packages]
    except importlib.metadata.PackageNotFoundError as error:
        # Most requests need only [train]; errors of the others name their extra.
        status = "missing" if extra == "train" else "note"
        return Check(
            name=f"[{extra}]",
            status=status,
            detail=f"{error.name or 'a package'} is not installed",
            fix=f"pip install 'stillroom[{extra}]'",
        )
    return Check(name=f"[{extra}]", status="ok", detail=", ".join(versions))


def _gpu_check() -> Check:
    command = shutil.which("nvidia-smi")
    if command is None:
        return Check(
            name="gpu",
            status="note",
            detail="no GPU found: the processor suffices to train a model of 135M parameters on a "
            "few hundred short rows (20 minutes on 2 cores; `minutes` limits run_recipe), but is "
            "slow for larger models",
            fix="for larger models, train on a machine with ssh access or a rented one: see "
            "list_machines",
        )
    try:
        query = subprocess.run(
            [command, "--query-gpu=name,memory.total,memory.free", "--format=csv,noheader"],
            capture_output=True,
            timeout=10,
            env=bare_environment(),
            check=True,
            text=True,
        )
    except (subprocess.SubprocessError, OSError) as error:
        return Check(name="gpu", status="note", detail=f"nvidia-smi failed: {error}")
    return Check(name="gpu", status="ok", detail="; ".join(query.stdout.strip().splitlines()))


def _demo_check() -> Check:
    missing = [n for n, p in DEMO_MODELS.items() if not (p / "model.safetensors").is_file()]
    if missing:
        return Check(
            name="demo models",
            status="missing",
            detail=f"the installed package has no weights of {', '.join(missing)}",
            fix="reinstall stillroom",
        )
    return Check(name="demo models", status="ok", detail=", ".join(DEMO_MODELS))


def _requested_checks(workspace: Workspace, request: CheckSetup) -> Iterator[Check]:
    is_in_process = request.provider in IN_PROCESS
    if (request.provider or request.base_url) is not None and not is_in_process:
        yield _provider_check(workspace, request)
    if request.model is not None:
        try:
            location = locate_model(workspace, request.model)
        except EngineError as error:
            yield Check(name="model", status="missing", detail=error.problem, fix=error.fix)
        else:
            if location.is_local:
                yield Check(
                    name="model", status="ok", detail=f"{request.model}: {location.location}"
                )
            else:
                yield Check(
                    name="model",
                    status="note",
                    detail=f"{request.model}: not found on this machine, so it must be the id of "
                    "a model on the hub; whether the hub has it was not checked",
                    fix="the model is downloaded on first use; without a connection to the hub, "
                    "name a folder, a GGUF file or an installed Python package with the model",
                )


def _provider_check(workspace: Workspace, request: CheckSetup) -> Check:
    try:
        endpoint = endpoint_for(
            workspace,
            request.provider or "openai",
            base_url=request.base_url,
            api_key_env=request.api_key_env,
        )
    except EngineError as error:
        return Check(name="teacher key", status="missing", detail=error.problem, fix=error.fix)
    key = f"the key in {endpoint.api_key_env}" if endpoint.api_key_env else "no key"
    return Check(name="teacher key", status="ok", detail=f"{endpoint.base_url} with {key}")
