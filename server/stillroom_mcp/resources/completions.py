"""Completes ids of runs, paths, models and skills, as a person types them into a host."""

import os
from collections.abc import Iterable
from itertools import islice

import anyio
from mcp.server.mcpserver import MCPServer
from mcp.types import (
    Completion,
    CompletionArgument,
    CompletionContext,
    PromptReference,
    ResourceTemplateReference,
)

from stillroom import api
from stillroom.demo import DEMO_MODELS
from stillroom.errors import InputError
from stillroom.secrecy.readable import check_readable
from stillroom.settings import Workspace
from stillroom_mcp.resources.skills import skill_texts

_MOST = 100
_MOST_ENTRIES = 5000
"""Of a folder with more entries than this, some are not offered."""
_TRAINED = frozenset({"sft", "dpo", "distill"})


def add_completions(server: MCPServer, workspace: Workspace) -> None:
    """Adds the completion of prompts' arguments and of resources' addresses to a server."""

    async def complete(
        ref: PromptReference | ResourceTemplateReference,
        argument: CompletionArgument,
        context: CompletionContext | None,
    ) -> Completion | None:
        earlier = (context.arguments if context else None) or {}
        found = await anyio.to_thread.run_sync(_found, workspace, argument, earlier)
        return Completion(values=found[:_MOST], total=len(found), has_more=len(found) > _MOST)

    server.completion()(complete)


def _found(
    workspace: Workspace, argument: CompletionArgument, earlier: dict[str, str]
) -> list[str]:
    match argument.name:
        case "run_id":
            values: Iterable[str] = (run.run_id for run in _runs(workspace))
        case "path" | "prompts" | "rows":
            values = _paths(workspace, argument.value)
        case "teacher" | "student":
            values = _models(workspace)
        case "name":
            values = dict.fromkeys(text.skill for text in skill_texts())
        case "file":
            values = (t.file for t in skill_texts() if earlier.get("name") in (None, t.skill))
        case _:
            values = ()
    return [value for value in values if value.startswith(argument.value)]


def _runs(workspace: Workspace) -> list[api.RunSummary]:
    return api.list_runs(workspace, api.ListRuns(limit=_MOST)).runs


def _models(workspace: Workspace) -> Iterable[str]:
    yield from DEMO_MODELS
    for run in _runs(workspace):
        if run.kind in _TRAINED and run.status == "succeeded":
            yield run.run_id


def _paths(workspace: Workspace, begun: str) -> list[str]:
    """Returns the files and folders of the workspace whose path begins so; no hidden ones.

    A link that leads out of the workspace is not followed, and a file that no tool reads is not
    named.
    """
    above = begun.rpartition("/")[0]
    folder = (workspace.root / above).resolve()
    is_hidden = any(part.startswith(".") for part in above.split("/"))
    if is_hidden or not folder.is_relative_to(workspace.root) or not folder.is_dir():
        return []
    prefix = f"{above}/" if above else ""
    paths: list[str] = []
    with os.scandir(folder) as entries:
        for entry in islice(entries, _MOST_ENTRIES):
            if entry.name.startswith(".") or not entry.name.isprintable():
                continue
            try:
                check_readable(folder / entry.name)
            except InputError:
                continue
            paths.append(f"{prefix}{entry.name}" + ("/" if entry.is_dir() else ""))
    return sorted(paths)
