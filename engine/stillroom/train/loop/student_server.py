"""Samples the student on a vLLM server, which loads each iteration's adapter under a new name."""

import secrets
import shutil
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio

from stillroom.errors import CallFailedError, RunError, TeacherError
from stillroom.models.multimodal import move_to_whole, whole_config
from stillroom.places import make_folder, put_folder
from stillroom.serving.model_server import ModelServer, NotServedError, ServerSettings, lora_rank
from stillroom.serving.policy import ServedPolicy
from stillroom.settings import Workspace
from stillroom.teachers.providers import endpoint_for
from stillroom.train.config.schema import TrainConfig
from stillroom.train.student.model import Student
from stillroom.types import SamplingSettings

_UNLOAD_TIMEOUT_S = 10.0


def student_server(workspace: Workspace, config: TrainConfig) -> ModelServer | None:
    """Returns the client of the server that samples the student; None if this process samples it.

    Raises InputError if the server's key is missing.
    """
    section = config.rollout.server
    if section is None:
        return None
    endpoint = endpoint_for(
        workspace, "vllm", base_url=section.base_url, api_key_env=section.api_key_env
    )
    return ModelServer(
        endpoint,
        key=workspace.read_key(endpoint.api_key_env),
        settings=ServerSettings(config.rollout.concurrency, section.timeout),
    )


@asynccontextmanager
async def open_served_student(
    server: ModelServer,
    student: Student,
    config: TrainConfig,
    sampling: SamplingSettings,
    *,
    run: Path,
    variables: Any = None,
) -> AsyncGenerator[ServedPolicy]:
    """Loads the student's current adapter into the server and yields the policy that samples it.

    Raises RunError if the server does not load the adapter.
    """
    name = f"{run.name}-{secrets.token_hex(4)}"
    folder = (run / "adapters" / name).absolute()
    await anyio.to_thread.run_sync(_write_adapter, student, folder)
    try:
        await _load(server, name, folder, rank=config.model.qlora_rank)
        try:
            yield ServedPolicy(
                server,
                name,
                student.loaded,
                sampling,
                max_context=min(student.loaded.max_context, config.rollout.max_context_window),
                include_thinking=config.rollout.include_thinking,
                variables=variables,
            )
        finally:
            with anyio.move_on_after(_UNLOAD_TIMEOUT_S, shield=True):
                await _unload(server, name)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


async def _load(server: ModelServer, name: str, folder: Path, *, rank: int) -> None:
    body = {"lora_name": name, "lora_path": str(folder)}
    served_rank = lora_rank(rank) or rank
    try:
        await server.post("/v1/load_lora_adapter", body, lambda _answer: None)
    except NotServedError as error:
        raise RunError(
            f"the server that samples the student loads no adapters: {error.problem}",
            "start it with VLLM_ALLOW_RUNTIME_LORA_UPDATING=True and --enable-lora "
            f"--max-lora-rank {served_rank}",
        ) from error
    except CallFailedError as error:
        raise RunError(
            f"the server that samples the student did not load its adapter: {error}",
            f"start it with --enable-lora --max-lora-rank {served_rank}, on a machine that reads "
            f"{folder}",
        ) from error


async def _unload(server: ModelServer, name: str) -> None:
    try:
        await server.post("/v1/unload_lora_adapter", {"lora_name": name}, lambda _answer: None)
    except (CallFailedError, TeacherError):
        # A server that is gone or has dropped the adapter itself no longer holds it.
        return


def _write_adapter(student: Student, folder: Path) -> None:
    """Writes the adapter to a temporary folder and renames it: no server ever reads half of it."""
    temporary = folder.with_name(f".{folder.name}.partial")
    model: Any = student.module
    make_folder(temporary)
    model.save_pretrained(temporary, save_embedding_layers=False)
    if (whole := whole_config(student.base)) is not None:
        # The server has the whole multimodal model.
        move_to_whole(temporary, whole.model_type)
    put_folder(temporary, folder)
