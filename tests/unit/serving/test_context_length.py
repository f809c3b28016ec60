"""What a server says of a model before the first call: its context, and whether it shows tools."""

import gzip
from functools import partial

import pytest

from fakes.model_server import FakeModelServer
from fakes.raw_endpoint import RawEndpoint, json_reply
from fakes.waiting import run_async
from stillroom.errors import InputError, TeacherError
from stillroom.serving.model_server import (
    ModelServerClient,
    UnreadableResponseError,
    fit_max_tokens,
)
from stillroom.teachers.providers import ANY_ENDPOINT, AZURE, PROVIDERS, Endpoint
from stillroom.types import SamplingSettings

TOOL = {
    "type": "function",
    "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object"}},
}


def fitted(server, sampling, *, provider=PROVIDERS["vllm"], model="served", tools=()):
    endpoint = Endpoint(server.base_url, None, provider)
    return run_async(partial(fit_max_tokens, endpoint, model, sampling, tools, key=None))


@pytest.fixture(scope="module")
def server(tiny_models):
    with FakeModelServer(tiny_models.load("llama", "chatml", seed=1), max_model_len=640) as found:
        yield found


@pytest.mark.parametrize("provider", [PROVIDERS["vllm"], ANY_ENDPOINT])
def test_the_default_leaves_half_of_a_short_context_to_the_prompt(server, provider):
    found = fitted(server, SamplingSettings(), provider=provider)
    assert found.sampling.max_tokens == 320
    assert "has a context length of 640 tokens: max_tokens was lowered to 320" in found.notes[0]


@pytest.mark.parametrize("num", [16, 320, 639])
def test_a_limit_that_was_given_and_fits_is_left_alone(server, num):
    sampling = SamplingSettings(max_tokens=num)
    found = fitted(server, sampling)
    assert (found.sampling, list(found.notes)) == (sampling, [])


def test_a_limit_that_leaves_no_room_is_refused_before_any_call(server):
    with pytest.raises(InputError, match="of 640 tokens: max_tokens 640 leaves no room"):
        fitted(server, SamplingSettings(max_tokens=640))


def test_a_server_that_states_no_context_is_left_alone(server):
    for options in ({"model": "another"}, {"provider": AZURE}, {"provider": PROVIDERS["openai"]}):
        found = fitted(server, SamplingSettings(), tools=[TOOL], **options)
        assert (found.sampling, list(found.notes)) == (SamplingSettings(), [])


@pytest.mark.parametrize(
    ("family", "has_tokenize", "is_told"),
    [("chatml", True, False), ("gemma", True, True), ("gemma", False, False)],
)
def test_a_model_whose_template_leaves_tools_out_is_told_before_the_first_call(
    tiny_models, family, has_tokenize, is_told
):
    loaded = tiny_models.load("llama", family)
    with FakeModelServer(loaded, has_tokenize=has_tokenize) as found:
        notes = fitted(found, SamplingSettings(max_tokens=16), tools=[TOOL]).notes
        without = fitted(found, SamplingSettings(max_tokens=16)).notes
    assert len(notes) == is_told
    assert not is_told or "ignores tools, so the model cannot call them" in notes[0]
    assert list(without) == []


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (json_reply(b" " * (9 << 20)), "sent more than 8 MB"),
        (
            json_reply(gzip.compress(b" " * (99 << 20)), b"content-encoding: gzip"),
            "invalid utf-8|malformed",
        ),
    ],
)
def test_what_a_server_says_of_its_models_is_read_within_bounds(reply, error):
    async def listed(url):
        async with ModelServerClient(Endpoint(url, None, ANY_ENDPOINT)) as server:
            return await server.context_lengths()

    refusals = (TeacherError, UnreadableResponseError)
    with RawEndpoint(lambda _: reply) as endpoint, pytest.raises(refusals, match=error):
        run_async(partial(listed, endpoint.url))
