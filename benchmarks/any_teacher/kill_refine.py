"""Kills a run that refines a student's rollouts at 20 points, and goes on with it each time.

    python benchmarks/any_teacher/kill_refine.py FOLDER/seed-1

The folder is a project of `text_teacher.py`. Its student's rollouts are refined by the demo's
teacher, once unbroken and once killed with SIGKILL whenever so many more steps are on record.
Prints one JSON line: both outputs must hold the same conversations, costs and authors.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

KILLS, ROLLOUTS = 20, 60
_POLL_S = 0.005


def play(root: Path, output: str) -> None:
    """Does the run in this process."""
    import anyio

    sys.path.append(str(Path(__file__).parents[2] / "tests"))
    from fakes.reporters import KeptReporter
    from stillroom.rollout.request import GenerateRollouts
    from stillroom.rollout.run import generate_rollouts
    from stillroom.settings import Workspace

    request = GenerateRollouts(
        input="prompts.jsonl", output=output, provider="demo", model="teacher", tools="tools.py",
        rewards="rewards.py", max_turns=5, max_tokens=48, concurrency=4, temperature=1.0, seed=1,
        refine="pool-student.jsonl", takeover="first_difference", turns="one", n=ROLLOUTS,
    )  # fmt: skip
    folder = root / "runs" / output.removesuffix(".jsonl")
    folder.mkdir(parents=True, exist_ok=True)

    async def main() -> None:
        await generate_rollouts(Workspace(root), request, folder=folder, reporter=KeptReporter())

    anyio.run(main)


def num_steps(root: Path, output: str) -> int:
    """Returns the number of steps and rows that are on record."""
    paths = (root / output, root / f".{output}" / "journal.jsonl")
    return sum(path.read_bytes().count(b"\n") for path in paths if path.exists())


def is_ended(root: Path, output: str, kill_at: int | None) -> bool:
    """Runs to the end, or kills the run at a number of steps; returns whether it ended itself."""
    child = subprocess.Popen([sys.executable, __file__, str(root), output], start_new_session=True)
    while child.poll() is None:
        if kill_at is not None and num_steps(root, output) >= kill_at:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            return False
        time.sleep(_POLL_S)
    if child.returncode:
        raise SystemExit(f"the run ended with {child.returncode}")
    return True


def conversations(path: Path) -> dict[str, Any]:
    """Returns what each rollout holds beside its times."""
    kept = ("messages", "refined", "usage", "dropped", "reward")
    rows = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return {row["id"]: [row[name] for name in kept] for row in rows}


def main() -> None:
    root = Path(sys.argv[1]).resolve()
    if len(sys.argv) > 2:
        play(root, sys.argv[2])
        return
    is_ended(root, "unbroken.jsonl", None)
    whole = conversations(root / "unbroken.jsonl")
    # A turn and the replies to it are a step each.
    per_rollout = 2 * sum(len(row[1]["authors"]) for row in whole.values()) / len(whole)
    every = int(len(whole) * per_rollout / (KILLS + 1))
    kills = 0
    while not is_ended(root, "killed.jsonl", every * (kills + 1) if kills < KILLS else None):
        kills += 1
    killed = conversations(root / "killed.jsonl")
    same = sum(killed.get(name) == row for name, row in whole.items())
    print(json.dumps({"kills": kills, "rollouts": len(whole), "same": same, "rows": len(killed)}))
    raise SystemExit(same != len(whole) or len(killed) != len(whole))


if __name__ == "__main__":
    main()
