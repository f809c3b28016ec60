"""Decontamination: planted evaluation prompts, exact, changed and embedded, through filter_dataset.

usage: decontaminate.py [--rows 50000] [--prompts 1000] [--copies 500] [--seed 0]
Prints one JSON line: the share found of each kind, what was found in the clean rows (free text with
a shared system prompt and shared instructions, and tasks of the evaluation's own template with
other values), seconds and memory. Then three classification sets made from templates (at most 12
words a task), in several sizes: the share of exact and contained copies that were dropped, and the
number of other tasks that were. Exits with 1 unless all copies go, no clean row does, and at least
95 % of the changed free text is found.
"""

import argparse
import json
import random
import string
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from stillroom.curate.filter.request import FilterDataset
from stillroom.curate.filter.run import filter_dataset
from stillroom.settings import Workspace

sys.path.append(str(Path(__file__).parents[2] / "tests"))

from fakes.task_templates import SETS, WRAPPERS, split

CHANCE = random.Random(11)
VOCABULARY = [
    "".join(CHANCE.choices(string.ascii_lowercase, k=CHANCE.randint(2, 9))) for _ in range(12_000)
]
WEIGHTS = [1 / rank for rank in range(1, 12_001)]
SYSTEM = "You are a careful research assistant. Use the tools, then answer in the exact format that is asked for."
INSTRUCTIONS = (
    "Read the question, think step by step, and give the final answer in a box at the end. "
)
REQUEST = "FilterDataset(input='rows.jsonl', output='kept.jsonl', decontaminate=['free.jsonl', 'template.txt'])"
PROGRAM = (
    "import json, resource, time; from pathlib import Path;"
    "from stillroom.curate.filter.request import FilterDataset;"
    "from stillroom.curate.filter.run import filter_dataset;"
    "from stillroom.settings import Workspace; start = time.perf_counter();"
    f"result = filter_dataset(Workspace(Path.cwd()), {REQUEST});"
    "used = resource.getrusage(resource.RUSAGE_SELF);"
    "print(json.dumps(dict(read=result.read, kept=result.kept, dropped=result.dropped,"
    " wall_s=round(time.perf_counter() - start, 1), cpu_s=round(used.ru_utime + used.ru_stime, 1),"
    " peak_mb=used.ru_maxrss // 1024)))"
)


def prompt_of(chance: random.Random) -> list[str]:
    return chance.choices(VOCABULARY, WEIGHTS, k=chance.randint(12, 80))


def task_of(chance: random.Random) -> list[str]:
    return (
        f"A customer wants {chance.randint(1, 99)} {chance.choice(VOCABULARY)} and {chance.randint(1, 99)} "
        f"{chance.choice(VOCABULARY)} sent to {chance.choice(VOCABULARY[:50])} street; what is the total price in euros "
        "including shipping and the discount for regular customers?"
    ).split()


def edited(chance: random.Random, words: list[str]) -> list[str]:
    """Changes one word of ten: another word, one more, or none."""
    words = list(words)
    for _ in range(max(1, len(words) // 10)):
        place = chance.randrange(len(words))
        kind = chance.random()
        words[place : place + (kind < 0.75)] = (
            [chance.choice(VOCABULARY)] if kind < 0.5 or kind >= 0.75 else []
        )
    return words


def set_anew(chance: random.Random, words: list[str]) -> list[str]:
    return [
        (word.upper() if chance.random() < 0.3 else word)
        + chance.choice(["", "", ",", "!", "\n", " –"])
        for word in words
    ]


def reworded(words: list[str]) -> list[str]:
    """Says a task of the template in other words, with its values as they are."""
    return (
        " ".join(words)
        .replace("customer wants", "client would like")
        .replace("what is", "tell me")
        .replace("total price", "whole sum")
        .split()
    )


def rows_of(
    chance: random.Random,
    options: argparse.Namespace,
    free: list[list[str]],
    tasks: list[list[str]],
) -> list[tuple[str, str]]:
    def around(words: list[str]) -> str:
        return " ".join([INSTRUCTIONS, *prompt_of(chance), *words, *prompt_of(chance)])

    rows: list[tuple[str, str]] = []
    for _ in range(options.copies):
        words, task = chance.choice(free), chance.choice(tasks)
        rows += [
            ("exact", " ".join(words)),
            ("exact_set_anew", " ".join(set_anew(chance, words))),
            ("exact_embedded", around(words)),
            ("exact_task", " ".join(set_anew(chance, task))),
            ("near_task", INSTRUCTIONS + " ".join(reworded(task))),
            ("near", " ".join(edited(chance, words))),
            ("near_set_anew", " ".join(set_anew(chance, edited(chance, words)))),
            ("near_embedded", around(edited(chance, words))),
        ]
    evaluated = {tuple(prompt) for prompt in [*free, *tasks]}
    while len(rows) < options.rows:
        is_task = chance.random() < 0.3
        words = task_of(chance) if is_task else prompt_of(chance)
        if tuple(words) not in evaluated:
            rows.append(
                ("clean_same_template" if is_task else "clean", INSTRUCTIONS + " ".join(words))
            )
    chance.shuffle(rows)
    return rows


def templated(chance: random.Random) -> dict[str, dict[str, float]]:
    """Decontaminates the templated sets; returns what was dropped of each."""
    shown: dict[str, dict[str, float]] = {}
    for name in SETS:
        tally: Counter[str] = Counter()
        for held_out, rows in ((50, 300), (100, 500), (260, 1000), (260, 3000)):
            held, clean = split(name, chance, held_out=held_out, rows=rows)
            copies = [" ".join(set_anew(chance, task.split())) for task in held[:20]]
            copies += [chance.choice(WRAPPERS).format(task) for task in held[20:40]]
            with tempfile.TemporaryDirectory() as folder:
                dropped = dropped_lines(Path(folder), held, [*clean, *copies])
            tally["clean"] += len(clean)
            tally["copies"] += len(copies)
            tally["clean_dropped"] += sum(line < len(clean) for line in dropped)
            tally["copies_dropped"] += sum(line >= len(clean) for line in dropped)
        shown[name] = dict(tally)
    return shown


def dropped_lines(folder: Path, held: list[str], texts: list[str]) -> list[int]:
    """Filters one rollout of each text; returns the places of those that were dropped."""
    rows = [
        {
            "task_id": f"t{number}",
            "messages": [
                {"role": "user", "content": text},
                {"role": "assistant", "content": "label"},
            ],
            "stop_reason": "answered",
        }
        for number, text in enumerate(texts)
    ]
    for name, lines in (("rows", rows), ("held", [{"prompt": task} for task in held])):
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
    request = FilterDataset(input="rows.jsonl", output="kept.jsonl", decontaminate=("held.jsonl",))
    filter_dataset(Workspace(folder), request)
    side = (folder / "kept.jsonl.dropped").read_text(encoding="utf-8")
    return [json.loads(line)["line"] - 1 for line in side.splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=50_000)
    parser.add_argument("--prompts", type=int, default=1000)
    parser.add_argument("--copies", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    chance = random.Random(options.seed)
    free = [prompt_of(chance) for _ in range(options.prompts)]
    tasks = [task_of(chance) for _ in range(options.prompts)]
    rows = rows_of(chance, options, free, tasks)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "free.jsonl").write_text(
            "".join(
                json.dumps(
                    {
                        "messages": [
                            {"role": "system", "content": SYSTEM},
                            {"role": "user", "content": INSTRUCTIONS + " ".join(p)},
                        ]
                    }
                )
                + "\n"
                for p in free
            ),
            encoding="utf-8",
        )
        (folder / "template.txt").write_text(
            "".join(" ".join(p) + "\n" for p in tasks), encoding="utf-8"
        )
        with (folder / "rows.jsonl").open("w", encoding="utf-8") as stream:
            for number, (_, text) in enumerate(rows):
                messages = [
                    {"role": "system", "content": SYSTEM},
                    {"role": "user", "content": text},
                    {"role": "assistant", "content": " ".join(prompt_of(chance))},
                ]
                stream.write(
                    json.dumps(
                        {
                            "id": f"r{number}",
                            "task_id": f"t{number}",
                            "messages": messages,
                            "stop_reason": "answered",
                        }
                    )
                    + "\n"
                )
        finished = subprocess.run(
            [sys.executable, "-c", PROGRAM], cwd=folder, capture_output=True, text=True, check=True
        )
        dropped = [
            json.loads(line)["line"] - 1
            for line in (folder / "kept.jsonl.dropped").read_text(encoding="utf-8").splitlines()
        ]
    totals, hits = Counter(kind for kind, _ in rows), Counter(rows[number][0] for number in dropped)
    shares = {kind: round(hits[kind] / count, 4) for kind, count in sorted(totals.items())}
    clean_found = hits["clean"] + hits["clean_same_template"]
    sets = templated(chance)
    passed = (
        clean_found == 0
        and all(share == 1 for kind, share in shares.items() if kind.startswith("exact"))
        and all(shares[kind] >= 0.95 for kind in ("near", "near_set_anew", "near_embedded"))
        and all(
            s["copies"] == s["copies_dropped"] and not s["clean_dropped"] for s in sets.values()
        )
    )
    least = min(share for kind, share in shares.items() if kind.startswith("near"))
    others = sum(s["clean"] for s in sets.values())
    print(
        json.dumps(
            {
                "figure": f"{min(share for kind, share in shares.items() if kind.startswith('exact')):.0%} of exact and contained "
                f"copies; at least {least:.1%} of changed free text; "
                f"{clean_found} clean rows, {sum(s['clean_dropped'] for s in sets.values())} of {others} other tasks of "
                f"{len(sets)} templated sets",
                "benchmark": "decontaminate",
                **json.loads(finished.stdout),
                "found": shares,
                "clean_found": clean_found,
                "templated": sets,
                "passed": passed,
            }
        )
    )
    sys.exit(not passed)


if __name__ == "__main__":
    main()
