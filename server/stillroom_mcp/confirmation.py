"""Asks a person, through a host that can, before a run spends without a limit."""

from typing import Any

import anyio
from mcp.server.mcpserver import Context
from mcp.types import (
    ElicitRequest,
    ElicitRequestedSchema,
    ElicitRequestFormParams,
    ElicitResult,
    InputRequiredResult,
)
from mcp.types.version import MODERN_PROTOCOL_VERSIONS
from pydantic import BaseModel

from stillroom import api
from stillroom.errors import InputError
from stillroom.fences import on_one_line
from stillroom.settings import Workspace

_KEY = "spending"
_LONGEST_NAME = 120
_SCHEMA: ElicitRequestedSchema = {
    "type": "object",
    "properties": {
        "start": {"type": "boolean", "title": "Start the run"},
        "budget_usd": {
            "type": "number",
            "title": "Most dollars that it may cost",
            "description": "Leave empty for no limit.",
            "minimum": 0,
        },
    },
    "required": ["start"],
}


async def confirmed(
    workspace: Workspace, request: BaseModel, context: Context[Any, Any]
) -> BaseModel | InputRequiredResult:
    """Returns the request once a person has agreed to it, with the budget that they set.

    Nobody is asked if the request has a budget or costs nothing, nor if the host cannot ask. The
    result is what the host must ask first, where it does that between two calls. Raises InputError
    if the person declined.
    """
    declared = context.client_capabilities
    if declared is None or declared.elicitation is None:
        return request
    spending = await anyio.to_thread.run_sync(api.unlimited_spending, workspace, request)
    if spending is None:
        return request
    question = _question(spending)
    if context.protocol_version not in MODERN_PROTOCOL_VERSIONS:
        answer = await context.session.elicit_form(question, _SCHEMA, context.request_id)
        return _agreed(request, answer)
    answer = (context.input_responses or {}).get(_KEY)
    if isinstance(answer, ElicitResult):
        return _agreed(request, answer)
    params = ElicitRequestFormParams(message=question, requested_schema=_SCHEMA)
    return InputRequiredResult(input_requests={_KEY: ElicitRequest(params=params)})


def _question(spending: api.UnlimitedSpending) -> str:
    model = on_one_line(spending.model, most=_LONGEST_NAME)
    host = on_one_line(spending.host, most=_LONGEST_NAME)
    return f"The agent wants to call {model} at {host} without a spending cap. Start the run?"


def _agreed(request: BaseModel, answer: ElicitResult) -> BaseModel:
    content = answer.content or {}
    if answer.action != "accept" or content.get("start") is not True:
        raise InputError(
            "the user did not agree to spend without a cap",
            "ask what it may cost, and call again with budget_usd (dry_run forecasts the cost)",
        )
    budget_usd = content.get("budget_usd")
    if not isinstance(budget_usd, int | float) or budget_usd <= 0:
        return request
    # Checked as if the agent had given it.
    given = {name: getattr(request, name) for name in request.model_fields_set}
    return type(request).model_validate(given | {"budget_usd": budget_usd})
