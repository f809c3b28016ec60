"""kill -9 at random moments in every operation: what is lost, doubled, left over or untrue? kill_everywhere.py [--kills 8] [--seed 0]

Each kill hits one operation in turn: rollouts, filter, pairs, SFT, DPO, distillation, export and
evaluation. Its process is killed at a random moment of the time that the unbroken work took; then
its processes must be gone within ten seconds, its status must say what happened, and the same work
is done again until it is whole. The result must be that of the unbroken work. How often calls are
paid for twice, and whether losses agree bit for bit, is measured by rollouts/kills.py and
training/kills.py.

Runs begin in processes that have loaded torch beforehand (tests/fakes/warm_python.py); `--cold` has
them load it each time.
"""

import argparse
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

from scenes import (
    ACTIVE,
    folder_of,
    look,
    num_orphans,
    report,
    training_project,
    wait_for,
    wait_for_end,
    workspace,
)

from fakes.http_endpoint import ScriptedEndpoint
from fakes.projects import endpoint_project
from fakes.rollout_rows import assistant, rollout_row, user
from fakes.warm_python import open_warm_python
from stillroom import api
from stillroom.jobs import supervise
from stillroom.settings import Workspace

MAX_ATTEMPTS = 5
"""Of these only the first are killed; what is not whole after the last counts as lost."""
PYTHON = sys.executable
"""The real one: a command loads no torch, and a fork of another process could not be killed so."""
NUM_ROWS, NUM_PROMPTS = 3_000, 40


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


class Scene(ABC):
    """One operation on a small project of its own."""

    def __init__(self, space: Workspace) -> None:
        self.space, self.root = space, space.root

    @abstractmethod
    def start(self, before: str | None) -> Any:
        """Starts the work, which goes on from an earlier attempt if there is one."""

    @abstractmethod
    def kill(self, attempt: Any) -> bool:
        """Kills the work's process; returns False if it has ended."""

    @abstractmethod
    def is_whole(self, attempt: Any) -> bool:
        """Waits for the end; returns whether the work is done."""

    @abstractmethod
    def is_true(self, attempt: Any, killed: bool) -> bool:
        """Returns whether what is said of the attempt is what happened."""

    @abstractmethod
    def result(self, attempt: Any) -> Any:
        """Returns what must be the same however often the work was killed."""


class RunScene(Scene):
    """An operation that is a run."""

    @abstractmethod
    def request(self, before: str | None) -> api.RunReport: ...

    def start(self, before: str | None) -> str:
        # At once, so that the kill may also hit the beginning.
        with mock.patch.object(supervise, "_START_WAIT_S", 0.0):
            return self.request(before).run_id

    def kill(self, attempt: str) -> bool:
        state = folder_of(self.space, attempt).read()
        if state.status.is_final:
            return False
        is_warm = sys.executable != PYTHON
        if is_warm:
            # The process that was launched is then a client of the warm one, and not the keeper.
            wait_for(lambda: folder_of(self.space, attempt).read().pid is not None, 60)
            state = folder_of(self.space, attempt).read()
        if state.pid is None:
            # The keeper is there before the run's process has written its pid.
            launch = json.loads((folder_of(self.space, attempt).path / "launch.json").read_bytes())
            os.kill(launch["pid"], signal.SIGKILL)
            return True
        try:
            os.kill(state.pid, signal.SIGKILL)
        except ProcessLookupError:
            return False
        return True

    def is_whole(self, attempt: str) -> bool:
        return wait_for_end(self.space, attempt).status == "succeeded"

    def is_true(self, attempt: str, killed: bool) -> bool:
        wait_for(lambda: look(self.space, attempt).status not in ACTIVE, 10)
        ended = look(self.space, attempt)
        # It may have written its end just before the kill.
        return ended.status == "succeeded" or (
            killed and ended.status == "interrupted" and "memory" not in ended.error.problem
        )


class Rollouts(RunScene):
    """Rollouts of an endpoint, with a tool."""

    def __init__(self, space: Workspace) -> None:
        super().__init__(space)
        endpoint_project(self.root, num_prompts=NUM_PROMPTS)
        self.endpoint = ScriptedEndpoint(tool_turns=2, latency_s=0.02)
        self.endpoint.__enter__()

    def request(self, before: str | None) -> api.RunReport:
        request = api.GenerateRollouts(
            input="prompts.jsonl",
            output="out.jsonl",
            base_url=self.endpoint.base_url,
            model="scripted",
            tools="tools.py",
            concurrency=4,
        )
        return api.generate_rollouts(self.space, request)

    def result(self, attempt: str) -> Any:
        rows = [json.loads(line) for line in (self.root / "out.jsonl").open(encoding="utf-8")]
        times = Counter((row["task_id"], row["sample"]) for row in rows)
        return {"lost": NUM_PROMPTS - len(times), "doubled": times.total() - len(times)}


class Training(RunScene):
    """A training run of benchmarks/training/kills.py."""

    def __init__(self, space: Workspace, method: str) -> None:
        super().__init__(space)
        training_project(self.root, method)

    def request(self, before: str | None) -> api.RunReport:
        has_checkpoint = before is not None and any(
            (folder_of(self.space, before).path / "checkpoints").glob("step_*")
        )
        request = api.StartTraining(config="config.yml", resume=before if has_checkpoint else None)
        return api.start_training(self.space, request)

    def result(self, attempt: str) -> Any:
        checkpoint = folder_of(self.space, attempt).path / "checkpoints" / "final"
        return digest(next(checkpoint.glob("*model.safetensors")))


class OfModel(RunScene):
    """An operation on the model that a training has left."""

    def __init__(self, space: Workspace) -> None:
        super().__init__(space)
        training_project(self.root, "sft")
        run = api.start_training(space, api.StartTraining(config="config.yml"))
        ended = wait_for_end(space, run.run_id)
        assert ended.status == "succeeded", ended
        self.model = run.run_id


class Export(OfModel):
    """An export to a folder."""

    def request(self, before: str | None) -> api.RunReport:
        return api.export_model(self.space, api.ExportModel(model=self.model, output="exported"))

    def result(self, attempt: str) -> Any:
        return digest(self.root / "exported" / "model.safetensors")


class Evaluation(OfModel):
    """An evaluation of the model, in process."""

    def request(self, before: str | None) -> api.RunReport:
        prompts = [{"prompt": f"Item {i}?", "metadata": {"expected_answer": "1"}} for i in range(8)]
        text = "".join(json.dumps(row) + "\n" for row in prompts)
        (self.root / "heldout.jsonl").write_text(text, encoding="utf-8")
        request = api.EvaluateModel(data="heldout.jsonl", model=self.model, max_tokens=8)
        return api.evaluate_model(self.space, request)

    def result(self, attempt: str) -> Any:
        rows = (folder_of(self.space, attempt).path / "rollouts.jsonl").read_text().splitlines()
        answers = [json.loads(row) for row in rows]
        return sorted((row["task_id"], row["messages"][-1]["content"]) for row in answers)


class CommandScene(Scene):
    """An operation that a command does by itself; what is said of it is its exit code."""

    command: tuple[str, ...] = ()

    def __init__(self, space: Workspace) -> None:
        super().__init__(space)
        rows = [
            rollout_row(
                task_id=f"task{n // 2}",
                sample=n % 2,
                reward=float(n % 2),
                messages=[user(f"What is the price of item {n // 2}?"), assistant(f"It is {n}.")],
            )
            for n in range(NUM_ROWS)
        ]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (self.root / "rollouts.jsonl").write_text(text, encoding="utf-8")

    def start(self, before: str | None) -> Any:
        command = [PYTHON, "-P", "-m", "stillroom_mcp", *self.command]
        return subprocess.Popen(command, cwd=self.root, stdout=-3, stderr=-3)

    def kill(self, attempt: Any) -> bool:
        if attempt.poll() is not None:
            return False
        attempt.kill()
        attempt.wait(10)
        return True

    def is_whole(self, attempt: Any) -> bool:
        return attempt.wait(120) == 0

    def is_true(self, attempt: Any, killed: bool) -> bool:
        output = self.root / "out.jsonl"
        # What stands under the output's name is whole, with its manifest, or it is not there.
        has_manifest = output.with_name("out.jsonl.manifest.json").exists()
        return attempt.wait(10) != 0 or (output.exists() and has_manifest)

    def result(self, attempt: Any) -> Any:
        return digest(self.root / "out.jsonl")


class Filter(CommandScene):
    """A filter that runs in a child process."""

    command = ("filter-dataset", "rollouts.jsonl", "--output", "out.jsonl", "--min-reward", "0", "--dedupe", "near")  # fmt: skip


class Pairs(CommandScene):
    """Preference pairs."""

    command = ("make-dpo-pairs", "rollouts.jsonl", "--output", "out.jsonl")


SCENES: dict[str, Any] = {
    "rollouts": Rollouts,
    "filter": Filter,
    "pairs": Pairs,
    "sft": lambda space: Training(space, "sft"),
    "dpo": lambda space: Training(space, "dpo"),
    "distill": lambda space: Training(space, "distill"),
    "export": Export,
    "evaluation": Evaluation,
}


def measure(name: str, num_kills: int, draw: random.Random) -> Counter[str]:
    """Kills one operation as often as asked, each time in a fresh project."""
    counts: Counter[str] = Counter()
    with workspace() as space:
        scene = SCENES[name](space)
        started = time.monotonic()
        attempt = scene.start(None)
        assert scene.is_whole(attempt), f"{name} does not even work when it is left alone"
        whole_s = time.monotonic() - started
        expected = scene.result(attempt)
    while counts["kills"] < num_kills:
        with workspace() as space:
            scene = SCENES[name](space)
            before, attempt = None, scene.start(None)
            kills_here = 0
            for _ in range(MAX_ATTEMPTS):
                if counts["kills"] < num_kills and kills_here < MAX_ATTEMPTS - 2:
                    time.sleep(draw.uniform(0, whole_s))
                    was_killed = scene.kill(attempt)
                    counts["kills"] += was_killed
                    counts["too late"] += not was_killed
                    kills_here += was_killed
                    counts["untrue"] += not scene.is_true(attempt, was_killed)
                    if was_killed:
                        counts["orphans"] += num_orphans(space.root)
                if scene.is_whole(attempt):
                    break
                before, attempt = attempt, scene.start(before if before is None else attempt)
            else:
                counts["lost"] += 1
                continue
            counts["lost or doubled"] += scene.result(attempt) != expected
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=list(SCENES))
    parser.add_argument("--cold", action="store_true")
    options = parser.parse_args()
    draw = random.Random(options.seed)
    names = [name for name in SCENES if options.only in (None, name)]
    counts: dict[str, Counter[str]] = {}
    with ExitStack() as stack:
        if not options.cold:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="warm-")))
            sys.executable = str(open_warm_python(folder, until=os.getpid()))
        for number, name in enumerate(names):
            share = options.kills // len(names) + (number < options.kills % len(names))
            if share:
                counts[name] = measure(name, share, draw)
                print(name, dict(counts[name]), file=sys.stderr, flush=True)
    total = sum(counts.values(), Counter())
    bad = total["lost"] + total["lost or doubled"] + total["orphans"] + total["untrue"]
    return report(
        "kills",
        f"{total['kills']} kills over {', '.join(counts)}: {total['lost'] + total['lost or doubled']} "
        f"lost or doubled, {total['orphans']} processes left after 10 s, {total['untrue']} untrue statuses",
        not bad,
        seed=options.seed, counts={name: dict(count) for name, count in counts.items()},
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
