"""What the byte chain costs beside the loss over the whole vocabulary, at equal teacher tokens.

    python benchmarks/any_teacher/byte_chain_cost.py FOLDER --repeats 3

Two models with a vocabulary of 152k and random weights, small ones or (--shape 0.5B) of the size of
the smallest real model with such a vocabulary. The same rollouts are learnt from once by
full_reverse_kl (the teacher reads the student's tokens) and once by byte_reverse_kl (it reads the
same number of tokens, as a reading of its own), in turns in one process. A JSON line: the CPU
seconds of a step by each, the median of the repeats, and the share on top.
"""

import argparse
import json
import os
import random
import resource
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "on_policy")]

from work import save_models

from stillroom.data.chat.render import ChatRenderer
from stillroom.models.batches import TokenSequence
from stillroom.models.load import load_model
from stillroom.models.reread.comparison_points import TokenOffsets, WrittenParts, turn_points
from stillroom.models.reread.rereading import ByteReading, Reader, ReadingPair
from stillroom.models.reread.turns import TurnPart
from stillroom.models.resolve import locate_model
from stillroom.settings import Workspace
from stillroom.teachers.local_hf import LocalTeacher
from stillroom.train.config.distill_sections import AlgorithmSection
from stillroom.train.config.sections import ModelSection
from stillroom.train.on_policy.policy_update import UpdateStats, accumulate_gradient
from stillroom.train.on_policy.training_sequences import TrainingSequence
from stillroom.train.student.model import load_student

GATE = 0.25


def write_words(file: Path) -> None:
    """Gives the vocabulary words of syllables, half of them after a blank, as real ones have.

    What a place costs depends on how many tokens begin alike, and on how many bytes a token has.
    """
    document = json.loads(file.read_text(encoding="utf-8"))
    vocabulary: dict[str, int] = document["model"]["vocab"]
    draws = random.Random(0)
    syllables = [a + b for a in "bcdfghklmnprstvw" for b in ("a", "e", "i", "o", "u", "er", "in")]
    made = [word for word in vocabulary if word[:1] == "w" and word[1:].isdigit()]
    words: dict[str, None] = {}
    while len(words) < len(made):
        word = "".join(draws.choices(syllables, k=draws.choice((1, 2, 2, 3, 3, 4))))
        word = draws.choice((word, word.capitalize(), word + "s", word[:-1]))
        word = draws.choice(("", "\u0120")) + word
        if word not in vocabulary:
            words[word] = None
    for old, new in zip(made, words, strict=True):
        vocabulary[new] = vocabulary.pop(old)
    file.write_text(json.dumps(document), encoding="utf-8")


def rollouts(pair: ReadingPair, num: int, num_tokens: int) -> list[TrainingSequence]:
    """Returns answers of random words, each with a reading in as many of the teacher's tokens."""
    symbol_sets = pair.symbol_sets([])
    side = symbol_sets.student
    draws = random.Random(0)
    words = [i for i, word in enumerate(side.tokens.by_id) if word.isalpha() or word[:1] == b" "]
    prompt = pair.student.renderer.prompt_ids([{"role": "user", "content": "Go on."}], [])
    made = []
    for _ in range(num):
        ids = draws.choices(words, k=num_tokens)
        text = side.tokens.text(ids)
        written = WrittenParts(TokenOffsets(side, ids), [0])
        points = turn_points(
            symbol_sets, [TurnPart("text", text)], written, written, is_ended=False
        )
        is_turn = [False] * len(prompt) + [True] * num_tokens
        tokens = TokenSequence(prompt + ids, is_turn)
        reading = ByteReading(tokens, points, pair, symbol_sets, len(text), len(text), 0)
        made.append(TrainingSequence(tokens, [-10.0] * num_tokens, reading=reading))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", choices=["152k", "0.5B"], default="152k")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rollouts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=96)
    given = parser.parse_args()
    folders = save_models(given.shape, given.folder)
    for folder in folders:
        write_words(folder / "tokenizer.json")
    workspace = Workspace(given.folder)
    section = ModelSection(path=str(folders[0]), qlora_rank=0, precision="fp32")
    student = load_student(workspace, section, seed=0)
    student.module.eval()
    teacher = LocalTeacher(load_model(workspace, locate_model(workspace, str(folders[1]))))
    readers = [
        Reader(name, one.tokenizer, ChatRenderer(one.tokenizer), one.stop_ids)
        for name, one in (("student", student.loaded), ("teacher", teacher.loaded))
    ]
    pair = ReadingPair(readers[0], readers[1], max_context=4096)
    sequences = rollouts(pair, given.rollouts, given.tokens)
    works = {
        "full_reverse_kl": [replace(one, reading=None) for one in sequences],
        "byte_reverse_kl": sequences,
    }
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(given.repeats + 1):
        for name, chosen in works.items():
            begun = time.process_time()
            algorithm = AlgorithmSection(loss_fn=name)
            accumulate_gradient(student, {0: teacher}, chosen, algorithm, UpdateStats())
            student.module.zero_grad(set_to_none=True)
            if turn:
                # The first round warms up, and looks up prefixes that later ones know.
                seconds[name].append(time.process_time() - begun)
    whole, ours = (statistics.median(seconds[name]) for name in works)
    points = sum(len(one.reading.points) for one in sequences if one.reading is not None)
    print(
        json.dumps(
            {
                "shape": given.shape,
                "vocabulary": student.head.vocab_size,
                "tokens": given.rollouts * given.tokens,
                "places": points,
                "full_reverse_kl_s": round(whole, 2),
                "byte_reverse_kl_s": round(ours, 2),
                "on_top": round(ours / whole - 1, 3),
                "passes": ours / whole - 1 <= GATE,
                "memory_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6, 2),
            }
        )
    )


if __name__ == "__main__":
    main()
