import anyio
import pytest
import torch

from fakes.conversations import PRICE, reply, user
from fakes.decoding import full_logprobs
from fakes.tiny_models import ANSWER
from stillroom.data.chat.render import ChatRenderer
from stillroom.errors import ModelError
from stillroom.policy.hf import HFPolicy
from stillroom.types import SamplingSettings

SAMPLING = SamplingSettings(temperature=1.0, max_tokens=32, seed=1)
PROMPT = [user("What does the lamp cost?")]


@pytest.fixture
def gemma(tiny_models):
    return tiny_models.load("gemma3", "gemma")


@pytest.fixture
def clerk(tiny_models):
    """Calls a tool or answers, one as likely as the other."""
    return tiny_models.load("llama", "clerk")


async def talk(policy, key, *, prompt=PROMPT, tools=(PRICE,), max_turns=6):
    """Plays a conversation whose tools answer at once; returns its turns and its tokens."""
    turns = []
    async with policy.converse(prompt, tools, seed_key=key) as conversation:
        while True:
            turn = await conversation.sample()
            turns.append(turn)
            made = turn.message.get("tool_calls", [])
            if not made or len(turns) == max_turns:
                return turns, conversation.trace()
            replies = [{**reply("12"), "tool_call_id": call["id"]} for call in made]
            conversation.add_responses(turn.message, replies)


def play(loaded, keys, *, sampling=SAMPLING, max_rows=4, **options):
    """Plays the conversations side by side and returns what became of each."""
    results = {}

    async def one(policy, key):
        results[key] = await talk(policy, key, **options)

    async def main():
        with anyio.fail_after(20):
            async with (
                HFPolicy(loaded, sampling, max_rows=max_rows) as policy,
                anyio.create_task_group() as group,
            ):
                for key in keys:
                    group.start_soon(one, policy, key)

    anyio.run(main)
    return results


def test_a_turn_says_what_was_sampled_and_what_it_would_cost(gemma):
    turns, trace = play(gemma, ["a"], tools=())["a"]

    (turn,) = turns
    prompt = ChatRenderer(gemma.tokenizer).prompt_ids(PROMPT, [])
    assert trace.ids == [*prompt, *turn.token_ids]
    assert trace.sampled == [False] * len(prompt) + [True] * len(turn.token_ids)
    assert trace.logprobs == [0.0] * len(prompt) + turn.logprobs
    assert turn.logprobs == pytest.approx(full_logprobs(gemma, trace.ids)[len(prompt) :], abs=1e-5)
    assert turn.usage.prompt_tokens == len(prompt)
    assert turn.usage.completion_tokens == len(turn.token_ids)


def test_a_turn_that_was_cut_off_keeps_all_its_text(gemma):
    short = SamplingSettings(temperature=1.0, max_tokens=2, seed=1)

    turns, _ = play(gemma, ["a"], tools=(), sampling=short)["a"]

    assert turns[0].finish_reason == "length"
    assert turns[0].message["content"] == gemma.tokenizer.decode(turns[0].token_ids)


def test_tools_are_called_and_their_replies_continue_the_tokens(clerk):
    results = play(clerk, [str(i) for i in range(12)])

    assert {len(turns) for turns, _ in results.values()} >= {1, 2, 3}
    for turns, trace in results.values():
        messages = list(PROMPT)
        for turn in turns:
            messages.append(turn.message)
            messages += [
                {**reply("12"), "tool_call_id": call["id"]}
                for call in turn.message.get("tool_calls", [])
            ]
        if messages[-1]["role"] == "tool":
            messages.pop()
        # One rendering of the whole conversation has the very tokens, and the same mask.
        whole = ChatRenderer(clerk.tokenizer).conversation(messages, [PRICE])
        assert whole.ids[: len(trace.ids)] == trace.ids
        assert whole.trained[: len(trace.ids)] == trace.sampled
        assert clerk.tokenizer.decode(whole.ids[len(trace.ids) :]) == "\n"


def test_a_users_reply_continues_the_tokens_and_is_not_the_models(clerk):
    async def main():
        async with (
            HFPolicy(clerk, SAMPLING, max_rows=1) as policy,
            policy.converse(PROMPT, [PRICE], seed_key="a") as conversation,
        ):
            messages, texts = list(PROMPT), 0
            for _ in range(6):
                with anyio.fail_after(10):
                    turn = await conversation.sample()
                made = turn.message.get("tool_calls", [])
                texts += not made
                reported = [{**reply("12"), "tool_call_id": call["id"]} for call in made]
                messages += [turn.message, *(reported or [user("Sure?")])]
                conversation.add_responses(turn.message, reported or [user("Sure?")])
            return messages, texts, conversation.trace()

    messages, texts, trace = anyio.run(main)

    assert 0 < texts < 6
    whole = ChatRenderer(clerk.tokenizer).conversation(messages, [PRICE])
    header = len(trace.ids) - len(whole.ids)
    assert (trace.ids[:-header], trace.sampled[:-header]) == (whole.ids, whole.trained)
    assert clerk.tokenizer.decode(trace.ids[-header:]) == ChatRenderer(clerk.tokenizer).header


def test_a_tool_that_takes_long_does_not_hold_up_the_others(clerk):
    async def main():
        others_are_done = anyio.Event()
        async with HFPolicy(clerk, SAMPLING, max_rows=4) as policy:

            async def slow():
                async with policy.converse(PROMPT, [PRICE], seed_key="slow") as conversation:
                    turn = await conversation.sample()
                    await others_are_done.wait()
                    conversation.add_responses(turn.message, [reply("12")])
                    await conversation.sample()

            async def quick():
                for key in "abc":
                    await talk(policy, key)
                others_are_done.set()

            with anyio.fail_after(20):
                async with anyio.create_task_group() as group:
                    group.start_soon(slow)
                    group.start_soon(quick)

    anyio.run(main)


def test_a_cancelled_conversation_leaves_the_others_as_they_would_be(gemma):
    wanted = play(gemma, ["a", "b"], tools=(), max_rows=2)

    async def main():
        results = {}
        async with HFPolicy(gemma, SAMPLING, max_rows=2) as policy:

            async def one(key):
                results[key] = await talk(policy, key, tools=())

            with anyio.fail_after(20):
                async with anyio.create_task_group() as group:
                    cancelled = anyio.CancelScope()

                    async def doomed():
                        with cancelled:
                            async with policy.converse(PROMPT, [], seed_key="c") as conversation:
                                cancelled.cancel()
                                await conversation.sample()

                    for key in ("a", "b"):
                        group.start_soon(one, key)
                    group.start_soon(doomed)
                results["d"] = await talk(policy, "d", tools=())
        return results

    results = anyio.run(main)

    assert results["a"][1].ids == wanted["a"][1].ids
    assert results["b"][1].ids == wanted["b"][1].ids
    assert results["d"][0]


def test_the_context_is_the_smaller_of_the_models_and_the_asked_one(tiny_models):
    gemma = tiny_models.load("gemma3", "gemma", max_position_embeddings=96)
    prompt = ChatRenderer(gemma.tokenizer).prompt_ids(PROMPT, [])
    long = SamplingSettings(temperature=1.0, max_tokens=200, seed=0)
    endless = type(gemma)(gemma.location, gemma.model, gemma.tokenizer, frozenset())

    async def length(max_context):
        async with (
            HFPolicy(endless, long, max_rows=1, max_context=max_context) as policy,
            policy.converse(PROMPT, [], seed_key="a") as conversation,
        ):
            with anyio.fail_after(30):
                turn = await conversation.sample()
            assert turn.finish_reason == "context"
            return len(conversation.trace().ids)

    assert anyio.run(length, len(prompt) + 3) == len(prompt) + 3
    assert anyio.run(length, 10_000) == 96


def test_tools_need_a_template_whose_calls_can_be_read(gemma):
    with pytest.raises(ExceptionGroup) as caught:
        play(gemma, ["a"], tools=(PRICE,))
    assert caught.group_contains(ModelError, match="no supported tool-call format")


def test_an_error_of_the_model_reaches_whoever_waits(gemma):
    with torch.no_grad():
        gemma.model.get_input_embeddings().weight.fill_(float("nan"))

    with pytest.raises(ExceptionGroup) as caught:
        play(gemma, ["a", "b"], tools=())
    assert caught.group_contains(ModelError, match="not finite")


def test_thinking_that_the_header_opens_is_set_apart(tiny_models):
    thinker = tiny_models.load("llama", "thinker")

    last = [turns[-1] for turns, _ in play(thinker, "abcd", max_turns=9).values()]

    assert any(turn.message.get("reasoning_content") == "hm" for turn in last)
    for turn in last:
        if "reasoning_content" in turn.message:
            assert turn.message["content"] == ANSWER


def test_a_prompt_with_a_token_that_the_model_has_no_embedding_for_is_refused(tiny_models):
    loaded = tiny_models.load("llama", "chatml")
    loaded.tokenizer.add_tokens(["<new>"])

    with pytest.raises(ExceptionGroup) as caught:
        play(loaded, ["one"], prompt=[user("What is <new>?")], tools=())

    [error] = caught.value.exceptions
    assert isinstance(error, ModelError)
    assert "a conversation needs token 352, '<new>'" in error.problem
