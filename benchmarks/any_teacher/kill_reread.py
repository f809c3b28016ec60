"""Kills a run whose teacher has another tokenizer at 20 points, and goes on with it each time.

    OMP_NUM_THREADS=1 python benchmarks/any_teacher/kill_reread.py FOLDER

`demo/other-student` learns from `demo/teacher` by the byte chain: tools, several turns, rollouts
that go on in the next iteration. Once unbroken, and once killed with SIGKILL from outside 20 times:
a random CPU time after its start, or after the first checkpoint since (one a step), so that it dies
while it loads, samples, reads, learns or writes. Prints one JSON line: all metrics of all steps
and the final weights must be those of the unbroken run, bit for bit.
"""

import json
import os
import random
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

sys.path += [str(Path(__file__).parents[2] / "tests"), str(Path(__file__).parents[1] / "training")]

import torch
from kills import Recorder, weights

from fakes.training import Project, make_project
from stillroom.api import CreateProject, create_project
from stillroom.settings import Workspace

KILLS, STEPS = 20, 30
TIMED = {"tokens_per_s", "memory_gb", "sample_s", "update_s"}
_POLL_S = 0.01


def project_of(root: Path) -> Project:
    """Returns the demo's project with a teacher that rereads."""
    create_project(Workspace(root), CreateProject(seed=1))
    return make_project(
        root,
        "distill",
        Path("demo/other-student"),
        teacher={"path": "demo/teacher", "tokens": "reread"},
        data={"train_file": "prompts.jsonl", "batch_size": 2, "group_size": 2},
        rollout={
            "max_turns": 4,
            "max_tokens": 40,
            "max_staleness": 1,
            "stragglers": 0.5,
            # Which conversations share a pass depends on when their tools answer, and the last
            # digits of what is sampled depend on that: two unbroken runs differ by as much.
            "concurrency": 1,
        },
        algorithm={"substeps": 2, "reward_coef": 0.1},
        trainer={"num_epochs": 100, "max_steps": STEPS, "save_step": 1, "learning_rate": 2e-3},
    )


class Child:
    """A training run in a process of its own."""

    def __init__(self, project: Project, run: str, resume: str | None) -> None:
        self._folder = project.root / "runs" / run
        project.reporter = Recorder(self._folder, None)
        self._pid = os.fork()
        if self._pid == 0:
            try:
                project.train(run, resume=resume)
                os._exit(0)
            finally:
                traceback.print_exc()
                os._exit(1)

    def cpu_s(self) -> float:
        """Returns the CPU seconds that it has taken."""
        fields = Path(f"/proc/{self._pid}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1]
        user, system = fields.split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

    def has_checkpoint(self) -> bool:
        """Whether a step of its own is kept."""
        return any(self._folder.glob("checkpoints/step_*[0-9]"))

    def is_ended(self) -> bool:
        """Whether it has ended itself; raises SystemExit if it failed."""
        pid, status = os.waitpid(self._pid, os.WNOHANG)
        if pid and status:
            raise SystemExit(f"{self._folder.name} ended with {status}")
        return pid != 0

    def is_killed(self, after_s: float, *, past_checkpoint: bool) -> bool:
        """Kills it so many CPU seconds after its start or first checkpoint, unless it ends."""
        begun = None if past_checkpoint else self.cpu_s()
        while not self.is_ended():
            if begun is None and self.has_checkpoint():
                begun = self.cpu_s()
            if begun is not None and self.cpu_s() >= begun + after_s:
                os.kill(self._pid, signal.SIGKILL)
                os.waitpid(self._pid, 0)
                return True
            time.sleep(_POLL_S)
        return False


def measured(run: Path) -> dict[int, dict[str, Any]]:
    """Returns the metrics of each step on record, beside its times."""
    found = {}
    for line in (run / "events.jsonl").read_text(encoding="utf-8").splitlines(keepends=True):
        if line.endswith("\n"):
            event = json.loads(line)
            found[event["step"]] = {k: v for k, v in event["values"].items() if k not in TIMED}
    return found


def main() -> None:
    root = Path(sys.argv[1]).resolve()
    torch.set_num_threads(1)
    project, draws = project_of(root), random.Random(0)
    before = os.times().children_user
    whole = Child(project, "whole", None)
    while not whole.is_ended():
        time.sleep(_POLL_S)
    step_s = (os.times().children_user - before) / STEPS
    expected = measured(root / "runs/whole")
    last, kept, kills, differing = None, [], 0, 0
    while True:
        run = f"killed-{kills}"
        child = Child(project, run, last)
        past = last is None or draws.random() < 0.75
        if kills == KILLS:
            while not child.is_ended():
                time.sleep(_POLL_S)
            break
        if not child.is_killed(draws.uniform(0, step_s), past_checkpoint=past):
            break
        kills += 1
        events = root / "runs" / run / "events.jsonl"
        if events.exists():
            steps = measured(root / "runs" / run)
            kept.append(sorted(steps))
            differing += sum(expected[step] != values for step, values in steps.items())
        if child.has_checkpoint():
            last = run
    ended = root / "runs" / run
    differing += sum(expected[step] != values for step, values in measured(ended).items())
    ours, reference = weights(ended), weights(root / "runs/whole")
    same = ours.keys() == reference.keys() and all(torch.equal(ours[k], reference[k]) for k in ours)
    print(
        json.dumps(
            {
                "kills": kills,
                "steps": len(expected),
                "steps_of_killed_runs": kept,
                "steps_that_differ": differing,
                "weights_same": same,
                "byte_share": round(expected[STEPS]["byte_share"], 3),
            }
        )
    )
    raise SystemExit(not same or differing > 0 or kills < KILLS)


if __name__ == "__main__":
    main()
