"""Which skill a user's sentence would call, as far as names and descriptions show it.

A host shows a model nothing of a skill but its name and description until it opens it. This script
scores each sentence of skill_triggers.jsonl against these texts: rare words that a sentence shares
with a description count, its quoted phrases count most. A model reads better than that; what even
this finds cannot be far off, and a description that loses a sentence here lacks the user's words.

    python scripts/skill_triggers.py      # prints the share that is right, and what is not
"""

import json
import math
import re
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
SENTENCES = Path(__file__).with_suffix(".jsonl")
_WORD = re.compile(r"[a-z0-9.+_-]+")
_COMMON = frozenset(
    """
    a an and are as at be been by can do does for from get gets had has have how i if in into is it
    its let make me more my need needs not of on or our over should so than that the their them
    these they this to too up use used want was we what when which why will with without would you
    your model models train training trained small stillroom
    """.split()  # noqa: SIM905 - read as a text
)
_PHRASE_WEIGHT = 3.0
_MIN_SCORE = 2.0
"""With less than this nothing is called."""


@dataclass(frozen=True)
class Skill:
    """What a host shows of a skill."""

    name: str
    words: frozenset[str]
    phrases: tuple[str, ...]


def read_skills(folder: Path) -> list[Skill]:
    """Returns the skills of a folder."""
    skills: list[Skill] = []
    for path in sorted(folder.glob("*/SKILL.md")):
        front = yaml.safe_load(path.read_text(encoding="utf-8").split("---")[1])
        description = str(front["description"])
        phrases = re.findall(r'"([^"]+)"', description)
        words = frozenset(words_of(f"{front['name']} {description}"))
        skills.append(Skill(str(front["name"]), words, tuple(p.lower() for p in phrases)))
    return skills


def words_of(text: str) -> list[str]:
    """Returns the words of a text, without endings and without words that say nothing."""
    words: list[str] = []
    for found in _WORD.findall(text.lower()):
        word = found.strip(".-_")
        # A compound counts as itself and as its parts.
        parts = {word, *re.split(r"[-_.]", word)} if re.search(r"[-_.]", word) else {word}
        words += [_stem(part) for part in parts if part and part not in _COMMON]
    return words


def _stem(word: str) -> str:
    for ending in ("ations", "ation", "ings", "ing", "ies", "ied", "ed", "es", "s", "e"):
        if word.endswith(ending) and len(word) - len(ending) >= 3:
            return word[: -len(ending)]
    return word


def scores(sentence: str, skills: list[Skill]) -> dict[str, float]:
    """Returns the score of each skill for a sentence."""
    known_by = Counter(word for skill in skills for word in skill.words)
    said, plain = set(words_of(sentence)), " ".join(_WORD.findall(sentence.lower()))
    result: dict[str, float] = {}
    for skill in skills:
        shared = said & skill.words
        score = sum(math.log((len(skills) + 1) / known_by[word]) for word in shared)
        score += _PHRASE_WEIGHT * sum(phrase in plain for phrase in skill.phrases)
        result[skill.name] = score
    return result


def called(sentence: str, skills: list[Skill]) -> str | None:
    """Returns the skill that a sentence calls; None if no description is near."""
    scored = scores(sentence, skills)
    best = max(scored, key=lambda name: scored[name])
    return best if scored[best] >= _MIN_SCORE else None


def wrong_calls() -> tuple[int, list[str]]:
    """Returns how many sentences there are, and a line for each that calls another skill."""
    skills, wrong = read_skills(ROOT / "skills"), list[str]()
    rows = [json.loads(line) for line in SENTENCES.read_text(encoding="utf-8").splitlines()]
    for row in rows:
        got = called(row["say"], skills)
        if got != row["skill"]:
            wrong.append(f"{row['say']!r}: {got}, not {row['skill']}")
    return len(rows), wrong


def main() -> int:
    """Prints what is wrong; returns 1 if more than a tenth is."""
    total, wrong = wrong_calls()
    sys.stdout.write("".join(f"{line}\n" for line in wrong))
    sys.stdout.write(f"{total - len(wrong)} of {total} sentences call their skill\n")
    return int(10 * len(wrong) > total)


if __name__ == "__main__":
    sys.exit(main())
