"""Runs that end in every way there is: does each status say what happened, in words?

A full disk needs root (a small file system is mounted), and a run that the kernel kills for memory a
control group below this process's own. Where it cannot do so, the line says `not_run`.
"""

import contextlib
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from scenes import folder_of, report, training_project, wait_for, wait_for_end, workspace

from fakes.http_endpoint import ScriptedEndpoint
from fakes.projects import endpoint_project, rollouts_request
from stillroom import api
from stillroom.settings import Workspace


def start(space: Workspace, endpoint: ScriptedEndpoint, **more: Any) -> str:
    endpoint_project(space.root, num_prompts=4)
    request = rollouts_request(
        endpoint,
        output="out.jsonl",
        **more,
    )
    return api.generate_rollouts(space, request).run_id


def words(ended: api.RunReport) -> str:
    return f"{ended.status}: {ended.error.problem if ended.error else ''}"


def everything_succeeds() -> str:
    with workspace() as space, ScriptedEndpoint() as endpoint:
        return words(wait_for_end(space, start(space, endpoint)))


def nothing_succeeds() -> str:
    with workspace() as space, ScriptedEndpoint(status=400) as endpoint:
        return words(wait_for_end(space, start(space, endpoint)))


def cancelled_at_once() -> str:
    with workspace() as space, ScriptedEndpoint() as endpoint:
        endpoint.hold.clear()
        run_id = start(space, endpoint)
        api.cancel_run(space, api.CancelRun(run_id=run_id))
        return words(wait_for_end(space, run_id))


def killed() -> str:
    with workspace() as space, ScriptedEndpoint() as endpoint:
        endpoint.hold.clear()
        run_id = start(space, endpoint)
        wait_for(lambda: endpoint.num_asked)
        os.kill(folder_of(space, run_id).read().pid, signal.SIGKILL)
        return words(wait_for_end(space, run_id))


def full_disk() -> str | None:
    """A disk that is full while the run works, so that nothing at all can be written."""
    with workspace() as space, ScriptedEndpoint() as endpoint:
        disk = space.root / "disk"
        disk.mkdir()
        mount = ["/bin/mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)]
        if subprocess.run(mount, capture_output=True, check=False, timeout=20).returncode:
            return None
        try:
            small = Workspace(disk)
            endpoint.hold.clear()
            run_id = start(small, endpoint)
            wait_for(lambda: endpoint.num_asked)
            with contextlib.suppress(OSError), (disk / "filler").open("wb", buffering=0) as stream:
                while stream.write(bytes(1024)):
                    pass
            endpoint.hold.set()
            return words(wait_for_end(small, run_id))
        finally:
            subprocess.run(["/bin/umount", "--lazy", str(disk)], check=True, timeout=20)


class LongAnswers(ScriptedEndpoint):
    """Answers with 30 MB each."""

    def answer(self, body: dict[str, Any]) -> Any:
        key, reply = super().answer(body)
        reply["choices"][0]["message"] = {"role": "assistant", "content": "x" * (30 << 20)}
        return key, reply


@contextmanager
def small_group(num_bytes: int) -> Iterator[Path | None]:
    """Yields a control group of our own with a limit of memory; None if there can be none."""
    own = Path("/proc/self/cgroup").read_text().splitlines()
    path = next((line.split(":", 2)[2] for line in own if ":memory:" in line), None)
    is_first = path is not None
    root = Path("/sys/fs/cgroup/memory" if is_first else "/sys/fs/cgroup")
    group = root / (path or "/").lstrip("/") / f"trust-{uuid.uuid4().hex[:8]}"
    limit = "memory.limit_in_bytes" if is_first else "memory.max"
    try:
        group.mkdir()
        (group / limit).write_text(str(num_bytes))
    except OSError:
        yield None
        return
    try:
        yield group
    finally:
        wait_for(lambda: not (group / "cgroup.procs").read_text().split(), 10)
        group.rmdir()


def out_of_memory() -> str | None:
    with workspace() as space, small_group(40 << 20) as group, LongAnswers() as endpoint:
        if group is None:
            return None
        endpoint.hold.clear()
        run_id = start(space, endpoint)
        wait_for(lambda: endpoint.num_asked)
        pid = folder_of(space, run_id).read().pid
        keeper = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        for process in (keeper, pid):
            (group / "cgroup.procs").write_text(str(process))
        endpoint.hold.set()
        return words(wait_for_end(space, run_id))


def early_stop() -> str:
    """An SFT run that stops early: its progress must read as finished."""
    with workspace() as space:
        project = training_project(space.root, "sft")
        project.config["data"]["val_split"] = 0.25
        project.config["trainer"] |= {
            "num_epochs": 50,
            "learning_rate": 1e-12,
            "early_stop": 1,
        }
        project.write_config()
        run = api.start_training(space, api.StartTraining(config="config.yml"))
        ended = wait_for_end(space, run.run_id)
        done = ended.progress
        assert done is not None, ended
        whole = done.done == done.total and done.eta_s is None and done.done < 600
        return f"{words(ended)}{'finished' if whole else done}"


SCENES = {
    everything_succeeds: "succeeded: ",
    nothing_succeeds: "failed: none of 4 rollouts succeeded",
    cancelled_at_once: "cancelled: ",
    killed: "interrupted: the run's process exited before finishing (killed by SIGKILL)",
    full_disk: "failed: no space left on ",
    out_of_memory: "failed: out of memory: ",
    early_stop: "succeeded: finished",
}


def main() -> int:
    seen = {scene.__name__: scene() for scene in SCENES}
    expected = {scene.__name__: text for scene, text in SCENES.items()}
    not_run = [name for name, text in seen.items() if text is None]
    untrue = {
        name: text
        for name, text in seen.items()
        if text is not None and not text.startswith(expected[name])
    }
    num = len(seen) - len(not_run)
    return report(
        "statuses",
        f"{num - len(untrue)} of {num} ways to end are said by the status and in words"
        + (f"; not run: {', '.join(not_run)}" if not_run else ""),
        not untrue,
        untrue=untrue, not_run=not_run,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
