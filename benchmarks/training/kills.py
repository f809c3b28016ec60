"""Training killed with SIGKILL at random steps and resumed: is it the unbroken run, bit for bit?

    PYTHONPATH=tests OMP_NUM_THREADS=1 .venv/bin/python benchmarks/training/kills.py --kills 20

Each of the runs below is killed by its own process the moment a random step is over, goes on from
its last checkpoint (one every two steps), and may be killed again there. One JSON line for each,
and one for all of them; exits with 1 if a resumed run differs.
On-policy runs have tools and several turns; `--only distill` is those alone, and `--architecture
qwen3.5` makes the models hybrids of a gated delta net and attention.
"""

import argparse
import json
import os
import random
import signal
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

from fakes.conversations import answer, user
from fakes.reporters import KeptReporter
from fakes.tiny_models import TinyModels
from fakes.training import Project, make_project
from stillroom.files import AppendLog

ROWS = [{"messages": [user(f"Item {i}?"), answer(f"It costs {i}.")]} for i in range(24)]
PAIRS = [
    {
        "prompt": [user(f"Item {i}?")],
        "chosen": [answer(f"It costs {i}.")],
        "rejected": [answer("No.")],
    }
    for i in range(24)
]
PROMPTS = [{"prompt": f"Item {i}?"} for i in range(24)]
TOOLS = """
from stillroom.tools import tool

@tool
def price(item: str) -> str:
    "The price of an item."
    return "12"
"""
STEPS = 24
METHODS = [("sft", 0), ("sft", 4), ("dpo", 0), ("dpo", 4), ("distill", 0), ("distill", 2)]
"""With the adapter's rank; for distill, with rollout.max_staleness."""


@dataclass(frozen=True)
class Kind:
    """What is trained, and how."""

    method: str
    rank: int
    architecture: str


class Recorder(KeptReporter):
    """Writes events.jsonl as a worker does, and kills its process after a step."""

    def __init__(self, folder: Path, kill_after: int | None):
        super().__init__()
        folder.mkdir(parents=True, exist_ok=True)
        self._log, self._kill_after = AppendLog(folder / "events.jsonl"), kill_after

    def metrics(self, step, values):
        self._log.append({"event": "metrics", "step": step, "values": dict(values)})

    def progress(self, done, total, *, unit, phase, eta_s=None):
        if done == self._kill_after:
            os.kill(os.getpid(), signal.SIGKILL)


def in_child(work) -> int:
    """Does the work in a process of its own; returns the signal that ended it, or 0."""
    child = os.fork()
    if child == 0:
        work()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else -os.WEXITSTATUS(status)


def losses(run: Path) -> dict[int, float]:
    lines = (run / "events.jsonl").read_text(encoding="utf-8").splitlines()
    return {event["step"]: event["values"]["loss"] for event in map(json.loads, lines)}


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(next((run / "checkpoints/final").glob("*model.safetensors")))


def project_of(root: Path, method: str, rank: int, architecture: str) -> Project:
    trainer = {"num_epochs": 2, "save_step": 2}
    models = TinyModels(root / "models")
    if method != "distill":
        # With dropout, so that the random numbers count.
        start = models.folder(architecture, "chatml", attention_dropout=0.3)
        model = {"qlora_rank": rank}
        project = make_project(
            root, method, start, data={"batch_size": 2}, model=model, trainer=trainer
        )
        project.write(ROWS if method == "sft" else PAIRS)
        return project
    project = make_project(
        root,
        method,
        models.folder(architecture, "clerk"),
        teacher={"path": str(models.folder(architecture, "clerk", seed=1))},
        data={"batch_size": 2, "group_size": 3},
        rollout={"max_turns": 5, "max_tokens": 8, "max_staleness": rank, "stragglers": 0.5},
        trainer=trainer,
    )
    project.write(PROMPTS)
    (root / "tools.py").write_text(TOOLS, encoding="utf-8")
    return project


def measure(root: Path, kind: Kind, num_kills: int, choose: random.Random) -> dict:
    project = project_of(root, kind.method, kind.rank, kind.architecture)

    def train(run: str, kill_after: int | None, resume: str | None) -> int:
        project.reporter = Recorder(root / "runs" / run, kill_after)
        return in_child(lambda: project.train(run, resume=resume))

    train("whole", None, None)
    runs = root / "runs"
    expected, final = losses(runs / "whole"), weights(runs / "whole")
    differing = 0
    steps = [choose.randrange(3, STEPS) for _ in range(num_kills)]
    for number, step in enumerate(steps):
        assert train(f"killed-{number}", step, None) == signal.SIGKILL
        before, again = f"killed-{number}", choose.randrange(step + 1, STEPS + 1)
        if number % 2 and again < STEPS and again > step:
            assert train(f"again-{number}", again, before) == signal.SIGKILL
            before = f"again-{number}"
        assert train(f"resumed-{number}", None, before) == 0
        resumed = runs / f"resumed-{number}"
        ours = weights(resumed)
        is_same = losses(resumed) == expected and all(torch.equal(ours[k], final[k]) for k in final)
        differing += not is_same
    return {
        "architecture": kind.architecture,
        "method": kind.method,
        ("max_staleness" if kind.method == "distill" else "rank"): kind.rank,
        "steps": STEPS,
        "killed_at": steps,
        "differing": differing,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=["sft", "dpo", "distill"])
    parser.add_argument("--architecture", default="llama")
    given = parser.parse_args()
    choose = random.Random(given.seed)
    chosen = [(method, rank) for method, rank in METHODS if given.only in (None, method)]
    per_method = -(-given.kills // len(chosen))
    measured = []
    for method, rank in chosen:
        with tempfile.TemporaryDirectory() as root:
            kind = Kind(method, rank, given.architecture)
            measured.append(measure(Path(root), kind, per_method, choose))
            print(json.dumps(measured[-1]), flush=True)
    kills = sum(len(one["killed_at"]) for one in measured)
    differing = sum(one["differing"] for one in measured)
    print(json.dumps({"kills": kills, "runs": len(measured), "differing": differing}))
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
