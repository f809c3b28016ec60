import itertools
import json
import os
import random
from functools import cache

import pytest
import torch

from fakes.token_kinds import KINDS, kind_tokenizer
from stillroom.data.chat.render import ChatRenderer
from stillroom.models.reread.byte_chain import SortedSums, SummedSymbols
from stillroom.models.reread.rereading import Reader, ReadingPair, render_turn, sampled_spans
from stillroom.models.reread.tile_divergence import ByteDivergences
from stillroom.models.reread.turns import TurnPart, TurnParts
from stillroom.types import TokenTrace

TURNS = int(os.environ.get("STILLROOM_REREAD_TURNS", "6"))
"""Random turns of each of the 42 pairs; 334 make 2,000 of each student's (docs/benchmarks.md)."""
WORDS = [
    "The", "answer", "is", "größer", "naïve", "日本語", "привет", "lamp", "🙂", "👩‍👩‍👧‍👦",
    "1234567", "3.14159", "\\n", '"q"', "\\u00e9", "{", "}", "\t", "  ", "\r\n", "\n\n", "Ġ", "'s",
    "https://a.b/c?d=1", "<tool", "|im", "[TOOL",
]  # fmt: skip
SCHEMA = {
    "type": "function",
    "function": {
        "name": "price",
        "description": "x",
        "parameters": {"type": "object", "properties": {"item": {"type": "string"}}},
    },
}
QUESTION = [{"role": "user", "content": "What does it cost?"}]


@cache
def reader(kind):
    tokenizer = kind_tokenizer(kind)
    renderer = ChatRenderer(tokenizer, include_thinking=True)
    return Reader(kind, tokenizer, renderer, frozenset([tokenizer.eos_token_id]))


@cache
def pair_of(student, teacher):
    return ReadingPair(reader(student), reader(teacher), max_context=100_000)


def random_text(rng, most):
    words = (rng.choice(WORDS) + rng.choice(["", " ", " "]) for _ in range(rng.randint(1, most)))
    return "".join(words).strip()


def random_turn(rng, *, calls, thinks):
    turn = {"role": "assistant", "content": rng.choice(["", random_text(rng, 12), "🙂🙂"])}
    if thinks and rng.random() < 0.4:
        turn["reasoning_content"] = random_text(rng, 8)
    num_calls = rng.choice(calls)
    if num_calls:
        turn["tool_calls"] = [
            {
                "id": f"abcdefgh{i}",
                "type": "function",
                "function": {
                    "name": rng.choice(["price", "get_weather"]),
                    "arguments": json.dumps(
                        {"item": random_text(rng, 4), "k": [1, None]},
                        ensure_ascii=rng.random() < 0.5,
                    ),
                },
            }
            for i in range(num_calls)
        ]
    return turn


def shaken(rng, pair, ids):
    """Returns tokens of the same text that the tokenizer itself would not always choose."""
    tokens = pair.symbol_sets([]).student.tokens
    by_bytes = {word: i for i, word in enumerate(tokens.by_id) if i not in tokens.marker_ids}
    out = []
    for token in ids:
        word = tokens.by_id[token]
        cut = rng.randint(1, len(word) - 1) if len(word) > 1 else 0
        halves = (word[:cut], word[cut:])
        if (
            token not in tokens.marker_ids
            and rng.random() < 0.15
            and all(h in by_bytes for h in halves)
        ):
            out += [by_bytes[half] for half in halves]
        else:
            out.append(token)
    return out


def read_turn(pair, ids, turn, tools):
    prompt = pair.student.renderer.prompt_ids(QUESTION, tools)
    trace = TokenTrace(
        ids=[*prompt, *ids],
        sampled=[False] * len(prompt) + [True] * len(ids),
        logprobs=[0.0] * (len(prompt) + len(ids)),
    )
    return pair.read(trace, [*QUESTION, turn], tools, num_turns=1)


def parts_of(turn):
    parts = [TurnPart("thought", turn.get("reasoning_content", "").encode())]
    parts.append(TurnPart("text", turn["content"].encode()))
    for call in turn.get("tool_calls", []):
        parts.append(TurnPart("name", call["function"]["name"].encode()))
        parts.append(TurnPart("arguments", call["function"]["arguments"].encode()))
    return [part for part in parts if part.text]


def check(pair, ids, reading):
    """Checks that each comparison is at the same text on both sides, and returns that text."""
    ours = pair.symbol_sets([]).student.tokens
    others = pair.symbol_sets([]).teacher.tokens
    spans = [i for i, is_turn in enumerate(reading.tokens.trained) if is_turn]
    teacher_ids = [reading.tokens.ids[i] for i in spans]
    said = bytearray()
    places = [(0, b"", 0, b"")]
    for point in reading.points:
        one, two = ours.by_id[ids[point.student_token]], None
        if point.teacher_token < len(teacher_ids):
            two = others.by_id[teacher_ids[point.teacher_token]]
        assert one.startswith(point.student_prefix)
        assert two is not None
        assert two.startswith(point.teacher_prefix)
        if 0 <= point.symbol < 256:
            assert one[len(point.student_prefix)] == point.symbol
            assert two[len(point.teacher_prefix)] == point.symbol
            said.append(point.symbol)
        before = places[-1]
        assert (point.student_token, len(point.student_prefix)) >= (before[0], len(before[1]))
        assert (point.teacher_token, len(point.teacher_prefix)) >= (before[2], len(before[3]))
        places.append(tuple(point[:4]))
    compared = {point.student_token for point in reading.points}
    assert reading.num_uncompared_tokens == len(ids) - len(compared)
    return bytes(said)


PAIRS = list(itertools.permutations(KINDS, 2))


@pytest.mark.parametrize(("student", "teacher"), PAIRS)
def test_every_byte_that_a_student_wrote_is_compared_once_at_the_same_text(student, teacher):
    rng = random.Random(f"{student} {teacher}")
    pair = pair_of(student, teacher)
    kinds = KINDS[student], KINDS[teacher]
    tools = [SCHEMA] if all(kind.has_tools for kind in kinds) else []
    markers = [pair.symbol_sets(tools).student.markers, pair.symbol_sets(tools).teacher.markers]
    calls = [0, 1] if all(one.supports_calls for one in markers) else [0]
    if all(one.call_to_call is not None for one in markers):
        calls += [2, 3]
    thinks = all(one.supports_thinking for one in markers)
    num_read = 0
    for _ in range(TURNS):
        turn = random_turn(rng, calls=calls, thinks=thinks)
        if turn.get("tool_calls") and any(one.text_to_call is None for one in markers):
            turn["content"] = ""
        if turn.get("tool_calls") and any(one.thought_to_call is None for one in markers):
            turn.pop("reasoning_content", None)
        if not turn["content"] and not turn.get("tool_calls"):
            turn.pop("reasoning_content", None)
        parts = parts_of(turn)
        side = pair.symbol_sets(tools).student
        text = render_turn(side, TurnParts(parts, [], is_ended=True), has_end=True).text
        ids = shaken(rng, pair, pair.student.tokenizer.encode(text, add_special_tokens=False))
        reading = read_turn(pair, ids, turn, tools)

        said = check(pair, ids, reading).decode()

        assert said == b"".join(part.text for part in parts).decode()
        assert any(point.symbol >= 256 for point in reading.points)
        num_read += 1
    assert num_read == TURNS


def test_a_call_that_the_students_own_template_hides_is_left_out_and_counted():
    pair = pair_of("glm", "qwen")
    written = (
        "<think></think>\n<tool_call>price\n<arg_key>item</arg_key>\n"
        "<arg_value>lamp</arg_value>\n</tool_call><|endoftext|>"
    )
    ids = pair.student.tokenizer.encode(written, add_special_tokens=False)
    call = {"name": "price", "arguments": {"item": "lamp"}}
    turn = {"role": "assistant", "content": "", "tool_calls": [{"id": "a", "function": call}]}

    reading = read_turn(pair, ids, turn, [SCHEMA])

    assert reading.points == []
    assert (reading.num_compared_bytes, reading.num_uncompared_tokens) == (0, len(ids))
    assert reading.num_bytes == len(written) - len("<|endoftext|>")


@pytest.mark.parametrize(
    ("student", "teacher"),
    [("qwen", "tekken"), ("tekken", "chatml"), ("tekken", "llama"), ("llama", "tekken")],
)
def test_the_teacher_is_shown_what_its_own_template_writes(student, teacher):
    pair = pair_of(student, teacher)
    call = random_turn(random.Random(1), calls=[1], thinks=False) | {"content": ""}
    messages = [
        *QUESTION,
        call,
        {"role": "tool", "content": "12", "tool_call_id": "abcdefgh0", "name": "price"},
        {"role": "assistant", "content": "It costs 12."},
    ]
    renderer = pair.student.renderer
    ids, sampled = list(renderer.prompt_ids(QUESTION, [SCHEMA])), []
    sampled = [False] * len(ids)
    for number in (1, 3):
        turn = pair.student.tokenizer.encode(
            renderer.turn_text(messages[number], [SCHEMA]), add_special_tokens=False
        )
        ids, sampled = ids + turn, sampled + [True] * len(turn)
        if number == 1:
            reply = renderer.reply_ids(call, messages[2:3], [SCHEMA])
            ids, sampled = ids + reply, sampled + [False] * len(reply)
    trace = TokenTrace(ids=ids, sampled=sampled, logprobs=[0.0] * len(ids))

    reading = pair.read(trace, messages, [SCHEMA], num_turns=2)

    expected = pair.teacher.renderer.conversation(messages, [SCHEMA])
    assert len(sampled_spans(trace)) == 2
    assert reading.tokens.ids == expected.ids[: len(reading.tokens.ids)]
    assert sum(reading.tokens.trained) == sum(expected.trained)


@pytest.mark.parametrize("teacher", ["qwen", "harmony", "llama"])
@pytest.mark.parametrize(
    ("written", "compared"),
    [
        ("The answer is", "The answer is"),
        ("[TOOL_CALLS]pri", "pri"),
        ('[TOOL_CALLS]price[ARGS]{"item": "la', 'price{"item": "la'),
        ('[TOOL_CALLS]price[ARGS]{"item": }</s>', 'price{"item": }'),
        ('[TOOL_CALLS]price[ARGS]{"item": "lamp"} oh</s>', 'price{"item": "lamp"}'),
        ("</s>", ""),
    ],
)
def test_turns_that_are_not_well_formed_are_compared_as_far_as_they_go(teacher, written, compared):
    pair = pair_of("tekken", teacher)
    ids = pair.student.tokenizer.encode(written, add_special_tokens=False)
    turn = {"role": "assistant", "content": written}
    if "[TOOL_CALLS]" in written:
        turn |= {"content": "", "tool_calls": [
            {"id": "abcdefghi", "type": "function", "function": {"name": "price", "arguments": "x"}}
        ]}  # fmt: skip

    reading = read_turn(pair, ids, turn, [SCHEMA])

    assert check(pair, ids, reading).decode() == compared


def test_half_a_character_at_the_end_is_left_out():
    pair = pair_of("chatml", "qwen")
    whole = pair.student.tokenizer.encode("Yes 👩", add_special_tokens=False)
    tokens = pair.symbol_sets([]).student.tokens
    ids = next(
        whole[:n]
        for n in range(len(whole), 0, -1)
        if b"\xf0" in tokens.text(whole[:n]) and tokens.text(whole[:n]) != "Yes 👩".encode()
    )

    reading = read_turn(pair, ids, {"role": "assistant", "content": "Yes ?"}, [])

    assert check(pair, ids, reading) == b"Yes "


def one_of_many_turns(rng):
    """Returns a turn that shares its beginning with others, ended differently."""
    number = rng.choice([rng.randint(1, 99), rng.randint(100, 999), rng.randint(1000, 30000)])
    if rng.random() < 0.6:
        return {"role": "assistant", "content": f"The answer is {number}."}
    words = ["lantern", "lamp", "ladder", "fan", "fork", "folder", "basket", "bucket"]
    call = {"name": "price", "arguments": json.dumps({"item": rng.choice(words), "n": number})}
    calls = [{"id": "abcdefgh0", "type": "function", "function": call}]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def next_tokens(sequences, weights, size):
    """Returns each sequence's next-token probabilities, from those of whole sequences.

    They are indices into rows of one table: sequences with the same beginning share its rows.
    """
    rows = {}
    for ids in sequences:
        for end in range(len(ids)):
            rows.setdefault(tuple(ids[:end]), len(rows))
    mass = torch.full((len(rows), size), 1e-13, dtype=torch.float64)
    places = [[rows[tuple(ids[:end])] for end in range(len(ids))] for ids in sequences]
    for ids, of_ids, weight in zip(sequences, places, weights, strict=True):
        for token, row in zip(ids, of_ids, strict=True):
            mass[row, token] += weight
    return mass / mass.sum(1, keepdim=True), places


@pytest.mark.parametrize(("student", "teacher"), [("qwen", "tekken"), ("tekken", "llama")])
def test_one_distribution_that_is_cut_in_two_ways_teaches_nothing(student, teacher):
    rng = random.Random(0)
    torch.manual_seed(0)
    pair = pair_of(student, teacher)
    turns = list({json.dumps(turn): turn for turn in map(one_of_many_turns, [rng] * 50)}.values())
    side = pair.symbol_sets([SCHEMA]).student
    student_ids, readings = [], []
    for turn in turns:
        shown = render_turn(side, TurnParts(parts_of(turn), [], is_ended=True), has_end=True)
        student_ids.append(pair.student.tokenizer.encode(shown.text, add_special_tokens=False))
        readings.append(read_turn(pair, student_ids[-1], turn, [SCHEMA]))
    teacher_ids = [
        [i for i, is_turn in zip(one.tokens.ids, one.tokens.trained, strict=True) if is_turn]
        for one in readings
    ]
    weights, others = (
        torch.distributions.Dirichlet(torch.full((len(turns),), 0.5, dtype=torch.float64)).sample()
        for _ in range(2)
    )
    table, rows = next_tokens(student_ids, weights, len(pair.student.tokenizer))
    order_P = torch.from_numpy(pair.teacher_trie.order)

    def expected_gradient(teacher_weights):
        """Returns the size of the gradient, expected over the student's turns, at each row."""
        teacher_table, teacher_rows = next_tokens(
            teacher_ids, teacher_weights, len(pair.teacher.tokenizer)
        )
        gradient = torch.zeros_like(table)
        for reading, ids, own, there, weight in zip(
            readings, student_ids, rows, teacher_rows, weights, strict=True
        ):
            divergences = ByteDivergences([reading], [len(ids)], torch.device("cpu"))
            whole, probabilities = slice(0, len(ids)), teacher_table[there]
            divergence, _ = divergences.compute_tile(
                whole,
                table[own].log(),
                table[own],
                lambda part, cuts, all_of=probabilities: SummedSymbols(
                    SortedSums(all_of[part], order_P, cuts)
                ),
            )
            gradient.index_add_(0, torch.tensor(own), weight * divergence.compute_gradient())
        return gradient.abs().sum().item()

    assert expected_gradient(weights) <= 0.01 * expected_gradient(0.9 * others + 0.1 * weights)
