"""Of every token of ten families' conversations: whether it is trained, and whose it is.

Counted without the templates: by words that only one message holds.
"""

import itertools
import json
import re

import pytest

from fakes.conversations import answer, calls, reply, system, user
from fakes.mask_families import MASK_FAMILIES, MaskFamily
from fakes.masks import ENDS, SEES, TOKENIZERS, stretches
from stillroom.data.chat.render import ChatRenderer, RenderedConversation
from stillroom.types import Message

# Each word stands in one message only, so that it tells for every token whose it is.
WORDS = {
    "system": "Sysone.",
    "users": ("Usrone?", "Usrtwo?", "Usrthree?"),
    "replies": ("Repone", "Reptwo", "Repthree"),
    "calls": ("callone", "calltwo", "callthree"),
    "answers": ("Ansone.", "Anstwo.", "Ansthree."),
    "thoughts": tuple(f"Thought{letter}." for letter in "abcdefgh"),
}
OTHERS = (WORDS["system"], *WORDS["users"], *WORDS["replies"], "looks up")


def told_apart(
    family: MaskFamily, *, num_rounds: int, has_tools: bool, has_thinking: bool
) -> list[Message]:
    """A conversation of so many questions; the first has two rounds of tools, the others one."""
    made = [system(WORDS["system"])] if family.has_system else []
    number = 0
    for round_ in range(num_rounds):
        made.append(user(WORDS["users"][round_]))
        for _ in range((2 if round_ == 0 else 1) if has_tools and number < 3 else 0):
            call = ("price", json.dumps({"item": WORDS["calls"][number]}))
            made += [calls(call, first=number), reply(WORDS["replies"][number], number)]
            number += 1
        made.append(answer(WORDS["answers"][round_]))
    if not has_thinking:
        return made
    thoughts = iter(WORDS["thoughts"])
    return [
        {**m, "reasoning_content": next(thoughts)} if m["role"] == "assistant" else m for m in made
    ]


Span = tuple[int, int, bool]
"""Where a token's text begins and ends, and whether it is trained."""


def token_spans(one: RenderedConversation, name: str) -> list[Span]:
    decode = TOKENIZERS[name].decode
    ends = [len(decode(one.ids[: n + 1], skip_special_tokens=False)) for n in range(len(one.ids))]
    return list(zip([0, *ends[:-1]], ends, one.trained, strict=True))


def places(one: RenderedConversation, spans: list[Span], word: str) -> list[list[bool]]:
    """Of each occurrence of a word the marks of the tokens that hold any of it."""
    return [
        [mark for first, last, mark in spans if first < found.end() and last > found.start()]
        for found in re.finditer(re.escape(word), one.text)
    ]


def num_wrong(
    sequences: list[RenderedConversation], name: str, messages: list[Message], kept: bool
) -> int:
    """How many tokens are trained that another says, or not trained once that the model says."""
    wrong, seen = 0, [(one, token_spans(one, name)) for one in sequences]
    for (one, spans), word in itertools.product(seen, OTHERS):
        wrong += sum(sum(marks) for marks in places(one, spans, word))
    for message in messages:
        if message["role"] != "assistant":
            continue
        said = [str(message["content"])] if message["content"] else []
        said += [message["reasoning_content"]] if kept else []
        said += [w for w in WORDS["calls"] if w in json.dumps(message.get("tool_calls", []))]
        for word in said:
            found = [marks for one, spans in seen for marks in places(one, spans, word)]
            whole = [marks for marks in found if all(marks)]
            wrong += sum(sum(marks) for marks in found if not all(marks))
            wrong += len(found[0]) if len(whole) != 1 else 0
    # The mark after the last trained token of each stretch is the end of a turn.
    ends = ENDS.get(name, {"<|im_end|>"})
    for one in sequences:
        marks = [*one.trained, False]
        last = [i for i in range(len(one.ids)) if marks[i] and not marks[i + 1]]
        tokens = TOKENIZERS[name].convert_ids_to_tokens([one.ids[i] for i in last])
        wrong += sum(token not in ends for token in tokens)
    turns = sum(message["role"] == "assistant" for message in messages)
    return wrong + abs(turns - sum(len(stretches(one, name)) for one in sequences))


MATRIX = [
    (name, num_rounds, has_tools, has_thinking, kept)
    for name, family in MASK_FAMILIES.items()
    for num_rounds in (1, 2, 3)
    for has_tools in (False, True)
    for has_thinking in (False, True)
    for kept in (False, True)
    if (family.has_tools or not has_tools)
    # Thinking that a family never shows is refused where it is asked for.
    and (family.has_thinking or not (has_thinking and kept))
]


@pytest.mark.parametrize(("name", "num_rounds", "has_tools", "has_thinking", "kept"), MATRIX)
def test_of_all_families_tools_thinking_and_turns_no_token_is_wrong(
    name: str, num_rounds: int, has_tools: bool, has_thinking: bool, kept: bool
) -> None:
    messages = told_apart(
        MASK_FAMILIES[name], num_rounds=num_rounds, has_tools=has_tools, has_thinking=has_thinking
    )
    renderer = ChatRenderer(TOKENIZERS[name], include_thinking=kept)

    sequences = renderer.sequences(messages, [SEES] if has_tools else [])

    assert num_wrong(sequences, name, messages, kept and has_thinking) == 0
    if not (kept and has_thinking):
        assert not any("Thought" in one.text for one in sequences)


def test_the_count_of_wrong_tokens_sees_a_mask_that_is_off_by_one() -> None:
    family = MASK_FAMILIES["qwen"]
    messages = told_apart(family, num_rounds=2, has_tools=True, has_thinking=False)
    [one] = ChatRenderer(TOKENIZERS["qwen"]).sequences(messages, [SEES])
    for shifted in ([False, *one.trained[:-1]], [*one.trained[1:], False]):
        moved = RenderedConversation(one.text, one.ids, shifted)
        assert num_wrong([moved], "qwen", messages, False) > 0
    assert num_wrong([one, one], "qwen", messages, False) > 0
    nothing = RenderedConversation(one.text, one.ids, [False] * len(one.ids))
    assert num_wrong([nothing], "qwen", messages, False) > 0
