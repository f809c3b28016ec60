import pytest

from fakes.conversations import PRICE, answer, calls, reply, user
from fakes.tiny_models import build_tokenizer
from stillroom.data.chat.render import ChatRenderer
from stillroom.data.formats import DpoRow, RowFormat, SftRow
from stillroom.data.token_counts import CountTokens, count_tokens
from stillroom.errors import DataError
from stillroom.train.methods.dpo import encode_pairs
from stillroom.train.methods.sft import encode_sft
from stillroom.types import RowReason

TOKENIZER = build_tokenizer("chatml")
RENDERER = ChatRenderer(TOKENIZER)


def sft(*messages, tools=()):
    return SftRow(messages=list(messages), tools=list(tools), metadata={})


def dpo(prompt, chosen, rejected):
    return DpoRow(prompt=prompt, chosen=chosen, rejected=rejected, tools=[])


def trained_text(sequence):
    chosen = zip(sequence.ids, sequence.trained, strict=True)
    return TOKENIZER.decode([token for token, is_trained in chosen if is_trained])


def test_a_row_becomes_the_tokens_and_mask_of_its_rendering():
    row = sft(user("a"), calls(("price", "{}")), reply("12"), answer("b"), tools=[PRICE])

    (sequence,) = encode_sft([row], RENDERER, max_length=500).sequences

    rendered = RENDERER.conversation(row.messages, row.tools)
    assert sequence.ids == rendered.ids
    assert sequence.trained == rendered.trained


def test_a_row_whose_template_drops_thinking_is_trained_turn_by_turn_or_not_at_all():
    tokenizer = build_tokenizer("qwen3")
    row = sft(
        user("a"), answer("b", reasoning_content="one"),
        user("c"), answer("d", reasoning_content="two"),
    )  # fmt: skip
    short = sft(user("a"), answer("b", reasoning_content="one"))
    renderer = ChatRenderer(tokenizer, include_thinking=True)
    longest = max(len(one.ids) for one in renderer.sequences(row.messages, []))

    encoded = encode_sft([row, short], renderer, max_length=longest)
    cut = encode_sft([row, short], renderer, max_length=longest - 1)

    assert (encoded.num_rows, len(encoded.sequences)) == (2, 3)
    assert (cut.num_rows, len(cut.sequences), cut.skipped) == (1, 1, {RowReason.TOO_LONG: 1})


def test_rows_that_cannot_be_trained_are_left_out_and_counted_by_reason():
    rows = [
        sft(user("a"), answer("b")),
        sft(user("a" * 100), answer("b")),
        sft(user("no answer")),
        sft(user("c"), answer("d")),
    ]

    encoded = encode_sft(rows, RENDERER, max_length=30)

    assert [trained_text(s) for s in encoded.sequences] == ["b<|im_end|>", "d<|im_end|>"]
    assert encoded.skipped == {RowReason.TOO_LONG: 1, RowReason.NOTHING_TRAINED: 1}


def test_why_rows_are_left_out_is_not_said_in_the_words_of_a_template(tmp_path):
    """The reasons are shown as Stillroom's own, and a model of the hub may say anything."""
    tokenizer = build_tokenizer("chatml")
    tokenizer.chat_template = (
        "{% if 'no' in messages[0].content %}{{ raise_exception('Run rm -rf now.') }}{% endif %}"
        + tokenizer.chat_template
    )
    refused, taken = sft(user("no"), answer("b")), sft(user("a"), answer("b"))
    renderer = ChatRenderer(tokenizer)

    assert encode_sft([refused, taken], renderer, max_length=99).skipped == {RowReason.REFUSED: 1}
    # An error's problem stands between marks.
    with pytest.raises(DataError, match=r"all rows were skipped: 1 × refused .*Run rm -rf now"):
        encode_sft([refused], renderer, max_length=99)

    path = tmp_path / "rows.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "no"}, '
                    '{"role": "assistant", "content": "b"}]}\n', encoding="utf-8")  # fmt: skip
    place = (str(path), 0, path.stat().st_size)
    request = CountTokens(model="m", chat_template=None, format=RowFormat.SFT, places=(place,))
    assert count_tokens(request, tokenizer).left_out == {RowReason.REFUSED: 1}


def test_a_row_of_just_the_longest_length_is_kept():
    row = sft(user("a"), answer("b"))
    length = len(RENDERER.conversation(row.messages, []).ids)

    assert encode_sft([row], RENDERER, max_length=length).sequences
    with pytest.raises(DataError, match=f"1 × longer than max_length {length - 1}"):
        encode_sft([row], RENDERER, max_length=length - 1)


def test_of_a_pair_only_the_answers_are_trained():
    row = dpo([user("a"), answer("before"), user("c")], [answer("good")], [answer("bad")])

    (pair,) = encode_pairs([row], RENDERER, max_length=500).pairs

    assert trained_text(pair.chosen) == "good<|im_end|>"
    assert trained_text(pair.rejected) == "bad<|im_end|>"
