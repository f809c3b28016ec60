"""Questions to the user before a call, through hosts that support MCP's elicitation.

Two things need the user's consent: spending without a cap, and sending a key to a host that is not
allowed for it. If the host cannot ask, spending starts without a question and the key is refused.
"""

import math
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
from stillroom.fences import short_line
from stillroom.secrecy.keys import KeyNotAllowedError, allow_host, keys_file
from stillroom.settings import Workspace

_LONGEST_NAME = 120
_SPENDING = "spending"
_MIN_BUDGET_USD = 0.01
_SPENDING_FORM: ElicitRequestedSchema = {
    "type": "object",
    "properties": {
        "start": {"type": "boolean", "title": "Start the run"},
        "budget_usd": {
            "type": "number",
            "title": "Spending cap in US dollars",
            "description": "Leave empty for no limit.",
            "minimum": _MIN_BUDGET_USD,
        },
    },
    "required": ["start"],
}
_KEY_FORM: ElicitRequestedSchema = {
    "type": "object",
    "properties": {"allow": {"type": "boolean", "title": "Send the key to this host"}},
    "required": ["allow"],
}


@dataclass(frozen=True, slots=True)
class AgreedCall:
    """The result of a call, and the request that the user agreed to."""

    request: BaseModel
    result: msgspec.Struct


async def with_consent(
    workspace: Workspace,
    request: BaseModel,
    context: Context[Any, Any],
    call: Callable[[BaseModel], Awaitable[msgspec.Struct]],
) -> AgreedCall | InputRequiredResult:
    """Runs a call once the user has agreed to everything that needs consent.

    Returns an InputRequiredResult if the host asks between two calls: the question that it must ask
    before it calls again. Raises InputError if the user declined, or if a key needs consent and the
    host cannot ask.
    """
    asked_keys = set[tuple[str, str]]()
    while True:
        try:
            agreed = await _confirm_spending(workspace, request, context)
            if isinstance(agreed, InputRequiredResult):
                return agreed
            return AgreedCall(agreed, await call(agreed))
        except KeyNotAllowedError as refused:
            key = (refused.name, refused.host)
            if key in asked_keys or not _can_ask(context):
                raise
            asked_keys.add(key)
            if (question := await _allow_key(refused, context)) is not None:
                return question


def _can_ask(context: Context[Any, Any]) -> bool:
    declared = context.client_capabilities
    return declared is not None and declared.elicitation is not None


async def _ask(
    context: Context[Any, Any], name: str, question: str, schema: ElicitRequestedSchema
) -> ElicitResult | InputRequiredResult:
    """Returns the user's answer, or the question that the host must ask before it calls again."""
    if context.protocol_version not in MODERN_PROTOCOL_VERSIONS:
        return await context.session.elicit_form(question, schema, context.request_id)
    answer = (context.input_responses or {}).get(name)
    if isinstance(answer, ElicitResult):
        return answer
    params = ElicitRequestFormParams(message=question, requested_schema=schema)
    return InputRequiredResult(input_requests={name: ElicitRequest(params=params)})


async def _confirm_spending(
    workspace: Workspace, request: BaseModel, context: Context[Any, Any]
) -> BaseModel | InputRequiredResult:
    """Returns the request, with the user's budget if they set one when they agreed to the cost.

    No question is asked if the request has a budget or costs nothing, or if the host cannot ask.
    """
    if not _can_ask(context):
        return request
    spending = await anyio.to_thread.run_sync(api.unlimited_spending, workspace, request)
    if spending is None:
        return request
    question = (
        f"The agent wants to call {_for_display(spending.model)} at {_for_display(spending.host)} "
        "without a spending cap. Start the run?"
    )
    answer = await _ask(context, _SPENDING, question, _SPENDING_FORM)
    return answer if isinstance(answer, InputRequiredResult) else _with_budget(request, answer)


def _for_display(name: str) -> str:
    return short_line(name, max_characters=_LONGEST_NAME)


def _with_budget(request: BaseModel, answer: ElicitResult) -> BaseModel:
    """Returns the request with the budget of the user's answer, if they set one.

    Raises InputError if they did not agree, or if their budget is not a number above 0.
    """
    content = answer.content or {}
    if answer.action != "accept" or content.get("start") is not True:
        raise InputError(
            "the user did not agree to spend without a cap",
            "ask the user for a spending cap and set it as budget_usd (dry_run forecasts the cost)",
        )
    budget_usd = content.get("budget_usd")
    if budget_usd is None or budget_usd == "":  # as the form says, an empty field is no limit
        return request
    if (
        isinstance(budget_usd, bool)
        or not isinstance(budget_usd, int | float)
        or not 0 < budget_usd < math.inf
    ):
        raise InputError(
            f"the user's spending cap, {budget_usd!r}, allows no paid call; nothing was started",
            "ask the user for a spending cap above 0 and set it as budget_usd (dry_run forecasts "
            "the cost)",
        )
    # Validated as if the agent had set the budget.
    fields = {name: getattr(request, name) for name in request.model_fields_set}
    return type(request).model_validate(fields | {"budget_usd": budget_usd})


async def _allow_key(
    refused: KeyNotAllowedError, context: Context[Any, Any]
) -> InputRequiredResult | None:
    """Allows a key for a host in keys.yml once the user has agreed, and returns None.

    Otherwise returns the question that the host must ask first.
    """
    name, host = _for_display(refused.name), _for_display(refused.host)
    question = (
        f"The agent wants to send the key in {name} to {host}, which is not "
        f"allowed yet. Allow it now and for later calls? ({keys_file()} will record the answer.)"
    )
    # The answer belongs to this question only: it allows no other key or host.
    answer = await _ask(context, f"key {name} {host}", question, _KEY_FORM)
    if isinstance(answer, InputRequiredResult):
        return answer
    if answer.action != "accept" or (answer.content or {}).get("allow") is not True:
        raise InputError(
            f"the user did not agree to send the key in {name} to {host}",
            "ask the user which endpoint and which key (api_key_env) to use",
        )
    await anyio.to_thread.run_sync(allow_host, refused.name, refused.host)
    return None
