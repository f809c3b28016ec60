"""What the scripts of this folder share: a machine behind a wire, and what is true about its runs."""

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "benchmarks" / "training")]
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import psutil  # noqa: E402
from wire import Wire  # noqa: E402

from fakes.sshd import Sshd, make_key  # noqa: E402
from stillroom import api  # noqa: E402
from stillroom.run_folder import RunFolder, find_run  # noqa: E402
from stillroom.settings import Workspace  # noqa: E402

ACTIVE = ("starting", "running")
TRUE_WITHIN_S = 10.0
"""The time after a fault is over in which a status must have become true."""


@dataclass(slots=True)
class Scene:
    """A workspace here, a machine `box` there, and the wire between them."""

    space: Workspace
    there: Path
    """The folder of ours on the machine."""
    sshd: Sshd
    wire: Wire
    runs: list[str] = field(default_factory=list)

    def start(self, **request: Any) -> str:
        run_id = api.start_training(self.space, api.StartTraining(where="box", **request)).run_id
        self.runs.append(run_id)
        return run_id

    def look(self, run_id: str) -> Any:
        return api.get_run(self.space, api.GetRun(run_id=run_id))

    def folder(self, run_id: str) -> RunFolder:
        return find_run(self.space, run_id)

    def folder_there(self, run_id: str) -> RunFolder:
        return RunFolder(self.there / "runs" / run_id / "workspace" / "runs" / run_id)

    def status_there(self, run_id: str) -> str | None:
        """The status that the run's folder there holds; None if there is no such folder."""
        try:
            return json.loads(self.folder_there(run_id).state_file.read_bytes())["status"]
        except FileNotFoundError:
            return None

    def workers_there(self, run_id: str | None = None) -> list[psutil.Process]:
        """The processes that were started on the machine, but ssh sessions, of one run or of all."""
        marks = str(self.there / "runs" / run_id) if run_id else str(self.there)
        return [p for p in processes_naming(marks) if "remote.agent" not in " ".join(cmdline(p))]

    def followers(self) -> list[psutil.Process]:
        return [p for p in processes_naming(str(self.space.root)) if any("remote.follower" in a for a in cmdline(p))]  # fmt: skip

    def wait_for_end(self, run_id: str, seconds: float = 240.0) -> Any:
        wait_for(lambda: self.look(run_id).status not in ACTIVE, seconds)
        return self.look(run_id)


def cmdline(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def processes_naming(text: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
                continue
            if text in " ".join(process.cmdline()) or text in process.cwd():
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found


def wait_for(condition: Callable[[], Any], seconds: float = 60.0) -> bool:
    """Returns whether the condition came to hold in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


@contextmanager
def machine(settings: Mapping[str, str] | None = None, **entry: Any) -> Iterator[Scene]:
    """Yields an empty workspace and a machine `box` on the loopback; stops all that is left at the end.

    `settings` are sshd's own, `entry` is added to the machine's in machines.yml.
    """
    with ExitStack() as stack:
        made = stack.enter_context(tempfile.TemporaryDirectory(prefix="stillroom-remote-", ignore_cleanup_errors=True))  # fmt: skip
        root = Path(made).resolve()
        for name in ("here", "there", "config"):
            (root / name).mkdir()
        os.environ["STILLROOM_CONFIG"] = str(root / "config")
        sshd = Sshd(root / "sshd", settings)
        sshd.start()
        stack.callback(sshd.stop)
        wire = Wire(sshd.port)
        stack.callback(wire.close)
        user = sshd.user(root / "user")
        user.set(f"Port {wire.port}")
        key = (root / "sshd/host_key.pub").read_text(encoding="utf-8")
        user.known_hosts.write_text(f"[127.0.0.1]:{wire.port} {key}", encoding="utf-8")
        ssh = {"host": "box", "options": ["-F", str(user.config)]}
        box = {"ssh": ssh, "folder": str(root / "there"), "python": sys.executable, **entry}
        (root / "config/machines.yml").write_text(
            json.dumps({"box": box}), encoding="utf-8"
        )  # JSON is YAML
        scene = Scene(Workspace(root / "here"), root / "there", sshd, wire)
        yield scene
        wait_for(lambda: not scene.followers() and not scene.workers_there(), TRUE_WITHIN_S)
        for process in [*scene.followers(), *scene.workers_there()]:
            print(f"left: {cmdline(process)}", file=sys.stderr)
            process.kill()


def other_host_key(sshd: Sshd) -> None:
    """Stops the server and starts it with a key of its own, as if it were another machine."""
    sshd.stop()
    kept = sshd.folder / "kept"
    kept.mkdir()
    for name in ("host_key", "host_key.pub"):
        (sshd.folder / name).rename(kept / name)
    make_key(sshd.folder / "host_key")
    sshd.start()


def first_host_key(sshd: Sshd) -> None:
    """Starts the server with its first key again."""
    sshd.stop()
    for path in (sshd.folder / "kept").iterdir():
        path.replace(sshd.folder / path.name)
    sshd.start()


def report(figure: str, *, passed: bool, **more: Any) -> int:
    """Prints the line and returns the script's exit code."""
    print(json.dumps({"figure": figure, "passed": passed, **more}), flush=True)
    return 0 if passed else 1
