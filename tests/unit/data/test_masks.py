"""What is trained of a conversation, for ten families of chat templates.

The golden files were read by eye. What they hold is checked by a second account of it, made of
nothing but the templates' texts: before each trained turn stands exactly what the model sees when
it has to write that turn, and the turn is exactly what the template makes of it then.
"""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from fakes.conversations import CHAIR, LAMP, answer, calls, reply, system, user
from fakes.mask_families import MASK_FAMILIES, MaskFamily
from fakes.masks import SEES, TOKENIZERS, stretches
from stillroom.data.chat.render import ChatRenderer, RenderedConversation
from stillroom.data.chat.views import sequence_view
from stillroom.data.inspect import bracketed_text
from stillroom.errors import ModelError
from stillroom.types import Message

GOLDEN = Path(__file__).parents[2] / "golden" / "masks"
# Only the last turn gets it, and it says nothing: what stays in the history is trained without.
EMPTY_THINKING = {"qwen": "<think>\n\n</think>\n\n"}
CHAT = [
    user("USER What does the lamp cost?"),
    answer("The lamp costs 12."),
    user("USER And the chair?"),
    answer("The chair costs 30."),
]
TOOLS = [
    user("USER What do lamp and chair cost?"),
    calls(LAMP),
    reply("REPLY 12"),
    calls(CHAIR, first=1),
    reply("REPLY 30", 1),
    answer("12 and 30."),
    user("USER Again, the lamp?"),
    calls(LAMP, first=2),
    reply("REPLY 12", 2),
    answer("Still 12."),
]


def thoughtful(messages: list[Message]) -> list[Message]:
    thoughts = (f"Thought {number}." for number in range(1, 9))
    return [
        {**m, "reasoning_content": next(thoughts)} if m["role"] == "assistant" else m
        for m in messages
    ]


def scenarios(family: MaskFamily) -> dict[str, tuple[list[Message], list[Any]]]:
    head = [system("SYSTEM Be brief.")] if family.has_system else []
    made = {"chat": ([*head, *CHAT], [])}
    if family.has_tools:
        made["tools"] = ([*head, *TOOLS], [SEES])
    if family.has_thinking:
        made["thinking"] = ([*head, *thoughtful(CHAT)], [])
    if family.has_thinking and family.has_tools:
        made["thinking-tools"] = ([*head, *thoughtful(TOOLS)], [SEES])
    return made


CASES = [
    (name, scenario) for name, family in MASK_FAMILIES.items() for scenario in scenarios(family)
]


def rendered(name: str, scenario: str) -> list[RenderedConversation]:
    messages, tools = scenarios(MASK_FAMILIES[name])[scenario]
    is_thinking = scenario.startswith("thinking")
    return ChatRenderer(TOKENIZERS[name], include_thinking=is_thinking).sequences(messages, tools)


@pytest.mark.parametrize("name", MASK_FAMILIES)
def test_masks_are_as_reviewed(name: str, request: pytest.FixtureRequest) -> None:
    parts: list[str] = []
    renderer = ChatRenderer(TOKENIZERS[name])
    for scenario in scenarios(MASK_FAMILIES[name]):
        for number, one in enumerate(rendered(name, scenario), start=1):
            text = bracketed_text(sequence_view(None, one, [], renderer, limit=9999))
            parts.append(f"=== {scenario}, sequence {number}\n{text}\n")
    shown, path = "".join(parts), GOLDEN / f"{name}.txt"
    if request.config.getoption("--update-golden"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(shown, encoding="utf-8")
    assert shown == path.read_text(encoding="utf-8")


def template_text(name: str, messages: list[Message], tools: list[Any], **options: bool) -> str:
    """The template's own words, through transformers' own door."""
    plain = json.loads(json.dumps(messages))
    for message in plain:
        if "reasoning_content" in message:
            message["thinking"] = message["reasoning_content"]
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return TOKENIZERS[name].apply_chat_template(
        plain, tools=tools or None, tokenize=False, **options
    )


def written_text(name: str, messages: list[Message], tools: list[Any]) -> str:
    """What the last message is as text, by its template alone."""
    text = template_text(name, messages, tools)
    before = template_text(name, messages[:-1], tools, add_generation_prompt=True)
    if not text.startswith(before):
        # gpt-oss drops the thinking of calls as soon as an answer follows, so leave it out.
        bare = [{k: v for k, v in m.items() if k != "reasoning_content"} for m in messages[:-1]]
        text = template_text(name, [*bare, messages[-1]], tools)
        before = template_text(name, bare, tools, add_generation_prompt=True)
    assert text.startswith(before)
    return text[len(before) :]


@pytest.mark.parametrize(("name", "scenario"), CASES)
def test_each_turn_is_trained_once_after_what_the_model_sees_when_it_writes_it(
    name: str, scenario: str
) -> None:
    messages, tools = scenarios(MASK_FAMILIES[name])[scenario]
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    seen = {template_text(name, messages[:i], tools, add_generation_prompt=True): i for i in turns}
    assert len(seen) == len(turns)
    trained: list[int] = []
    for one in rendered(name, scenario):
        for before, _, turn in stretches(one, name):
            index = seen[before]
            written = written_text(name, messages[: index + 1], tools)
            empty = EMPTY_THINKING.get(name, "")
            whole = turn if written.startswith(turn) else empty + turn
            rest = written.removeprefix(whole)
            assert written.startswith(whole)
            # Behind the end of the turn stands nothing that the model says.
            assert rest.strip() in ("", "<|endoftext|>")
            trained.append(index)
    assert sorted(trained) == turns


def test_what_a_family_cannot_say_is_refused_with_a_reason() -> None:
    for name, family in MASK_FAMILIES.items():
        silent = ChatRenderer(TOKENIZERS[name])
        thinking = ChatRenderer(TOKENIZERS[name], include_thinking=True)
        if not family.has_system:
            with pytest.raises(ModelError, match="refuses this conversation"):
                silent.sequences([system("SYSTEM"), *CHAT], [])
        if not family.has_tools:
            with pytest.raises(ModelError, match="refuses this conversation"):
                silent.sequences(TOOLS, [SEES])
        if not family.has_thinking:
            with pytest.raises(ModelError, match="leaves out the thinking"):
                thinking.sequences(thoughtful(CHAT), [])
    can = [(f.has_system, f.has_tools, f.has_thinking) for f in MASK_FAMILIES.values()]
    assert [sum(not what for what in column) for column in zip(*can, strict=True)] == [1, 2, 8]


def test_a_family_that_drops_thinking_takes_a_sequence_for_every_question() -> None:
    assert [len(rendered(name, "thinking-tools")) for name in ("qwen", "glm", "smollm")] == [
        2,
        2,
        1,
    ]
    assert len(rendered("qwen", "tools")) == 1


def test_a_pair_whose_answer_is_not_one_sequence_is_refused() -> None:
    messages, tools = scenarios(MASK_FAMILIES["qwen"])["thinking-tools"]
    renderer = ChatRenderer(TOKENIZERS["qwen"], include_thinking=True)
    with pytest.raises(ModelError, match="differently once the conversation continues"):
        renderer.conversation(messages, tools)
    given = renderer.conversation(messages, tools, num_given_turns=3)
    assert "Thought 4." in stretches(given, "qwen")[0][2]


def test_tool_calls_that_a_template_never_shows_are_refused() -> None:
    tokenizer = copy.deepcopy(TOKENIZERS["chatml"])
    # As that of SmolLM2-135M-Instruct: of a turn with calls it writes the content alone.
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    renderer = ChatRenderer(tokenizer)
    assert renderer.sequences(CHAT, [])
    with pytest.raises(ModelError, match="leaves out the tool calls") as caught:
        renderer.sequences(TOOLS, [SEES])
    assert "chat_template" in caught.value.fix
    naming = [TOOLS[0], {**TOOLS[1], "content": "I ask for its price."}, TOOLS[2], TOOLS[-1]]
    with pytest.raises(ModelError, match="leaves out the tool calls"):
        renderer.sequences(naming, [SEES])


@pytest.mark.parametrize("content", ["pri", "price", "The price: price."])
def test_the_text_beside_a_call_may_share_words_with_the_tools_name(content: str) -> None:
    messages = [TOOLS[0], {**TOOLS[1], "content": content}, *TOOLS[2:]]
    for name in ("qwen", "chatml"):
        renderer = ChatRenderer(TOKENIZERS[name])
        assert content in renderer.turn_text(messages[1], [SEES])
        assert renderer.sequences(messages, [SEES])


@pytest.mark.parametrize(
    ("name", "include_thinking"),
    [("chatml", False), ("qwen", False), ("qwen", True), ("llama", False)],
)
def test_a_call_may_be_mentioned_in_thinking_and_text_at_once(
    name: str, include_thinking: bool
) -> None:
    text = {"content": "I look up the price.", "reasoning_content": "I look up the price."}
    renderer = ChatRenderer(TOKENIZERS[name], include_thinking=include_thinking)
    assert renderer.sequences([TOOLS[0], {**TOOLS[1], **text}, *TOOLS[2:]], [SEES])


def test_thinking_that_a_template_never_shows_is_refused_when_it_was_asked_for() -> None:
    with pytest.raises(ModelError, match="leaves out the thinking") as caught:
        ChatRenderer(TOKENIZERS["chatml"], include_thinking=True).sequences(thoughtful(CHAT), [])
    assert "include_thinking" in caught.value.fix
