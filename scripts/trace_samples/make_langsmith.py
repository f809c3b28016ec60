"""Writes the samples of LangSmith from what its SDK and LangChain send to a server.

`PYTHONPATH=scripts python -m trace_samples.make_langsmith`; needs langsmith, openai, anthropic,
langchain-openai and langchain-anthropic. The SDK sends a run in parts with the names of the fields
that `Client.list_runs()` returns; each is put together here and passed through the SDK's own
class of a run.
"""

import json
import os
from email.parser import BytesParser
from typing import Any

from trace_samples import clients
from trace_samples.conversation import (
    FIRST,
    IMAGE,
    MODEL,
    REPLIES,
    RESULTS,
    SECOND,
    SYSTEM,
    tool_schemas,
)
from trace_samples.files import KEY, write_rows
from trace_samples.scripted_endpoint import Json, ScriptedEndpoint, in_order

_THREAD = {"thread_id": "shop-1"}
_HIDDEN = ("runtime", "LANGSMITH_", "LANGCHAIN_", "revision_id", "base_url", "openai_api_base")


def _openai_wrapper(url: str) -> None:
    import openai
    from langsmith.wrappers import wrap_openai

    client = wrap_openai(openai.OpenAI(base_url=f"{url}/v1", api_key=KEY))
    clients.chat(client, langsmith_extra={"metadata": _THREAD})


def _anthropic_wrapper(url: str) -> None:
    import anthropic
    from langsmith.wrappers import wrap_anthropic

    client = wrap_anthropic(anthropic.Anthropic(base_url=url, api_key=KEY))
    clients.messages(client, langsmith_extra={"metadata": _THREAD})


def _langchain_openai(url: str) -> None:
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(model=MODEL, base_url=f"{url}/v1", api_key=KEY)
    _converse(model.bind_tools(tool_schemas()), _image_of_openai())


def _langchain_anthropic(url: str) -> None:
    from langchain_anthropic import ChatAnthropic

    model = ChatAnthropic(model=MODEL, base_url=url, api_key=KEY, max_tokens=512)
    source = {"type": "base64", "media_type": "image/png", "data": IMAGE}
    _converse(model.bind_tools(tool_schemas()), {"type": "image", "source": source})


def _image_of_openai() -> Json:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{IMAGE}"}}


def _converse(model: Any, image: Json) -> None:
    from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage

    messages: list[Any] = [SystemMessage(SYSTEM), HumanMessage(FIRST)]
    config = {"metadata": _THREAD}
    messages.append(model.invoke(messages, config))
    messages += [
        ToolMessage(result, tool_call_id=call["id"])
        for call, result in zip(messages[-1].tool_calls, RESULTS, strict=True)
    ]
    messages.append(model.invoke(messages, config))
    messages.append(HumanMessage([{"type": "text", "text": SECOND}, image]))
    model.invoke(messages, config)


KINDS = {
    "openai": _openai_wrapper,
    "anthropic": _anthropic_wrapper,
    "langchain_openai": _langchain_openai,
    "langchain_anthropic": _langchain_anthropic,
}


def make(name: str) -> None:
    """Writes one sample."""
    with ScriptedEndpoint(in_order(REPLIES)) as endpoint:
        os.environ |= {
            "LANGSMITH_TRACING": "true",
            "LANGSMITH_ENDPOINT": endpoint.url,
            "LANGSMITH_API_KEY": KEY,
            "LANGSMITH_DISABLE_RUN_COMPRESSION": "true",
        }
        import langsmith
        from langsmith.run_trees import get_cached_client

        KINDS[name](endpoint.url)
        get_cached_client().flush()
        langsmith.Client().flush()
        if name.startswith("langchain"):
            from langchain_core.tracers.langchain import wait_for_all_tracers

            wait_for_all_tracers()
    runs: dict[str, Json] = {}
    for _, path, body in endpoint.others:
        if path.endswith("/runs/multipart"):
            _add_parts(body, runs)
    rows = [_exported(run, endpoint.url) for run in runs.values()]
    write_rows(f"langsmith/{name}.jsonl", rows)


def _add_parts(body: bytes, runs: dict[str, Json]) -> None:
    boundary = body.split(b"\r\n", 1)[0][2:]
    head = b'Content-Type: multipart/form-data; boundary="' + boundary + b'"\r\n\r\n'
    for part in BytesParser().parsebytes(head + body).get_payload():
        name = str(part.get_param("name", header="content-disposition"))
        value = json.loads(part.get_payload(decode=True))
        _, run_id, *field = name.split(".")
        run = runs.setdefault(run_id, {})
        run |= {field[0]: value} if field else value


def _exported(run: Json, address: str) -> Json:
    """Returns a run as the SDK's class of a run has it, without what tells of this machine."""
    from langsmith.schemas import Run

    run.pop("session_name", None)
    for facts in (run["extra"], run["extra"].get("metadata", {})):
        for key in [key for key in facts if key.startswith(_HIDDEN)]:
            del facts[key]
    row = Run(**run).model_dump(mode="json")
    text = json.dumps({key: value for key, value in row.items() if value is not None})
    text = text.replace(address, "https://api.example.com")
    assert "127.0.0.1" not in text  # noqa: S101 - the sample would tell of this machine
    return json.loads(text)


if __name__ == "__main__":
    import sys

    for kind in sys.argv[1:] or KINDS:
        make(kind)
