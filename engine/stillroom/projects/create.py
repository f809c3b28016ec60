"""Writes a new project folder from a template; existing files are never overwritten."""

import gzip
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from pydantic import Field

from stillroom.demo.world import heldout_tasks, task_row, training_tasks
from stillroom.errors import InputError
from stillroom.files import write_atomic
from stillroom.settings import Workspace
from stillroom.validation import StrictModel

_TEMPLATES = Path(__file__).parent / "templates"
_DEMO_FILES = Path(__file__).parent.parent / "demo" / "project"
_NUM_PROMPTS = 2000
_NUM_HELDOUT = 600


class CreateProject(StrictModel):
    """The request for a project folder with all files that a first run needs."""

    path: Annotated[str, Field(description="Folder; existing files are not replaced")] = "."
    template: Annotated[
        Literal["demo", "starter", "on-policy-agent", "refine", "other-tokenizer", "traces"],
        Field(description="starter: for your own prompts; the others run unchanged"),
    ] = "demo"
    seed: Annotated[int, Field(description="Of the demo tasks")] = 0


class ProjectResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of create_project: the folder, and the files that were written into it."""

    folder: str
    template: str
    files: list[str]


def create_project(workspace: Workspace, request: CreateProject) -> ProjectResult:
    """Writes the template's files.

    Raises InputError, and writes nothing, if one of them already exists or the folder is outside
    the workspace.
    """
    folder = workspace.writable(request.path, label="path")
    files = dict(_template_files(request))
    existing = sorted(name for name in files if (folder / name).exists())
    if existing:
        raise InputError(
            f"{folder} already has {', '.join(existing)}",
            "choose another path, or remove these files first",
        )
    for name, data in files.items():
        write_atomic(folder / name, data)
    return ProjectResult(
        folder=workspace.shown(folder), template=request.template, files=sorted(files)
    )


def _template_files(request: CreateProject) -> Iterator[tuple[str, bytes]]:
    """Yields the name and content of each file of the template."""
    folder = _TEMPLATES / request.template
    # Installers compile the Python files of a template next to them.
    files = (path for path in folder.rglob("*") if "__pycache__" not in path.parts)
    for path in sorted(path for path in files if path.is_file()):
        # Some archives omit dot files, so the template's file has no dot.
        name = ".gitignore" if path.name == "gitignore" else path.relative_to(folder).as_posix()
        data = path.read_bytes()
        yield name.removesuffix(".gz"), gzip.decompress(data) if name.endswith(".gz") else data
    if request.template not in ("starter", "traces"):
        for name in ("tools.py", "rewards.py"):
            yield name, (_DEMO_FILES / name).read_bytes()
        prompts = training_tasks(_NUM_PROMPTS, seed=request.seed)
        yield "prompts.jsonl", _jsonl([task_row(task) for task in prompts])
        held_out = heldout_tasks(_NUM_HELDOUT, seed=request.seed)
        yield "heldout.jsonl", _jsonl([task_row(task) for task in held_out])


def _jsonl(rows: Sequence[object]) -> bytes:
    return b"".join(msgspec.json.encode(row) + b"\n" for row in rows)
