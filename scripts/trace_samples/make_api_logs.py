"""Writes the samples of API logs with the official clients.

`PYTHONPATH=scripts python -m trace_samples.make_api_logs`; needs openai and anthropic. Each row is
what an application logs that keeps the arguments of its calls and what the client returned.
"""

from typing import Any

import anthropic
import openai

from trace_samples import clients
from trace_samples.conversation import REPLIES
from trace_samples.files import KEY, write_rows
from trace_samples.scripted_endpoint import Json, ScriptedEndpoint, in_order


def _logged(calls: list[tuple[Json, Any]], session: str) -> list[Json]:
    return [
        {
            "request": request,
            "response": reply.model_dump(mode="json", exclude_unset=True),
            "session_id": session,
            "timestamp": f"2026-03-01T10:00:0{number}Z",
            "duration_ms": 1500,
        }
        for number, (request, reply) in enumerate(calls)
    ]


def _anthropic(*, is_streamed: bool) -> list[Json]:
    with ScriptedEndpoint(in_order(REPLIES)) as endpoint:
        client = anthropic.Anthropic(base_url=endpoint.url, api_key=KEY, max_retries=0)
        calls = clients.messages(client, is_streamed=is_streamed)
    return _logged(calls, "streamed" if is_streamed else "whole")


def _responses(*, is_chained: bool) -> list[Json]:
    with ScriptedEndpoint(in_order(REPLIES)) as endpoint:
        client = openai.OpenAI(base_url=f"{endpoint.url}/v1", api_key=KEY, max_retries=0)
        calls = clients.responses(client, is_chained=is_chained)
    return _logged(calls, "chained" if is_chained else "whole")


def _write_openai_batch() -> None:
    """Writes the two files of a batch; the service writes the results in any order."""
    with ScriptedEndpoint(in_order(REPLIES)) as endpoint:
        client = openai.OpenAI(base_url=f"{endpoint.url}/v1", api_key=KEY, max_retries=0)
        calls = clients.chat(client)
    requests = [
        {"custom_id": f"task-{n}", "method": "POST", "url": "/v1/chat/completions", "body": body}
        for n, (body, _) in enumerate(calls, start=1)
    ]
    results = [
        {
            "id": f"batch_req_{n}",
            "custom_id": f"task-{n}",
            "response": {
                "status_code": 200,
                "request_id": f"req_{n}",
                "body": reply.model_dump(mode="json", exclude_unset=True),
            },
            "error": None,
        }
        for n, (_, reply) in enumerate(calls, start=1)
    ]
    write_rows("openai_batch/requests.jsonl", requests)
    write_rows("openai_batch/results.jsonl", results[-1:] + results[:-1])


def _write_anthropic_batch() -> None:
    with ScriptedEndpoint(in_order(REPLIES)) as endpoint:
        client = anthropic.Anthropic(base_url=endpoint.url, api_key=KEY, max_retries=0)
        calls = clients.messages(client)
    requests = [
        {"custom_id": f"task-{n}", "params": body} for n, (body, _) in enumerate(calls, start=1)
    ]
    results: list[Json] = []
    for number, (_, reply) in enumerate(calls, start=1):
        message = reply.model_dump(mode="json", exclude_unset=True)
        row = {"custom_id": f"task-{number}", "result": {"type": "succeeded", "message": message}}
        # As the client reads the results of a batch.
        read = anthropic.types.messages.MessageBatchIndividualResponse.model_validate(row)
        results.append(read.model_dump(mode="json", exclude_unset=True))
    write_rows("anthropic_batch/requests.jsonl", requests)
    write_rows("anthropic_batch/results.jsonl", results[-1:] + results[:-1])


def _write_stored_completions() -> None:
    """Writes the pages of the stored completions API, and with them what a gateway logs."""
    with ScriptedEndpoint(in_order(REPLIES)) as endpoint:
        client = openai.OpenAI(base_url=f"{endpoint.url}/v1", api_key=KEY, max_retries=0)
        calls = clients.chat(client)
    completions: list[Json] = []
    pages: list[Json] = []
    for request, reply in calls:
        completion = reply.model_dump(mode="json", exclude_unset=True)
        completions.append(completion | {"tools": request["tools"], "metadata": {"shop": "1"}})
        listed: list[Json] = []
        for number, message in enumerate(request["messages"]):
            content = message.get("content")
            parts = content if isinstance(content, list) else None
            named = {"id": f"{completion['id']}-{number}", "name": None, "content_parts": parts}
            listed.append(message | named | ({"content": None} if parts else {}))
        pages.append({"object": "list", "data": listed, "has_more": False})
    page = {"object": "list", "data": completions[::-1], "has_more": False}
    write_rows("stored_completions/completions.json", [page])
    write_rows("stored_completions/messages.jsonl", pages)
    write_rows("helicone/requests.jsonl", [_helicone(n, *call) for n, call in enumerate(calls)])


def _helicone(number: int, request: Json, reply: Any) -> Json:
    """Returns a call as a row of Helicone's export, after its public description."""
    return {
        "request_id": f"hel-{number}",
        "request_created_at": f"2026-03-01 10:00:0{number}.000",
        "response_id": f"res-{number}",
        "response_created_at": f"2026-03-01 10:00:0{number}.900",
        "response_status": 200,
        "request_path": "https://api.openai.com/v1/chat/completions",
        "request_user_id": None,
        "request_properties": {"Helicone-Session-Id": "shop-1", "app": "shop"},
        "request_model": "scripted-1",
        "response_model": "scripted-1",
        "provider": "OPENAI",
        "delay_ms": 900,
        "prompt_tokens": reply.usage.prompt_tokens,
        "completion_tokens": reply.usage.completion_tokens,
        "total_tokens": reply.usage.total_tokens,
        "costUSD": 0.25,
        "scores": {"helpful": 1},
        "feedback_rating": True,
        "request_body": request,
        "response_body": reply.model_dump(mode="json", exclude_unset=True),
    }


def main() -> None:
    """Writes all samples of API logs."""
    write_rows(
        "anthropic_messages/calls.jsonl",
        _anthropic(is_streamed=False) + _anthropic(is_streamed=True),
    )
    write_rows("openai_responses/calls.jsonl", _responses(is_chained=False))
    write_rows("openai_responses/chained.jsonl", _responses(is_chained=True))
    _write_openai_batch()
    _write_anthropic_batch()
    _write_stored_completions()


if __name__ == "__main__":
    main()
