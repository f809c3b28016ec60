"""Jobs whose inputs have no labels, with a teacher's prices, a budget and minutes.

    worlds.py FOLDER --world tickets --seed 1

Writes FOLDER/job, which whoever does the job reads, and FOLDER/hidden, which only the judge reads:
texts of the inputs' forms (plain), of other forms (unseen), and of a second grammar that shares no
form with the first (reworded). What a world's texts are made of is in phrases/.
"""

import argparse
import csv
import itertools
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from pathlib import Path
from random import Random
from typing import Any, Literal

import yaml

sys.path.append(str(Path(__file__).parents[1] / "real"))

from smollm2 import base_model

PHRASES = Path(__file__).parent / "phrases"
WORLDS = ("tickets", "reviews", "bank")
NUM_INPUTS, NUM_LABELLED = 600, 160
NUM_HIDDEN = {"plain": 160, "unseen": 80, "reworded": 80}
PRICES = {"input_usd_per_million": 3.0, "output_usd_per_million": 15.0}
BUDGET_USD, MINUTES = 0.40, 40

Kind = Literal["plain", "unseen", "reworded", "teacher"]
"""Who words a text: the inputs' forms, other forms, the judge's second grammar, or the teacher."""


@dataclass(frozen=True, slots=True)
class Example:
    """A text and its right label."""

    text: str
    label: str


@dataclass(frozen=True, slots=True)
class World:
    """What the texts of a job are made of."""

    name: str
    task: str
    system: str
    topics: dict[str, dict[str, list[str]]]
    """For each label the phrases of each kind."""
    frames: dict[str, list[str]]
    """What stands before and after the phrases, whatever the label is."""
    fillings: dict[str, list[str]]

    @property
    def labels(self) -> list[str]:
        """The labels that a text can have."""
        return list(self.topics)

    def text(self, kind: Kind, label: str, rng: Random) -> str:
        """Makes a text that has the label."""
        topic, frames = self.topics[label], self.frames
        if kind in {"plain", "unseen"}:
            names = (frames["greetings"], topic[kind], frames["closings"])
            parts = [rng.choice(phrases) for phrases in names]
        else:
            of = "teacher_" if kind == "teacher" else ""
            situation = rng.choice(topic[f"{of}situations"])
            sentences = [f"{rng.choice(frames[f'{of}lead_ins'])} {situation}."]
            sentences.insert(rng.randrange(2), rng.choice(topic[f"{of}requests"]))
            parts = [*sentences, rng.choice(["", *frames[f"{of}tails"]])]
        text = " ".join(part for part in parts if part).format(**self._filled(rng))
        return _with_capitals(text)

    def examples(self, kind: Kind, count: int, seed: int) -> list[Example]:
        """Returns examples with different texts and as many of each label as of the others.

        Raises RuntimeError if the world has too few texts.
        """
        rng = Random(f"{self.name} {kind} {seed}")
        found: dict[str, Example] = {}
        for label in itertools.islice(itertools.cycle(self.labels), 100 * count):
            example = Example(self.text(kind, label, rng), label)
            found.setdefault(example.text, example)
            if len(found) == count:
                examples = list(found.values())
                rng.shuffle(examples)
                return examples
        raise RuntimeError(f"{self.name} has fewer than {count} texts of the kind {kind}")

    def patterns(self) -> Iterator[tuple[re.Pattern[str], str]]:
        """Yields a pattern of each phrase that tells a label, and the label."""
        for label, topic in self.topics.items():
            for kind in ("plain", "unseen", "situations", "teacher_situations"):
                for phrase in topic[kind]:
                    parts = re.split(r"\{\w+\}", phrase.rstrip("."))
                    yield re.compile(".{1,30}?".join(map(re.escape, parts)), re.IGNORECASE), label

    def _filled(self, rng: Random) -> dict[str, Any]:
        return {
            "order": f"{rng.choice('ABCDEFGH')}{rng.randint(1000, 9999)}",
            "amount": rng.randint(12, 980),
            "days": rng.randint(3, 40),
            **{name: rng.choice(values) for name, values in self.fillings.items()},
        }


@dataclass(frozen=True, slots=True)
class JobTexts:
    """All texts of a job with their labels."""

    inputs: list[Example]
    labelled: list[Example]
    hidden: dict[str, list[Example]]

    def __iter__(self) -> Iterator[Example]:
        return itertools.chain(self.inputs, self.labelled, *self.hidden.values())


def load_world(name: str) -> World:
    """Reads a world's phrases."""
    said = yaml.safe_load((PHRASES / f"{name}.yml").read_text(encoding="utf-8"))
    frames = {key: value for key, value in said.items() if isinstance(value, list)}
    return World(
        name, said["task"], said["system"].strip(), said["topics"], frames, said["fillings"]
    )


def job_texts(world: World, seed: int) -> JobTexts:
    """Returns the texts of a job, no two of which are the same."""
    counts = (NUM_INPUTS, NUM_LABELLED, NUM_HIDDEN["plain"])
    plain = iter(world.examples("plain", sum(counts), seed))
    inputs, labelled, hidden = (list(itertools.islice(plain, count)) for count in counts)
    others: tuple[Kind, ...] = ("unseen", "reworded")
    return JobTexts(
        inputs,
        labelled,
        {
            "plain": hidden,
            **{kind: world.examples(kind, NUM_HIDDEN[kind], seed) for kind in others},
        },
    )


def write_job(folder: Path, name: str, seed: int, *, student: str = "") -> Path:
    """Writes the job of a world and what its judge reads, and returns the job's folder.

    student: the folder of the model to start from.
    """
    world = load_world(name)
    texts, rng = job_texts(world, seed), Random(f"{name} {seed} created")
    job, hidden = folder / "job", folder / "hidden"
    for place in (job, hidden):
        place.mkdir(parents=True)
    start = datetime.fromisoformat("2026-09-01T08:00:00")
    rows = [
        (f"{name}-{number:04}", example.text, start + timedelta(minutes=rng.randrange(80_000)))
        for number, example in enumerate(texts.inputs)
    ]
    _write_csv(
        job / "inputs.csv", ("id", "text", "created"), [(*r[:2], r[2].isoformat()) for r in rows]
    )
    labelled = [(example.text, example.label) for example in texts.labelled]
    _write_csv(job / "labelled.csv", ("text", "label"), labelled)
    facts = {
        "task": world.task,
        "teacher": "teacher",
        "system": world.system,
        "labels": world.labels,
        "student": student,
        "prices": PRICES,
        "budget_usd": BUDGET_USD,
        "minutes": MINUTES,
    }
    (job / "job.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    origin = json.dumps({"world": name, "seed": seed})
    (hidden / "world.json").write_text(origin, encoding="utf-8")
    (job / "README.md").write_text(_statement(world), encoding="utf-8")
    for kind, examples in {"inputs": texts.inputs, **texts.hidden}.items():
        lines = [json.dumps(asdict(example)) + "\n" for example in examples]
        (hidden / f"{kind}.jsonl").write_text("".join(lines), encoding="utf-8")
    return job


def _with_capitals(text: str) -> str:
    """Returns the text with a capital letter at the beginning of each sentence."""
    sentences = re.split(r"(?<=[.!?]) ", text)
    return " ".join(sentence[:1].upper() + sentence[1:] for sentence in sentences)


def _write_csv(path: Path, names: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([names, *rows])


def _statement(world: World) -> str:
    return f"""# The job
{world.task} The labels are {", ".join(world.labels)}.

- `inputs.csv`: {NUM_INPUTS} texts without labels. A teacher, an OpenAI-compatible endpoint, can label them.
- `labelled.csv`: {NUM_LABELLED} texts that people have labelled, to evaluate with. Do not train on them.
- `job.json`: the teacher's model name, system prompt and prices, the budget in dollars, the minutes for
  everything, the labels, and the folder of the student to start from.

Deliver a small model, which answers a text with its label and nothing else. It will get texts like
these, and texts that people have worded in other ways. Name it in `model.json`:
{{"path": the model's folder, "system": the system prompt to use with it}}.
"""


def main() -> None:
    """Writes a job."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--world", default="tickets", choices=WORLDS)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    job = write_job(folder, options.world, options.seed, student=base_model(folder))
    print(json.dumps({"job": str(job)}))


if __name__ == "__main__":
    main()
