"""Runs whose machine is a folder of this one, and rewards that end only when a test says so."""

import json
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import psutil

from fakes.rollout_lines import encoded
from fakes.rollout_rows import rollout_row, write_lines
from fakes.user_files import write_tools
from fakes.waiting import wait_until
from stillroom import api
from stillroom.jobs import supervise
from stillroom.remote.machine import Machine, SshAddress
from stillroom.remote.records import JobSpec, PathMapping, SentFile
from stillroom.run_folder import REMOTE_FILE, NewRun, RunFolder, RunState, create_run
from stillroom.secrecy.environments import run_environment
from stillroom.settings import Workspace
from stillroom.types import RunKind

_REWARDS = """
    import time
    from pathlib import Path

    GATE = Path({gate!r})
    ROOT = Path(__file__).resolve().parent

    def checkpoint(number):
        run, = (ROOT / "runs").iterdir()
        folder = run / "checkpoints" / f"step_{{number:06d}}"
        temporary = folder.with_name(f".{{folder.name}}.partial")
        temporary.mkdir(parents=True, exist_ok=True)
        (temporary / "model.safetensors").write_bytes(bytes([number]) * 1000)
        (temporary / "stillroom.json").write_text(f'{{{{"step": {{number}}}}}}')
        temporary.rename(folder)

    @reward
    def gated(args, messages):
        number = int(args.metadata["number"])
        print("begin", number, ROOT, flush=True)
        checkpoint(number)
        with (ROOT / "calls.txt").open("a") as calls:
            calls.write(f"{{number}}\\n")
        while not (GATE / str(number)).exists() and not (GATE / "all").exists():
            time.sleep(0.02)
        return number / 10
    """


@dataclass
class Elsewhere:
    """A workspace, and a folder that stands for another machine."""

    root: Path
    machine: dict[str, Any] = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        self.home, self.there, self.gate = (self.root / name for name in ("home", "there", "gate"))
        for folder in (self.home, self.there, self.gate):
            folder.mkdir()
        self.workspace = Workspace(self.home)
        rows = [rollout_row(task_id=f"t{n}", metadata={"number": n}) for n in range(2)]
        write_lines(self.home / "rollouts.jsonl", map(encoded, rows))
        write_tools(self.home, _REWARDS.format(gate=str(self.gate)), name="rewards.py")

    def start(
        self, *, secrets: dict[str, str] | None = None, start_after: list[str] | None = None
    ) -> RunFolder:
        """Starts a scoring run elsewhere."""
        ssh = SshAddress(host="box")
        machine = Machine(name="box", ssh=ssh, folder=str(self.there), **self.machine)
        document, new, _ = self._new_run(machine, start_after=start_after or [])
        state = supervise.start_run(
            self.workspace,
            RunKind.SCORE,
            document,
            environment=run_environment(self.home),
            secrets=secrets,
            new=new,
        )
        return RunFolder(self.workspace.runs / state.run_id)

    def spec(self, machine: Machine) -> tuple[RunFolder, JobSpec]:
        """Makes a scoring run for a machine, with nobody who follows it, and its spec."""
        document, new, spec = self._new_run(machine, budget_usd=5.0)
        return create_run(self.workspace, RunKind.SCORE, document, new), spec

    def _new_run(self, machine: Machine, **limits: Any) -> tuple[dict[str, Any], NewRun, JobSpec]:
        request = {"input": "rollouts.jsonl", "output": "scored.jsonl", "rewards": "rewards.py"}
        document = api.ScoreRollouts(**request, concurrency=1).model_dump(mode="json")
        sources = [self.home / name for name in ("rollouts.jsonl", "rewards.py")]
        spec = JobSpec(
            machine=machine,
            files=[
                SentFile(source=str(each), remote_path=f"workspace/{each.name}") for each in sources
            ],
            home_paths=[
                PathMapping(home_path=str(each), remote_path=f"workspace/{each.name}")
                for each in sources
            ],
            outputs=["scored.jsonl"],
            **limits,
        )
        run_files = {REMOTE_FILE: msgspec.json.encode(spec)}
        return document, NewRun(inputs=sources, run_files=run_files), spec

    def open(self, number: int | str = "all") -> None:
        """Lets the reward of a row be given."""
        (self.gate / str(number)).touch()

    def cut(self) -> None:
        """Breaks the connection, until `mend`."""
        (self.there / "cut").touch()

    def mend(self) -> None:
        """Has the machine answer again."""
        (self.there / "cut").unlink()

    def report(self, run: RunFolder) -> api.RunReport:
        return api.get_run(self.workspace, api.GetRun(run_id=run.run_id))

    def wait_for(self, run: RunFolder, *statuses: str) -> api.RunReport:
        wait_until(lambda: self.report(run).status in statuses, timeout_s=60)
        return self.report(run)

    def ended(self, run: RunFolder) -> api.RunReport:
        """Waits until a run has ended, and nothing of it is left to do."""
        self.wait_for(run, "succeeded", "failed", "cancelled", "interrupted")
        wait_until(lambda: self.view(run)["phase"] == "over", timeout_s=60)
        return self.report(run)

    def view(self, run: RunFolder) -> dict[str, Any]:
        path = run.path / "remote_view.json"
        return json.loads(path.read_text()) if path.exists() else {"phase": "waiting"}

    def rewarded(self, run: RunFolder) -> list[str]:
        """The calls of rewards that were begun there, in order."""
        path = self.there / "runs" / run.run_id / "workspace" / "calls.txt"
        return path.read_text().split() if path.exists() else []

    def worker_there(self, run: RunFolder) -> psutil.Process:
        pid = self.state_there(run).pid
        assert pid is not None
        return psutil.Process(pid)

    def state_there(self, run: RunFolder) -> RunState:
        """The state that the run's process there has written last."""
        base = self.there / "runs" / run.run_id
        return RunFolder(base / "workspace" / "runs" / run.run_id).read()

    def processes(self) -> list[psutil.Process]:
        """All processes that name this test's folders, such as followers and workers."""
        return [process for process, _ in self._commands() if process.pid != os.getpid()]

    def _commands(self) -> Iterator[tuple[psutil.Process, str]]:
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                command = " ".join(process.cmdline())
                if str(self.root) in command:
                    yield process, command

    def followers(self) -> list[psutil.Process]:
        return [process for process, command in self._commands() if "follower" in command]

    def kill_followers(self) -> None:
        """Kills the followers, of which there must be one.

        A process that has only just been started may not have its command line yet.
        """
        wait_until(lambda: self.followers() != [])
        for process in self.followers():
            process.send_signal(signal.SIGKILL)

    def close(self) -> None:
        """Ends what a test has left."""
        self.open()
        for process in self.processes():
            with suppress(psutil.Error):
                process.kill()
