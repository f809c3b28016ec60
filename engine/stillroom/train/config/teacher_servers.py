"""Builds the client of a served teacher from config.yml's `teacher` section; needs no torch."""

from stillroom.serving.model_server import ModelServer, ServerSettings
from stillroom.serving.scoring import ServedTeacher
from stillroom.settings import Workspace
from stillroom.teachers.providers import endpoint_for
from stillroom.train.config.distill_sections import DatasetTeacher


def served_teacher(
    workspace: Workspace,
    teacher: DatasetTeacher,
    *,
    top_k: int | None = None,
) -> ServedTeacher:
    """Returns a client of the teacher's server; nothing is sent yet.

    top_k: the number of likeliest tokens that the server returns at each position; None: none.
    Raises InputError if the server's key is missing.
    """
    section = teacher.section
    provider = "sglang" if section.provider == "sglang" else "vllm"
    endpoint = endpoint_for(
        workspace, provider, base_url=teacher.base_url, api_key_env=section.api_key_env
    )
    server = ModelServer(
        endpoint,
        key=workspace.read_key(endpoint.api_key_env),
        settings=ServerSettings(section.concurrency, section.timeout),
    )
    return ServedTeacher(server, teacher.path, provider=provider, top_k=top_k)
