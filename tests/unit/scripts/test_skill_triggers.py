"""Users' sentences call the skill that they are about, by names and descriptions alone."""

import pytest

from skill_triggers import ROOT, Skill, called, read_skills, wrong_calls


def test_nine_of_ten_sentences_call_their_skill_and_every_skill_has_some() -> None:
    total, wrong = wrong_calls()
    assert total >= 60
    assert len(wrong) <= total / 10, wrong


def test_every_skill_and_none_at_all_is_called_by_some_sentence() -> None:
    skills = read_skills(ROOT / "skills")
    assert len(skills) >= 6
    assert called("Bake the system prompt in, please.", skills) == "prompt-distillation"
    assert called("What is the weather in Rome?", skills) is None


@pytest.mark.parametrize(
    ("sentence", "name"),
    [
        ("Please bake the cake.", "cakes"),
        ("A puncture on my bicycle", "bicycles"),
        ("I cannot ride", None),
        ("Bake a bicycle shaped pie, flat tyre and all", "bicycles"),
    ],
)
def test_rare_words_and_quoted_phrases_decide(sentence: str, name: str | None) -> None:
    skills = [
        Skill("cakes", frozenset({"bak", "cak", "sugar"}), ("bake the cake",)),
        Skill("bicycles", frozenset({"bicycl", "puncture", "punctur"}), ("flat tyre",)),
    ]
    assert called(sentence, skills) == name
