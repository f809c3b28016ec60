"""Two filters to one output at the same moment: is one refused, and are the counts right? output_races.py [--races 50] [--rows 20000]

Each race has two processes filter the same rows with other filters to the same output. One must be refused at once with words that name the
other, and what is on the disk must be the other's: kept + dropped = read, with the manifest that says so.
"""

import argparse
import json
import subprocess
import sys

from scenes import report, workspace

RACER = """
import json, sys, time
from pathlib import Path
from stillroom.curate.filter.request import FilterDataset
from stillroom.curate.filter.run import filter_dataset
from stillroom.errors import EngineError
from stillroom.settings import Workspace

space = Workspace(Path(sys.argv[1]))
for line in sys.stdin:
    began = time.monotonic()
    try:
        request = FilterDataset(input="rows.jsonl", output="kept.jsonl", **json.loads(line))
        result = filter_dataset(space, request)
        print(json.dumps({"kept": result.kept, "at": [began, time.monotonic()]}), flush=True)
    except EngineError as error:
        print(json.dumps({"refused": error.problem}), flush=True)
"""


def lines_in(path) -> int:
    return sum(1 for _ in path.open("rb"))


def do_overlap(first: list[float], second: list[float]) -> bool:
    return max(first[0], second[0]) < min(first[1], second[1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--races", type=int, default=50)
    parser.add_argument("--rows", type=int, default=20_000)
    options = parser.parse_args()
    both_wrote = both_refused = wrong = nameless = 0
    with workspace() as space:
        rows = (
            {
                "messages": [
                    {"role": "user", "content": f"Question {i}?"},
                    {"role": "assistant", "content": f"{i} " * 20},
                ],
                "reward": i % 10 / 10,
            }
            for i in range(options.rows)
        )
        (space.root / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows), "utf-8")
        racers = [
            subprocess.Popen(
                [sys.executable, "-c", RACER, str(space.root)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for _ in range(2)
        ]
        output = space.root / "kept.jsonl"
        for race in range(options.races):
            order = racers if race % 2 else racers[::-1]
            for number, racer in enumerate(order):
                racer.stdin.write(json.dumps({"min_reward": 0.3 + 0.4 * number}) + "\n")
                racer.stdin.flush()
            answers = [json.loads(racer.stdout.readline()) for racer in racers]
            winners = [answer for answer in answers if "kept" in answer]
            # On a busy machine one may begin when the other has ended.
            both_wrote += len(winners) == 2 and do_overlap(*(winner["at"] for winner in winners))
            both_refused += not winners
            nameless += any("filter_dataset (process" not in a.get("refused", "filter_dataset (process") for a in answers)  # fmt: skip
            kept, dropped = lines_in(output), lines_in(output.with_name("kept.jsonl.dropped"))
            counts = json.loads((space.root / "kept.jsonl.manifest.json").read_bytes())["counts"]
            is_right = kept + dropped == options.rows and counts == {"read": options.rows, "kept": kept}  # fmt: skip
            wrong += not is_right or kept not in [winner["kept"] for winner in winners]
        for racer in racers:
            racer.stdin.close()
            racer.wait(10)
        left = [path.name for path in space.root.iterdir() if path.name.startswith(".")]
    passed = not (both_wrote or both_refused or wrong or nameless or left)
    return report(
        "output races",
        f"{options.races} races of two filters over {options.rows} rows: {wrong} with wrong counts, {both_wrote} in which both "
        f"wrote, {both_refused} in which neither did, {nameless} refused without a name",
        passed,
        seed=0,
    )


if __name__ == "__main__":
    sys.exit(main())
