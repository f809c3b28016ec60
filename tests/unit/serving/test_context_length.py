"""The default for max_tokens is fitted to the context that a server states."""

import gzip
from functools import partial

import pytest

from fakes.model_server import FakeModelServer
from fakes.raw_endpoint import RawEndpoint, json_reply
from fakes.waiting import run_async
from stillroom.errors import InputError, TeacherError
from stillroom.serving.model_server import ModelServer, UnreadableAnswerError, fit_max_tokens
from stillroom.teachers.providers import ANY_ENDPOINT, AZURE, PROVIDERS, Endpoint
from stillroom.types import SamplingSettings


def fitted(server, sampling, *, provider=PROVIDERS["vllm"], model="served"):
    endpoint = Endpoint(server.base_url, None, provider)
    return run_async(partial(fit_max_tokens, endpoint, model, sampling, key=None))


@pytest.fixture(scope="module")
def server(tiny_models):
    with FakeModelServer(tiny_models.load("llama", "chatml", seed=1), max_model_len=640) as found:
        yield found


@pytest.mark.parametrize("provider", [PROVIDERS["vllm"], ANY_ENDPOINT])
def test_the_default_leaves_half_of_a_short_context_to_the_prompt(server, provider):
    sampling, note = fitted(server, SamplingSettings(), provider=provider)
    assert sampling.max_tokens == 320
    assert "has a context length of 640 tokens: max_tokens was lowered to 320" in note


@pytest.mark.parametrize("num", [16, 320, 639])
def test_a_limit_that_was_given_and_fits_is_left_alone(server, num):
    assert fitted(server, SamplingSettings(max_tokens=num)) == (
        SamplingSettings(max_tokens=num),
        None,
    )


def test_a_limit_that_leaves_no_room_is_refused_before_any_call(server):
    with pytest.raises(InputError, match="of 640 tokens: max_tokens 640 leaves no room"):
        fitted(server, SamplingSettings(max_tokens=640))


def test_a_server_that_states_no_context_is_left_alone(server):
    for options in ({"model": "another"}, {"provider": AZURE}, {"provider": PROVIDERS["openai"]}):
        assert fitted(server, SamplingSettings(), **options) == (SamplingSettings(), None)


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (json_reply(b" " * (9 << 20)), "sends more than 8 MB"),
        (
            json_reply(gzip.compress(b" " * (99 << 20)), b"content-encoding: gzip"),
            "invalid utf-8|malformed",
        ),
    ],
)
def test_what_a_server_says_of_its_models_is_read_within_bounds(reply, error):
    async def listed(url):
        async with ModelServer(Endpoint(url, None, ANY_ENDPOINT)) as server:
            return await server.context_lengths()

    refusals = (TeacherError, UnreadableAnswerError)
    with RawEndpoint(lambda _: reply) as endpoint, pytest.raises(refusals, match=error):
        run_async(partial(listed, endpoint.url))
