"""Runs, datasets, skills and documentation as MCP resources.

Runs and datasets contain the results of get_run and inspect_examples, so text from others is marked
and secrets are removed. A dataset URI whose path is outside the workspace is refused.
"""

import json
from collections.abc import Callable
from typing import Any

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ResourceError, ResourceNotFoundError
from mcp.types import Resource as ListedResource
from pydantic import BaseModel

from stillroom import api
from stillroom.api import operation_named
from stillroom.errors import EngineError, InputError, RunError
from stillroom.settings import Workspace
from stillroom_mcp.answers import structured_content, structured_result
from stillroom_mcp.fencing import fenced_error
from stillroom_mcp.resources.texts import page_text, skill_text, skill_texts

_JSON, _MARKDOWN = "application/json", "text/markdown"
_MAX_RUNS = 20
_ROWS = 5


def run_text(workspace: Workspace, run_id: str) -> str:
    """Returns the result of get_run as JSON. Raises ResourceError with a fix."""
    return _operation_json(workspace, "get_run", api.GetRun(run_id=run_id))


def add_resources(server: MCPServer, workspace: Workspace) -> None:
    """Adds the resource templates to a server."""

    def run(run_id: str) -> str:
        return run_text(workspace, run_id)

    def metrics(run_id: str) -> str:
        result = _call(workspace, lambda: api.read_run_metrics(workspace, run_id))
        return json.dumps(structured_result(workspace, result), ensure_ascii=False)

    def dataset(path: str) -> str:
        # The URI template refuses `..`; this check also covers links.
        if not workspace.path(path).resolve().is_relative_to(workspace.root.resolve()):
            raise ResourceNotFoundError(
                f"{path!r} is outside the workspace\nfix: name a file inside it, or call "
                "inspect_examples, which may read any file that the user names"
            )
        return _operation_json(
            workspace, "inspect_examples", api.InspectExamples(path=path, n=_ROWS)
        )

    def skill(name: str, file: str) -> str:
        text = skill_text(name, file)
        if text is None:
            uris = ", ".join(text.uri for text in skill_texts())
            raise ResourceNotFoundError(
                f"unknown skill file {name}/{file}\nfix: read one of {uris}"
            )
        return text.read()

    def docs(page: str) -> str:
        return _call(workspace, lambda: page_text(page))

    resource = server.resource
    resource(
        "run://{run_id}",
        title="Run",
        description="Status, progress, metrics, result or error of a run, and the next step.",
        mime_type=_JSON,
    )(run)
    resource(
        "run://{run_id}/metrics",
        title="Metrics of a run",
        description="The metrics of a run over its steps, in columns.",
        mime_type=_JSON,
    )(metrics)
    resource(
        "dataset://{+path}",
        title="Dataset",
        description=f"The first {_ROWS} rows of a file in the workspace, as text.",
        mime_type=_JSON,
    )(dataset)
    resource(
        "skill://{name}/{+file}",
        title="Skill",
        description="Instructions for a job with these tools, step by step.",
        mime_type=_MARKDOWN,
    )(skill)
    resource(
        "docs://{+page}",
        title="Documentation",
        description="A page of the documentation; docs/traces.md is docs://traces.",
        mime_type=_MARKDOWN,
    )(docs)


def listed_resources(workspace: Workspace) -> list[ListedResource]:
    """Returns the resources of the skills (SKILL.md) and of the newest runs."""
    skills = [
        ListedResource(
            uri=text.uri,
            name=text.skill,
            title=f"Skill: {text.skill}",
            description=text.description(),
            mime_type=_MARKDOWN,
        )
        for text in skill_texts()
        if text.file == "SKILL.md"
    ]
    page = api.list_runs(workspace, api.ListRuns(limit=_MAX_RUNS))
    runs = [
        ListedResource(
            uri=f"run://{run.run_id}",
            name=run.run_id,
            title=f"Run: {run.kind}, {run.status}",
            description=f"Created at {run.created_at}.",
            mime_type=_JSON,
        )
        for run in page.runs
    ]
    return skills + runs


def _operation_json(workspace: Workspace, name: str, request: BaseModel) -> str:
    """Returns the structured result of an operation as JSON."""
    operation = operation_named(name)
    result = _call(workspace, lambda: api.carry_out(workspace, operation, request))
    return json.dumps(structured_content(workspace, operation, request, result), ensure_ascii=False)


def _call(workspace: Workspace, function: Callable[[], Any]) -> Any:
    """Calls the function; its errors become resource errors that name a fix."""
    try:
        return function()
    except EngineError as error:
        is_missing = isinstance(error, RunError | InputError)
        kind = ResourceNotFoundError if is_missing else ResourceError
        raise kind(workspace.redactor().redact_text(fenced_error(error))) from error
    except OSError as error:
        raise ResourceError(f"operating system error: {error}\nfix: check permissions") from error
