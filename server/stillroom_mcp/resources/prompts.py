"""Prompts that a user can choose in a host, and completions for their arguments."""

import os
from collections.abc import Iterable
from itertools import islice
from typing import Annotated

import anyio
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ResourceError
from mcp.server.mcpserver.prompts.base import Message, UserMessage
from mcp.shared.exceptions import MCPError
from mcp.types import (
    INVALID_PARAMS,
    Completion,
    CompletionArgument,
    CompletionContext,
    EmbeddedResource,
    PromptReference,
    ResourceTemplateReference,
    TextResourceContents,
)
from pydantic import Field

from stillroom import api
from stillroom.demo import DEMO_MODELS
from stillroom.errors import InputError
from stillroom.fences import short_line
from stillroom.secrecy.readable import check_readable
from stillroom.settings import Workspace
from stillroom_mcp.resources.provide import run_text
from stillroom_mcp.resources.texts import skill_text, skill_texts

_MAX_LENGTH = 300
_COST_RULES = (
    "Before spending anything, show me the forecast of dry_run and set budget_usd. "
    "At the end, compare the base and the trained student, with intervals, and say plainly "
    "if training did not help."
)

_Prompts = Annotated[str, Field(description="File of prompts in the workspace")]
_Teacher = Annotated[str, Field(description="Teacher model, as its provider names it")]
_Student = Annotated[str, Field(description="Student model: folder, hub id or run")]


def add_prompts(server: MCPServer, workspace: Workspace) -> None:
    """Adds the prompts to a server."""

    def off_policy(prompts: _Prompts, teacher: _Teacher, student: _Student) -> list[Message]:
        instruction = (
            f"Distil the teacher {_one_line(teacher)} into the student {_one_line(student)} "
            f"off-policy, on the prompts in {_one_line(prompts)}: rollouts, curation, training, "
            "evaluation."
        )
        return _with_skills(f"{instruction} {_COST_RULES}", "off-policy-distillation")

    def on_policy(prompts: _Prompts, teacher: _Teacher, student: _Student) -> list[Message]:
        instruction = (
            f"Distil the teacher {_one_line(teacher)} into the student {_one_line(student)} "
            f"on-policy, on the prompts in {_one_line(prompts)}: the student answers, the teacher "
            "scores its tokens. First say whether these two models allow it, and what the "
            "alternatives are."
        )
        return _with_skills(f"{instruction} {_COST_RULES}", "on-policy-distillation")

    def curate(
        rows: Annotated[str, Field(description="File of rollouts or rows in the workspace")],
    ) -> list[Message]:
        instruction = (
            f"Curate {_one_line(rows)}: say what it contains, which filters fit and what each "
            "would drop, with example rows. Drop nothing before I have seen that; then filter, and "
            "show how many rows were kept, and dropped for each reason."
        )
        return _with_skills(instruction, "rollout-quality")

    def debug_run(run_id: Annotated[str, Field(description="Id of the run")]) -> list[Message]:
        instruction = (
            f"Find out what happened in run {_one_line(run_id)}. Its state is below; read its log "
            "and events with get_run_logs. Name the cause with the lines that show it, and the "
            "smallest change that fixes it, with its cost. Start nothing before I agree."
        )
        try:
            text = run_text(workspace, run_id)
        except ResourceError as error:
            raise MCPError(INVALID_PARAMS, str(error)) from error
        state = TextResourceContents(
            uri=f"run://{_one_line(run_id)}", mime_type="application/json", text=text
        )
        messages = _with_skills(instruction, "debug-run")
        return [*messages, UserMessage(EmbeddedResource(type="resource", resource=state))]

    prompt = server.prompt
    prompt(
        name="distill-off-policy",
        title="Distil a teacher from its answers",
        description="Rollouts of a teacher, curation, SFT, evaluation.",
    )(off_policy)
    prompt(
        name="distill-on-policy",
        title="Distil a teacher on the student's own answers",
        description="The student answers, the teacher scores each token, the student learns.",
    )(on_policy)
    prompt(
        name="curate",
        title="Curate rows",
        description="What a file contains, which filters fit, and what they would drop.",
    )(curate)
    prompt(
        name="debug-run",
        title="Find out what happened to a run",
        description="Why a run failed, stopped or learnt nothing, and the smallest fix.",
    )(debug_run)


def _one_line(text: str) -> str:
    return short_line(text, max_characters=_MAX_LENGTH)


def _with_skills(instruction: str, *skills: str) -> list[Message]:
    """Returns the instruction, followed by the texts of the skills if they are installed."""
    messages: list[Message] = [UserMessage(instruction)]
    for name in skills:
        if (text := skill_text(name)) is not None:
            contents = TextResourceContents(
                uri=text.uri, mime_type="text/markdown", text=text.read()
            )
            resource = EmbeddedResource(type="resource", resource=contents)
            messages.append(UserMessage(resource))
    return messages


_MAX_COMPLETIONS = 100
_MAX_ENTRIES = 5000
"""The maximum number of entries of a folder that are considered for completions."""
_TRAINED = frozenset({"sft", "dpo", "distill"})


def add_completions(server: MCPServer, workspace: Workspace) -> None:
    """Adds completions for the arguments of prompts and the URIs of resources to a server."""

    async def complete(
        ref: PromptReference | ResourceTemplateReference,
        argument: CompletionArgument,
        context: CompletionContext | None,
    ) -> Completion | None:
        other_arguments = (context.arguments if context else None) or {}
        values = await anyio.to_thread.run_sync(_completions, workspace, argument, other_arguments)
        return Completion(
            values=values[:_MAX_COMPLETIONS],
            total=len(values),
            has_more=len(values) > _MAX_COMPLETIONS,
        )

    server.completion()(complete)


def _completions(
    workspace: Workspace, argument: CompletionArgument, other_arguments: dict[str, str]
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
            values = (
                t.file for t in skill_texts() if other_arguments.get("name") in (None, t.skill)
            )
        case _:
            values = ()
    return [value for value in values if value.startswith(argument.value)]


def _runs(workspace: Workspace) -> list[api.RunSummary]:
    return api.list_runs(workspace, api.ListRuns(limit=_MAX_COMPLETIONS)).runs


def _models(workspace: Workspace) -> Iterable[str]:
    yield from DEMO_MODELS
    for run in _runs(workspace):
        if run.kind in _TRAINED and run.status == "succeeded":
            yield run.run_id


def _paths(workspace: Workspace, typed: str) -> list[str]:
    """Returns the files and folders in the folder of a partly typed path.

    Hidden files, files that no tool reads, and links out of the workspace are left out.
    """
    parent = typed.rpartition("/")[0]
    folder = (workspace.root / parent).resolve()
    is_hidden = any(part.startswith(".") for part in parent.split("/"))
    if is_hidden or not folder.is_relative_to(workspace.root) or not folder.is_dir():
        return []
    prefix = f"{parent}/" if parent else ""
    paths: list[str] = []
    with os.scandir(folder) as entries:
        for entry in islice(entries, _MAX_ENTRIES):
            if entry.name.startswith(".") or not entry.name.isprintable():
                continue
            try:
                check_readable(folder / entry.name)
            except InputError:
                continue
            paths.append(f"{prefix}{entry.name}" + ("/" if entry.is_dir() else ""))
    return sorted(paths)
