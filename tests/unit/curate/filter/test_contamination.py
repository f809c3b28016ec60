import random
import string
from pathlib import Path
from typing import Any

import pytest

from fakes.filtering import filtered
from fakes.rollout_rows import assistant, read_rows, rollout_row, user, write_rows
from fakes.task_templates import SETS, WRAPPERS, split
from stillroom.curate.filter.contamination import (
    Contamination,
    ContaminationIndex,
    EvaluationPrompt,
)
from stillroom.data.words import words_of

_CHANCE = random.Random(0)
VOCABULARY = [
    "".join(_CHANCE.choices(string.ascii_lowercase, k=_CHANCE.randint(2, 9))) for _ in range(4000)
]
# As in real texts, a few words make up most of it.
WEIGHTS = [1 / rank for rank in range(1, 4001)]


def index_of(prompts: list[str], rows: list[str]) -> ContaminationIndex:
    index = ContaminationIndex(
        EvaluationPrompt(f"eval:{number}", tuple(words_of(prompt)))
        for number, prompt in enumerate(prompts, 1)
    )
    for row in rows:
        index.count_prompt(row)
    index.finish_counting()
    return index


def num_found(prompts: list[str], rows: list[str]) -> int:
    index = index_of(prompts, rows)
    return sum(index.find([row]) is not None for row in rows)


def prompt_of(chance: random.Random) -> list[str]:
    return chance.choices(VOCABULARY, WEIGHTS, k=chance.randint(12, 60))


def edited(chance: random.Random, words: list[str]) -> list[str]:
    words = list(words)
    for _ in range(max(1, len(words) // 10)):
        place = chance.randrange(len(words))
        words[place : place + chance.randint(0, 1)] = chance.choices(
            VOCABULARY, k=chance.randint(0, 1)
        )
    return words


def set_anew(chance: random.Random, words: list[str]) -> str:
    """The same words with other case, punctuation and blanks."""
    changed = [word.upper() if chance.random() < 0.3 else word for word in words]
    return "  \n".join(word + chance.choice(["", ",", "!", " –"]) for word in changed)


@pytest.mark.thorough
@pytest.mark.parametrize("boilerplate", ["", "You are a clerk. Use the tools. Answer in a box: "])
def test_planted_prompts_are_found_and_a_clean_set_has_none(boilerplate: str) -> None:
    chance = random.Random(3)
    prompts = [prompt_of(chance) for _ in range(150)]
    clean = [boilerplate + " ".join(prompt_of(chance)) for _ in range(1500)]
    before, behind = prompt_of(chance), prompt_of(chance)
    exact = [set_anew(chance, prompt) for prompt in prompts]
    embedded = [" ".join([*before, *prompt, *behind]) for prompt in prompts]
    near = [boilerplate + " ".join(edited(chance, prompt)) for prompt in prompts]
    near_embedded = [" ".join([*before, *edited(chance, prompt), *behind]) for prompt in prompts]
    texts = [boilerplate + " ".join(prompt) for prompt in prompts]

    index = index_of(texts, [*clean, *exact, *embedded, *near, *near_embedded])

    def found(rows: list[str]) -> int:
        return sum(index.find([row]) is not None for row in rows)

    assert found(clean) == 0
    if not boilerplate:
        assert found(exact) == found(embedded) == 150
    assert found(exact) + found(embedded) >= 297
    assert found(near) + found(near_embedded) >= 285


@pytest.mark.thorough
@pytest.mark.parametrize("num_prompts", [1, 2, 5, 200])
@pytest.mark.parametrize("num_rows", [5, 100, 1000])
def test_tasks_of_one_template_do_not_count_as_each_other(num_prompts: int, num_rows: int) -> None:
    chance = random.Random(4)

    def task() -> str:
        amounts, goods = chance.choices(range(1, 99), k=2), chance.choices(VOCABULARY, k=2)
        return (
            "You are a shop clerk. Use the tools and answer with a number only. A customer wants "
            f"{amounts[0]} {goods[0]} and {amounts[1]} {goods[1]} sent to {chance.choice('ABCDE')} "
            "street; what is the total price in euros including shipping?"
        )

    prompts = [task() for _ in range(num_prompts)]
    rows = [row for row in (task() for _ in range(num_rows)) if row not in prompts]

    assert num_found(prompts, rows) == 0
    assert num_found(prompts, [*rows, *prompts]) == len(set(prompts))


@pytest.mark.thorough
def test_one_prompt_that_many_rows_repeat_with_changes_is_no_boilerplate() -> None:
    chance = random.Random(5)
    prompts = [prompt_of(chance) for _ in range(5)]
    copies = [" ".join(edited(chance, prompt)) for prompt in prompts for _ in range(60)]
    clean = [" ".join(prompt_of(chance)) for _ in range(700)]

    found = num_found([" ".join(prompt) for prompt in prompts], [*copies, *clean])

    assert 0.95 * len(copies) <= found <= len(copies)


def test_a_short_prompt_counts_only_as_a_whole_message() -> None:
    index = index_of(["What is 5 + 7?"], ["x"])

    assert index.find(["what is 5+7"]) == Contamination("eval:1", "exact")
    assert index.find(["What is 5 + 7 + 9?"]) is None


def test_a_prompt_as_it_is_comes_before_one_that_is_like_it() -> None:
    words = [f"word{number}" for number in range(30)]
    other = [*words[:15], "else", *words[16:]]
    index = index_of([" ".join(other), " ".join(words)], ["x"])

    found = index.find([" ".join(words)])

    assert found == Contamination("eval:2", "exact")


def test_a_long_text_with_many_changes_is_found_by_its_runs() -> None:
    chance = random.Random(6)
    article = chance.choices(VOCABULARY, k=900)
    changed = list(article)
    for place in range(0, 900, 20):
        changed[place] = "changed"

    assert num_found([" ".join(article)], [" ".join(changed), " ".join(prompt_of(chance))]) == 1


def test_questions_that_were_put_in_other_words_are_found() -> None:
    requested = [
        "Natalia sold clips to 48 friends in April, and then half as many in May. How many in all?",
        "Weng earns $12 an hour for babysitting. Yesterday, she just did 50 minutes. How much?",
    ]
    reworded = [
        "Natalia sold clips to 48 friends during April, then half as many in May. How many in sum?",
        "Weng makes $12 an hour babysitting. Yesterday she only did 50 minutes. How much?",
    ]
    other = "Tom sold apples to 12 of his neighbours. How many did he sell in March and in May?"

    assert num_found(requested, [*reworded, other]) == 2
    assert index_of(requested, [other]).find([other]) is None


SYSTEM = {
    "role": "system",
    "content": "Sort each message: billing, parcel or fault.",
}


def asking(number: int, text: str, *, topic: str = "a", system: bool = False) -> dict[str, Any]:
    """A rollout of one task."""
    messages = [SYSTEM] * system + [user(text), assistant(topic)]
    return rollout_row(task_id=f"t{number}", messages=messages, metadata={"task_type": topic})


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("held_out", "num_rows", "is_system"),
    [(50, 300, False), (50, 300, True), (260, 1000, True)],
)
@pytest.mark.parametrize("name", SETS)
def test_of_a_templated_set_every_copy_goes_and_no_other_task(
    tmp_path: Path, name: str, held_out: int, num_rows: int, is_system: bool
) -> None:
    chance = random.Random(held_out)
    held, clean = split(name, chance, held_out=held_out, rows=num_rows)
    copies = [set_anew(chance, task.split()) for task in held[:20]]
    wrapped = [wrapper.format(task) for task in held[20:40] for wrapper in WRAPPERS]
    texts = [*clean, *copies, *wrapped]
    rows = [asking(number, text, system=is_system) for number, text in enumerate(texts)]
    write_rows(tmp_path / "rollouts.jsonl", rows)
    write_rows(tmp_path / "held.jsonl", [{"prompt": task} for task in held])

    result = filtered(tmp_path, decontaminate=["held.jsonl"])

    gone = [row["line"] - 1 for row in read_rows(tmp_path / "kept.jsonl.dropped")]
    assert gone == list(range(len(clean), len(texts)))
    assert result.contamination == {"exact": 20, "contained": 60, "near": 0}


@pytest.mark.parametrize(("held_out", "num_rows"), [(10, 50), (20, 100), (30, 150)])
def test_of_a_set_too_small_to_tell_its_templates_no_other_task_goes(
    held_out: int, num_rows: int
) -> None:
    for seed in range(6):
        held, clean = split("support", random.Random(seed), held_out=held_out, rows=num_rows)
        index = index_of(held, clean)

        assert [task for task in clean if index.find([task]) is not None] == []
        assert all(index.find([task]) is not None for task in held)


def test_levels_drop_what_they_name_and_are_counted(tmp_path: Path) -> None:
    chance = random.Random(8)
    prompts = [" ".join(prompt_of(chance)) for _ in range(30)]
    near = [" ".join(edited(chance, prompt.split())) for prompt in prompts[20:]]
    texts = [*prompts[:10], *(f"Well, {prompt} Right?" for prompt in prompts[10:20]), *near]
    texts += [" ".join(prompt_of(chance)) for _ in range(300)]
    write_rows(tmp_path / "rollouts.jsonl", [asking(n, text) for n, text in enumerate(texts)])
    write_rows(tmp_path / "held.jsonl", [{"prompt": prompt} for prompt in prompts])

    def counts(level: str) -> tuple[int, dict[str, int]]:
        result = filtered(tmp_path, decontaminate=["held.jsonl"], decontaminate_level=level)
        return result.read - result.kept, result.contamination

    assert counts("exact") == (10, {"exact": 10, "contained": 0, "near": 0})
    assert counts("contained") == (20, {"exact": 10, "contained": 10, "near": 0})
    assert counts("near") == (30, {"exact": 10, "contained": 10, "near": 10})


def test_an_instruction_that_all_prompts_have_does_not_hide_their_copies(tmp_path: Path) -> None:
    held, clean = split("reviews", random.Random(1), held_out=40, rows=200)
    texts = [*clean, *held]
    write_rows(tmp_path / "rollouts.jsonl", [asking(n, text) for n, text in enumerate(texts)])
    asked = [{"prompt": f"Is this review good or bad? {task}\nOne word."} for task in held]
    write_rows(tmp_path / "held.jsonl", asked)

    result = filtered(tmp_path, decontaminate=["held.jsonl"])

    assert (result.kept, result.contamination["contained"]) == (200, 40)


def test_a_reason_that_takes_a_large_share_is_warned_of(tmp_path: Path) -> None:
    words = [f"word{number} and more of it" for number in range(100)]
    rows = [asking(n, text, topic="ab"[n < 10]) for n, text in enumerate(words)]
    write_rows(tmp_path / "rollouts.jsonl", rows)
    write_rows(tmp_path / "held.jsonl", [{"prompt": text} for text in words[:8]])

    result = filtered(tmp_path, decontaminate=["held.jsonl"], max_turns=1)
    assert result.warnings == [
        "8 of the 10 rows of category 'b' were dropped for 'evaluation prompt'"
    ]

    result = filtered(tmp_path, contains="nothing")
    assert result.warnings[0] == "100 of 100 rows were dropped for 'contains: no match'"
    assert filtered(tmp_path, max_turns=1).warnings == []
