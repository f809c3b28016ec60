"""The official clients work through `stillroom record` as they do without it.

They are no dependencies; where they are not installed, the journals that they wrote once are read
in tests/unit/importing/formats/api_logs/test_recorded.py.
"""

import json

import anyio
import pytest

from fakes.raw_endpoint import RawEndpoint, json_reply
from fakes.recording import calls_in, in_thread, recording
from fakes.scripted_calls import assert_holds_conversation, calls_of
from fakes.trace_files import read
from stillroom.recording.admission import Admission
from stillroom.recording.replay import Replay
from stillroom.recording.tape import Tape
from trace_samples import clients
from trace_samples.conversation import REPLIES
from trace_samples.scripted_endpoint import ScriptedEndpoint, in_order

openai = pytest.importorskip("openai")
anthropic = pytest.importorskip("anthropic")
KEY = "sk-the-key-of-these-tests"


def holds(kind, url, *, is_streamed):
    if kind == "messages":
        client = anthropic.Anthropic(base_url=url, api_key=KEY)
        return clients.messages(client, is_streamed=is_streamed)
    client = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY)
    if kind == "chat":
        return clients.chat(client, is_streamed=is_streamed)
    return clients.responses(client, is_chained=False, is_streamed=is_streamed)


def shown(calls):
    return [
        [part.to_dict() for part in reply] if isinstance(reply, list) else reply.to_dict()
        for _, reply in calls
    ]


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("kind", ["chat", "responses", "messages"])
def test_a_conversation_is_the_same_with_the_proxy_and_without_it(tmp_path, kind, is_streamed):
    with ScriptedEndpoint(in_order(REPLIES)) as endpoint:
        direct = holds(kind, endpoint.url, is_streamed=is_streamed)
    with ScriptedEndpoint(in_order(REPLIES)) as endpoint, recording(tmp_path, endpoint.url) as url:
        through = holds(kind, url, is_streamed=is_streamed)
        journal = tmp_path / "calls-0001.jsonl"
        calls = calls_of(read("stillroom_record", journal))
    assert shown(through) == shown(direct)
    assert_holds_conversation(calls, keeps_reasoning=kind != "chat")
    assert KEY.encode() not in journal.read_bytes()


@pytest.mark.parametrize("kind", ["chat", "responses", "messages"])
def test_a_recorded_conversation_is_replayed_to_the_clients_alike(tmp_path, kind):
    with ScriptedEndpoint(in_order(REPLIES)) as endpoint, recording(tmp_path, endpoint.url) as url:
        recorded = holds(kind, url, is_streamed=True)
    tape = Tape([tmp_path])
    with in_thread(Replay(tape, Admission())) as url:
        assert shown(holds(kind, url, is_streamed=True)) == shown(recorded)


def test_async_clients_stream_at_once(tmp_path):
    async def one(client, number):
        stream = await client.chat.completions.create(
            model="m", stream=True, messages=[{"role": "user", "content": f"{number}"}]
        )
        chunks = [chunk async for chunk in stream]
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)

    async def scenario(url):
        texts = {}

        async def hold(client, number):
            texts[number] = await one(client, number)

        with anyio.fail_after(30):
            client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY)
            async with client, anyio.create_task_group() as group:
                for number in range(10):
                    group.start_soon(hold, client, number)
        return texts

    def script(_path, _body):
        return REPLIES[1]

    with ScriptedEndpoint(script) as endpoint, recording(tmp_path, endpoint.url) as url:
        texts = anyio.run(scenario, url)
    assert texts == dict.fromkeys(range(10), REPLIES[1].text)
    assert len(calls_in(tmp_path)) == 10


def test_errors_have_their_type_and_retries_are_each_recorded(tmp_path):
    error = json.dumps({"error": {"message": "slow down", "code": "rate_limit"}}).encode()
    wait = (b"retry-after-ms: 1",)
    with (
        RawEndpoint(
            lambda _: json_reply(error, *wait, status=b"429 Too Many Requests")
        ) as endpoint,
        recording(tmp_path, endpoint.url) as url,
    ):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=2)
        with pytest.raises(openai.RateLimitError, match="slow down"):
            client.chat.completions.create(model="m", messages=[{"role": "user", "content": "a"}])
        other = anthropic.Anthropic(base_url=url, api_key=KEY, max_retries=0)
        with pytest.raises(anthropic.RateLimitError):
            other.messages.create(
                model="m", max_tokens=1, messages=[{"role": "user", "content": "a"}]
            )
    assert [call.reply.status for call in calls_in(tmp_path)] == [429] * 4
