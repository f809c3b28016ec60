"""What a person is asked before a call is carried out, by hosts that can ask (MCP's elicitation).

Two things need a person's word: spending without a cap, and sending a key to a host for which it
was not made. Hosts that cannot ask start the former at once, and are refused the latter.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import anyio
import msgspec
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
from stillroom.secrecy.keys import KeyNotAllowedError, allow_host, keys_file
from stillroom.settings import Workspace

_LONGEST_NAME = 120
_SPENDING = "spending"
_MAY_SPEND: ElicitRequestedSchema = {
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
_MAY_SEND: ElicitRequestedSchema = {
    "type": "object",
    "properties": {"allow": {"type": "boolean", "title": "Send the key to this host"}},
    "required": ["allow"],
}


@dataclass(frozen=True, slots=True)
class Agreed:
    """The result of a call, and its request as a person agreed to it."""

    request: BaseModel
    result: msgspec.Struct


async def with_consent(
    workspace: Workspace,
    request: BaseModel,
    context: Context[Any, Any],
    call: Callable[[BaseModel], Awaitable[msgspec.Struct]],
) -> Agreed | InputRequiredResult:
    """Returns the result of a call once a person has agreed to all that needs their word.

    An InputRequiredResult is what the host must ask first, where it does that between two calls.
    Raises InputError if the person declined, or if a key needs their word and the host cannot ask.
    """
    keys = set[tuple[str, str]]()
    while True:
        try:
            agreed = await _confirmed(workspace, request, context)
            if isinstance(agreed, InputRequiredResult):
                return agreed
            return Agreed(agreed, await call(agreed))
        except KeyNotAllowedError as refused:
            key = (refused.name, refused.host)
            if key in keys or not _can_ask(context):
                raise
            keys.add(key)
            if (question := await _allowed(refused, context)) is not None:
                return question


def _can_ask(context: Context[Any, Any]) -> bool:
    declared = context.client_capabilities
    return declared is not None and declared.elicitation is not None


async def _asked(
    context: Context[Any, Any], name: str, question: str, schema: ElicitRequestedSchema
) -> ElicitResult | InputRequiredResult:
    """Returns the person's answer, or what the host must ask them before it calls again."""
    if context.protocol_version not in MODERN_PROTOCOL_VERSIONS:
        return await context.session.elicit_form(question, schema, context.request_id)
    answer = (context.input_responses or {}).get(name)
    if isinstance(answer, ElicitResult):
        return answer
    params = ElicitRequestFormParams(message=question, requested_schema=schema)
    return InputRequiredResult(input_requests={name: ElicitRequest(params=params)})


async def _confirmed(
    workspace: Workspace, request: BaseModel, context: Context[Any, Any]
) -> BaseModel | InputRequiredResult:
    """Returns the request once a person has agreed to its cost, with the budget that they set.

    Nobody is asked if the request has a budget or costs nothing, nor if the host cannot ask.
    """
    if not _can_ask(context):
        return request
    spending = await anyio.to_thread.run_sync(api.unlimited_spending, workspace, request)
    if spending is None:
        return request
    question = (
        f"The agent wants to call {_shown(spending.model)} at {_shown(spending.host)} without a "
        "spending cap. Start the run?"
    )
    answer = await _asked(context, _SPENDING, question, _MAY_SPEND)
    return answer if isinstance(answer, InputRequiredResult) else _within(request, answer)


def _shown(name: str) -> str:
    return on_one_line(name, most=_LONGEST_NAME)


def _within(request: BaseModel, answer: ElicitResult) -> BaseModel:
    """Returns the request with the budget of the person's answer, if they set one."""
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


async def _allowed(
    refused: KeyNotAllowedError, context: Context[Any, Any]
) -> InputRequiredResult | None:
    """Returns None once a person has agreed that a key is sent to a host, which keys.yml then says.

    Otherwise returns what the host must ask them first.
    """
    name, host = _shown(refused.name), _shown(refused.host)
    question = (
        f"The agent wants to send the key in {name} to {host}, which is not "
        f"allowed yet. May it be sent there, now and later? ({keys_file()} will allow it.)"
    )
    # The answer is bound to the question: it allows no other pair.
    answer = await _asked(context, f"key {name} {host}", question, _MAY_SEND)
    if isinstance(answer, InputRequiredResult):
        return answer
    if answer.action != "accept" or (answer.content or {}).get("allow") is not True:
        raise InputError(
            f"the user did not agree that the key in {name} is sent to {host}",
            "ask which endpoint and which key (api_key_env) they mean",
        )
    await anyio.to_thread.run_sync(allow_host, refused.name, refused.host)
    return None
