import json

import pytest

from fakes.conversations import LAMP, PRICE, answer, calls, reply, user
from fakes.tiny_models import build_tokenizer
from stillroom.data.inspect import InspectExamples, inspect_examples
from stillroom.settings import Workspace

TOKENIZER = build_tokenizer("chatml")
SFT = {
    "messages": [user("Price?"), calls(LAMP), reply("12"), answer("It costs 12.")],
    "tools": [PRICE],
    "reward": 1.0,
}


def inspect(folder, *rows, tokenizer=TOKENIZER, **request):
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    (folder / "rows.jsonl").write_text("\n".join(lines), encoding="utf-8")
    requested = InspectExamples(path="rows.jsonl", **request)
    return inspect_examples(Workspace(folder), requested, tokenizer=tokenizer).page


def test_the_trained_tokens_stand_in_brackets(tmp_path):
    example = inspect(tmp_path, SFT).examples[0]

    assert example.problem is None
    assert example.reward == 1.0
    assert example.text.endswith(
        "<|im_start|>user\nPrice?<|im_end|>\n"
        "<|im_start|>assistant\n"
        '⟦<tool_call>\n{"name": "price", "arguments": {"item": "lamp"}}\n</tool_call><|im_end|>⟧\n'
        "<|im_start|>user\n<tool_response>\n12\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
        "⟦It costs 12.<|im_end|>⟧\n"
    )


def test_turns_of_weight_0_stand_outside_the_brackets_and_are_not_counted(tmp_path):
    call, *rest = SFT["messages"][1:]
    row = SFT | {"messages": [SFT["messages"][0], {**call, "weight": 0}, *rest]}

    whole, example = inspect(tmp_path, SFT, row).examples

    assert example.text.count("⟦") == 1
    assert "⟦It costs 12.<|im_end|>⟧" in example.text
    assert example.num_tokens == whole.num_tokens
    assert 0 < example.num_trained_tokens < whole.num_trained_tokens


def test_both_answers_of_a_preference_are_shown_and_only_they_are_trained(tmp_path):
    row = {
        "prompt": [user("a"), answer("b"), user("c")],
        "chosen": [answer("good")],
        "rejected": [answer("bad")],
    }

    text = inspect(tmp_path, row).examples[0].text

    assert "⟦good<|im_end|>⟧" in text
    assert "⟦bad<|im_end|>⟧" in text
    assert text.count("⟦") == 2


@pytest.mark.parametrize("tokenizer", [TOKENIZER, None], ids=["with model", "without"])
def test_a_row_that_cannot_be_shown_is_told_and_the_others_are_shown(tmp_path, tokenizer):
    picture = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
    bad = {"messages": [picture, answer("b")]}

    page = inspect(tmp_path, bad, "{", {"messages": [user("a"), answer("b")]}, n=3,
                   tokenizer=tokenizer)  # fmt: skip

    first, second, third = page.examples
    assert "image_url" in first.problem
    assert "not valid JSON" in second.problem
    assert third.problem is None
