import json
from collections.abc import Sequence
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes.rollout_rows import assistant, tool_call, tool_reply, user
from fakes.scripted_policy import (
    MemoryRecorder,
    ScriptedConversation,
    ScriptedSession,
    ScriptedTools,
    turn,
)
from fakes.waiting import run_async
from stillroom.data.formats import Task, task_from_row
from stillroom.errors import CallFailedError, FailureClass
from stillroom.rollout.episode.loop import (
    Episode,
    OfferedTools,
    TurnRules,
    needs_lost_state,
    offered_tools,
    play_episode,
)
from stillroom.tools.source import ToolResult
from stillroom.types import StopReason, Usage

TASK = task_from_row({"prompt": "How much?", "metadata": {"m": 1}})
DONE = turn(assistant("7"))


async def echo(name: str, arguments: dict[str, Any]) -> ToolResult:
    return ToolResult(content=f"{name} {json.dumps(arguments)}", is_error=False)


def calling(*calls: dict, finish: str = "stop") -> Any:
    return turn(assistant(None, *calls), finish=finish)


class Play:
    """One episode, played to its end."""

    def __init__(
        self,
        turns: Sequence[Any],
        *,
        task: Task = TASK,
        tools: ScriptedTools | None = None,
        recorder: Any = None,
        max_turns: int = 10,
        nudge: str | None = None,
    ) -> None:
        self.episode = Episode(messages=list(task.messages))
        self.conversation = ScriptedConversation(turns)
        self.recorder = recorder or MemoryRecorder()
        run_async(self._play, task, tools, TurnRules(max_turns, nudge))

    async def _play(self, task: Task, tools: ScriptedTools | None, rules: TurnRules) -> None:
        session = ScriptedSession(tools, task.metadata) if tools else None
        await play_episode(
            self.episode,
            self.conversation,
            self.recorder,
            OfferedTools(offered_tools(task, tools), session),
            rules,
        )


def test_a_conversation_goes_on_until_the_answer() -> None:
    tools = ScriptedTools(["price"], echo)
    call = tool_call("price", "a", '{"item": "lamp"}')

    play = Play([calling(call), DONE], tools=tools)

    episode = play.episode
    assert episode.messages == [
        user("How much?"),
        assistant(None, call),
        {**tool_reply('price {"item": "lamp"}', "a"), "name": "price"},
        assistant("7"),
    ]
    assert episode.stop_reason is StopReason.ANSWERED
    assert (episode.turns, episode.tool_errors) == (2, 0)
    assert episode.usage == Usage(prompt_tokens=20, completion_tokens=10)
    assert tools.calls == [("price", {"item": "lamp"}, {"m": 1})]
    assert play.conversation.seen == episode.messages[1:]
    assert play.recorder.order == [("turn", 0), ("replies", 0), ("turn", 1)]


@pytest.mark.parametrize(
    ("turns", "max_turns", "stop", "num_turns"),
    [
        ([DONE], 1, StopReason.ANSWERED, 1),
        ([calling(tool_call())], 1, StopReason.MAX_TURNS, 1),
        ([calling(tool_call()), calling(tool_call())], 2, StopReason.MAX_TURNS, 2),
        ([turn(assistant("cut o"), finish="length")], 9, StopReason.MAX_TOKENS, 1),
        ([calling(tool_call(), finish="length")], 9, StopReason.MAX_TOKENS, 1),
        ([turn(assistant(""), finish="context")], 9, StopReason.CONTEXT_WINDOW, 1),
        ([turn(assistant("The lamp"), finish="filter")], 9, StopReason.CONTENT_FILTER, 1),
        ([turn({"role": "assistant", "content": None, "tool_calls": []})], 9, "answered", 1),
    ],
)
def test_an_episode_says_why_it_ended(
    turns: list[Any], max_turns: int, stop: str, num_turns: int
) -> None:
    play = Play(turns, tools=ScriptedTools(["price"], echo), max_turns=max_turns)

    assert (play.episode.stop_reason, play.episode.turns) == (stop, num_turns)
    # What is not used is not run: the calls of the last turn get no answer.
    assert play.episode.messages[-1]["role"] == "assistant"


def test_calls_of_one_turn_run_side_by_side_and_answer_in_their_order() -> None:
    here: list[str] = []
    all_here = anyio.Event()

    async def meet(name: str, _arguments: dict[str, Any]) -> ToolResult:
        here.append(name)
        if len(here) == 3:
            all_here.set()
        await all_here.wait()
        return ToolResult(content=name, is_error=False)

    calls = [tool_call(name, f"id-{name}") for name in "abc"]
    play = Play([calling(*calls), DONE], tools=ScriptedTools("abc", meet))

    replies = play.episode.messages[2:5]
    assert [(reply["tool_call_id"], reply["content"]) for reply in replies] == [
        ("id-a", "a"),
        ("id-b", "b"),
        ("id-c", "c"),
    ]


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (tool_call("prize", "a"), "unknown tool 'prize'; the tools are: price, stock"),
        (tool_call("price", "a", "{item: lamp}"), "the arguments of price are not valid JSON"),
        (tool_call("price", "a", '{"item": "la'), "the arguments of price are not valid JSON"),
        (tool_call("price", "a", '["lamp"]'), "the arguments of price must be a JSON object"),
        (tool_call("price", "a", "7"), "the arguments of price must be a JSON object"),
        (tool_call("price", "a", "[" * 100_000), "the arguments of price are not valid JSON"),
        (tool_call("price", "a", '{"x": NaN}'), "the arguments of price are not valid JSON"),
        (tool_call("price", "a", '{"x": "\\ud800"}'), "the arguments of price are not valid JSON"),
        (tool_call("price", "a", '{"x": 1e999}'), "the arguments of price are not valid JSON"),
    ],
)
def test_a_call_that_cannot_be_made_is_answered_and_may_be_mended(call: dict, text: str) -> None:
    tools = ScriptedTools(["price", "stock"], echo)
    good = tool_call("stock", "b")

    play = Play([calling(call, good), DONE], tools=tools)

    bad_reply, good_reply = play.episode.messages[2:4]
    assert bad_reply["content"].startswith(f"error: {text}")
    assert good_reply["content"] == "stock {}"
    assert play.episode.tool_errors == 1
    assert [name for name, _, _ in tools.calls] == ["stock"]


def test_a_tool_without_arguments_may_be_called_with_an_empty_text() -> None:
    tools = ScriptedTools(["price"], echo)

    Play([calling(tool_call("price", "a", "")), DONE], tools=tools)

    assert tools.calls == [("price", {}, {"m": 1})]


def test_without_tools_a_call_is_answered_too() -> None:
    play = Play([calling(tool_call("price", "a")), DONE])

    assert play.episode.messages[2]["content"] == "error: unknown tool 'price'; there are no tools"


def test_a_task_is_offered_only_the_tools_it_names() -> None:
    tools = ScriptedTools(["a", "b", "c"], echo)
    one = task_from_row({"prompt": "x", "tools": ["c", "a"]})
    none = task_from_row({"prompt": "x", "tools": []})

    assert [schema["function"]["name"] for schema in offered_tools(one, tools)] == ["a", "c"]
    assert offered_tools(none, tools) == offered_tools(TASK, None) == []
    assert len(offered_tools(TASK, tools)) == 3
    play = Play([calling(tool_call("b")), DONE], task=one, tools=tools)
    assert "unknown tool 'b'; the tools are: a, c" in play.episode.messages[2]["content"]
    assert tools.calls == []


@pytest.mark.parametrize("num_calls", [1, 3])
def test_a_tool_host_that_is_gone_ends_the_rollout_with_its_own_failure(num_calls: int) -> None:
    async def gone(name: str, _arguments: dict[str, Any]) -> ToolResult:
        if name == "price":
            raise CallFailedError(FailureClass.TOOL_HOST, "the host is gone")
        return ToolResult(content="", is_error=False)

    names = ["price", "stock", "other"][:num_calls]
    with pytest.raises(CallFailedError, match="the host is gone"):
        Play(
            [calling(*(tool_call(name) for name in names)), DONE],
            tools=ScriptedTools(["price", "stock", "other"], gone),
        )


TURNS = [calling(tool_call("price", "a")), calling(tool_call("prize", "b")), DONE]


@pytest.mark.parametrize(
    ("last", "stop"), [(DONE, StopReason.ANSWERED), (calling(tool_call()), StopReason.MAX_TURNS)]
)
def test_with_a_nudge_the_model_goes_on_until_max_turns(last: Any, stop: StopReason) -> None:
    tools = ScriptedTools(["price"], echo)
    call = tool_call("price", "a")

    play = Play([DONE, calling(call), DONE, last], tools=tools, max_turns=4, nudge="And now?")

    episode = play.episode
    assert episode.messages == [
        user("How much?"),
        DONE.message,
        user("And now?"),
        assistant(None, call),
        {**tool_reply("price {}", "a"), "name": "price"},
        DONE.message,
        user("And now?"),
        last.message,
    ]
    assert (episode.stop_reason, episode.turns) == (stop, 4)
    assert play.conversation.seen == episode.messages[1:]


@pytest.mark.parametrize("finish", ["length", "context"])
def test_a_turn_that_was_cut_off_is_the_last_also_with_a_nudge(finish: str) -> None:
    play = Play([turn(assistant("cut o"), finish=finish), DONE], nudge="And now?")

    assert play.episode.turns == 1
    assert play.episode.messages[-1]["role"] == "assistant"


NUDGED = [DONE, calling(tool_call("price", "a")), DONE, DONE]


@given(st.integers(0, 5), st.booleans())
def test_recorded_steps_are_replayed_and_the_episode_comes_out_the_same(
    num_recorded: int, is_nudged: bool
) -> None:
    rules = TurnRules(4, "And now?" if is_nudged else None)
    turns, tools = NUDGED if is_nudged else TURNS, ScriptedTools(["price"], echo)
    options: Any = {"max_turns": 4, "nudge": rules.nudge}
    whole = Play(turns, tools=tools, **options)
    resumed, order = MemoryRecorder(), whole.recorder.order
    for kind, index in order[:num_recorded]:
        steps = "turns" if kind == "turn" else "replies"
        getattr(resumed, steps)[index] = getattr(whole.recorder, steps)[index]
    has_replies = any(kind == "replies" for kind, _index in order[:num_recorded])
    # A rollout that is over needs no state of its tools.
    assert needs_lost_state(resumed, rules) is (has_replies and num_recorded < len(order))

    again = Play(turns, tools=tools, recorder=resumed, **options)

    assert again.episode == whole.episode
    assert again.conversation.seen == whole.conversation.seen
    num_turns = sum(kind == "turn" for kind, _ in order[:num_recorded])
    assert again.conversation.sampled == len(turns) - num_turns
    assert resumed.order == order[num_recorded:]


def test_a_step_is_on_record_before_it_is_used() -> None:
    recorder = MemoryRecorder()

    async def look(_name: str, _arguments: dict[str, Any]) -> ToolResult:
        assert recorder.order == [("turn", 0)]
        return ToolResult(content="seen", is_error=False)

    play = Play(
        [calling(tool_call()), DONE], tools=ScriptedTools(["price"], look), recorder=recorder
    )

    assert play.episode.messages[2]["content"] == "seen"
