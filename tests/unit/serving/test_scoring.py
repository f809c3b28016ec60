"""A served teacher against the same model in this process, and against servers that fail."""

import anyio
import anyio.lowlevel
import pytest

from fakes.decoding import random_prompts
from fakes.model_server import IMPOSSIBLE, FakeModelServer
from stillroom.errors import CallFailedError, FailureClass, TeacherError
from stillroom.models.batches import sampled_sequence
from stillroom.serving.model_server import ModelServerClient, ServerSettings
from stillroom.serving.scoring import ServedTeacher
from stillroom.teachers.endpoint.attempts import MAX_ATTEMPTS
from stillroom.teachers.local_hf import LocalTeacher
from stillroom.teachers.providers import PROVIDERS, Endpoint
from stillroom.types import TokenTrace

SERVERS = ["vllm", "sglang"]


@pytest.fixture
def loaded(tiny_models):
    return tiny_models.load("llama", "chatml", seed=1)


def trace(length=24, *, seed=0, tail=0):
    """Two turns with a tool's reply between them, and what was given after the last."""
    ids = random_prompts((length + tail,), seed=seed)[0]
    sampled = [False] * 5 + [True] * 4 + [False] * 6 + [True] * (length - 15) + [False] * tail
    return TokenTrace(ids=ids, sampled=sampled, logprobs=[0.0] * len(ids))


def score(server, traces, *, provider="vllm", top_k=None, key=None, concurrency=8, notes=None):
    """Returns what the served teacher says of each trace, all asked at once."""
    reported = [None] * len(traces)
    failed = []

    async def no_sleep(_seconds):
        await anyio.lowlevel.checkpoint()

    async def ask():
        client = ModelServerClient(
            Endpoint(server.base_url, "KEY" if key else None, PROVIDERS[provider]),
            key=key,
            settings=ServerSettings(concurrency=concurrency, timeout_s=20),
            sleep=no_sleep,
        )
        client.note = [].append if notes is None else notes.append
        teacher = ServedTeacher(client, "served", provider=provider, top_k=top_k)

        async def one(index):
            try:
                reported[index] = await teacher.score(traces[index])
            except (CallFailedError, TeacherError) as error:
                failed.append(error)

        with anyio.fail_after(30):
            async with client, anyio.create_task_group() as group:
                for index in range(len(traces)):
                    group.start_soon(one, index)

    anyio.run(ask)
    if failed:
        raise failed[0]
    return reported


@pytest.mark.parametrize("provider", SERVERS)
def test_the_scores_are_those_of_the_model_in_this_process(loaded, provider):
    traces = [trace(), trace(30, seed=1, tail=4), trace(19, seed=2)]

    with FakeModelServer(loaded) as server:
        reported = score(server, traces, provider=provider)

    exact = LocalTeacher(loaded).score_tokens([sampled_sequence(one) for one in traces])
    for ours, reference, one in zip(reported, exact, traces, strict=True):
        assert ours.logprobs == pytest.approx(reference.tolist(), abs=1e-5)
        assert len(ours.logprobs) == sum(one.sampled)
        assert ours.top_ids is ours.top_logprobs is None


@pytest.mark.parametrize("provider", SERVERS)
@pytest.mark.parametrize("top_k", [1, 4])
def test_the_likeliest_tokens_are_those_of_the_model_in_this_process(loaded, provider, top_k):
    one = trace()

    with FakeModelServer(loaded) as server:
        (reported,) = score(server, [one], provider=provider, top_k=top_k)
        logprobs_TV = server.logprobs("served", one.ids)

    places = [i - 1 for i, is_sampled in enumerate(one.sampled) if is_sampled]
    likeliest = logprobs_TV[places].topk(top_k)
    assert reported.top_ids == likeliest.indices.tolist()
    for ours, reference in zip(reported.top_logprobs, likeliest.values.tolist(), strict=True):
        assert ours == pytest.approx(reference, abs=1e-5)


@pytest.mark.parametrize("provider", SERVERS)
def test_tokens_after_the_last_sampled_one_are_not_sent(loaded, provider):
    with FakeModelServer(loaded) as server:
        score(server, [trace(24, tail=9)], provider=provider)

    body = server.requested[0][1]
    assert len(body["prompt" if provider == "vllm" else "input_ids"]) == 24


@pytest.mark.parametrize("provider", SERVERS)
@pytest.mark.parametrize("status", [500, 503, 429, 408])
def test_a_call_that_fails_is_made_again(loaded, provider, status):
    failures = iter([status, status])

    def before(_path, _body):
        failing = next(failures, None)
        return (failing, {"error": "busy"}) if failing else None

    with FakeModelServer(loaded, before=before) as server:
        (reported,) = score(server, [trace()], provider=provider)

    assert len(reported.logprobs) == 13
    assert len(server.requested) == 3


@pytest.mark.parametrize("status", [502, 503, 504])
def test_a_server_that_starts_again_is_waited_for(loaded, status):
    failures = iter([status] * (3 * MAX_ATTEMPTS))

    def before(_path, _body):
        failing = next(failures, None)
        return (failing, {"error": "starting"}) if failing else None

    notes = []
    with FakeModelServer(loaded, before=before) as server:
        (reported,) = score(server, [trace()], notes=notes)

    assert len(reported.logprobs) == 13
    # Once each, however many calls and attempts there were.
    waits, answers = notes
    assert f"{server.base_url.removesuffix('/v1')} does not answer (HTTP {status}: " in waits
    assert "the run waits up to 60 minutes" in waits
    assert "answers again, after " in answers


def test_a_server_that_stays_away_is_given_up_after_an_hour(loaded):
    with FakeModelServer(loaded) as server:
        pass
    with pytest.raises(CallFailedError, match="cannot connect") as caught:
        score(server, [trace()])
    assert caught.value.kind is FailureClass.CONNECTION
    # Up to 32 s are between two of them.
    assert 3600 / 32 < int(caught.value.message.split("(")[-1].split()[0]) < 250


def moved(path, answer):
    answer["meta_info"]["input_token_logprobs"][3][1] += 1
    return answer


def cut(path, answer):
    if path == "/generate":
        answer["meta_info"]["input_token_logprobs"].pop()
    else:
        answer["choices"][0]["prompt_logprobs"].pop()
    return answer


def masked(path, answer):
    if path == "/generate":
        answer["meta_info"]["input_token_logprobs"][2][0] = IMPOSSIBLE
    else:
        for one in answer["choices"][0]["prompt_logprobs"][6].values():
            one["logprob"] = IMPOSSIBLE
    return answer


@pytest.mark.parametrize(
    ("provider", "shown", "words"),
    [
        ("sglang", moved, "at index "),
        ("vllm", cut, "expected prompt_logprobs of 24 tokens, got 23"),
        ("sglang", cut, "expected input_token_logprobs of 20 tokens, got 19"),
        ("vllm", masked, "may mask logits"),
        ("sglang", masked, "may mask logits"),
        ("vllm", lambda _path, _answer: {"choices": []}, "has no prompt_logprobs"),
        ("vllm", lambda _path, _answer: {"id": 1}, "unreadable response"),
        ("sglang", lambda _path, _answer: {"meta_info": {}}, "unreadable response"),
    ],
)
def test_an_answer_that_is_not_about_these_tokens_is_never_used(loaded, provider, shown, words):
    with FakeModelServer(loaded, shown=shown) as server:
        with pytest.raises(CallFailedError, match=words) as caught:
            score(server, [trace()], provider=provider)
        assert caught.value.kind is FailureClass.BAD_RESPONSE
        assert len(server.requested) == MAX_ATTEMPTS


def test_a_rollout_that_the_server_does_not_take_is_not_sent_again(loaded):
    with FakeModelServer(loaded, max_model_len=24) as server:
        with pytest.raises(CallFailedError, match="maximum context length is 24") as caught:
            score(server, [trace(24)])
        assert caught.value.kind is FailureClass.BAD_REQUEST
        assert len(server.requested) == 1


def test_the_key_is_sent_and_a_refused_one_ends_the_run_unseen(loaded):
    with FakeModelServer(loaded, key="secret") as server:
        assert score(server, [trace()], key="secret")
        with pytest.raises(TeacherError, match="rejected the key") as caught:
            score(server, [trace()], key="wrong-key")
    assert "KEY" in caught.value.fix
    assert "wrong-key" not in str(caught.value)


def test_a_model_that_is_not_served_ends_the_run(loaded):
    with FakeModelServer(loaded) as server:
        server.models.clear()
        with pytest.raises(TeacherError, match="does not exist"):
            score(server, [trace()])
