"""A training on a machine behind a wire that fails in every way we know: is its status true, and is it the unbroken run?

    .venv/bin/python benchmarks/remote/faults.py [--cuts 50] [--only cuts,sshd_restarted,…] [--seed 0]

Each scene trains the same small student through a real sshd on the loopback, breaks something, and then asks: was every status true within
ten seconds of the machine being reachable again? Are weights and metrics those of the same run done here? Was each step taken once? Is a
process left, here or there? One JSON line for each scene and one for all; exits with 1 if any answer is wrong.
"""

import argparse
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from scene import (
    ACTIVE,
    TRUE_WITHIN_S,
    Scene,
    first_host_key,
    machine,
    other_host_key,
    report,
    wait_for,
)

from fakes.tiny_models import TinyModels
from fakes.training import make_project
from stillroom import api
from stillroom.errors import EngineError

# Long enough that a run is still going when it is broken: its steps are seen here seconds later.
EPOCHS, SAVE_STEP = 60, 20
ROWS = [
    {
        "messages": [
            {"role": "user", "content": f"Item {i}?"},
            {"role": "assistant", "content": f"It costs {i}."},
        ]
    }
    for i in range(24)
]


def project(
    root: Path, epochs: int = EPOCHS, save_step: int = SAVE_STEP, batch_size: int = 2
) -> None:
    models = TinyModels(root / "models")
    start = models.folder("llama", "chatml", attention_dropout=0.3)
    made = make_project(
        root,
        "sft",
        start,
        data={"batch_size": batch_size},
        trainer={"num_epochs": epochs, "save_step": save_step},
    )
    made.write(ROWS)
    made.write_config()


def digest(run: Path) -> str:
    file = next((run / "checkpoints/final").glob("*model.safetensors"))
    return hashlib.sha256(file.read_bytes()).hexdigest()


def steps(run: Path) -> list[int]:
    lines = (run / "events.jsonl").read_text(encoding="utf-8").splitlines()
    return [event["step"] for event in map(json.loads, lines) if event["event"] == "metrics"]


class Checks:
    """What was wrong in a scene, and the figures that it gives."""

    def __init__(self) -> None:
        self.wrong: list[str] = []
        self.figures: dict[str, Any] = {}

    def expect(self, condition: object, what: str) -> None:
        if not condition:
            self.wrong.append(what)
            print("wrong:", what, file=sys.stderr, flush=True)


_local: list[str] = []


def weights_here(scene: Scene) -> str:
    """The weights of the same run, done on this machine."""
    if not _local:
        run_id = api.start_training(scene.space, api.StartTraining()).run_id
        run = scene.wait_for_end(run_id)
        if run.status != "succeeded":
            raise SystemExit(f"the run here: {run.error}")
        _local.append(digest(scene.folder(run_id).path))
    return _local[0]


def check_whole(scene: Scene, run_id: str, checks: Checks) -> None:
    """The run has succeeded, its files are here, each step was taken once, and nothing is left."""
    run = scene.wait_for_end(run_id)
    checks.expect(run.status == "succeeded", f"ended {run.status}: {run.error}")
    if run.status == "succeeded":
        folder = scene.folder(run_id).path
        checks.expect(digest(folder) == weights_here(scene), "other weights than here")
        twice = [step for step, count in Counter(steps(folder)).items() if count > 1]
        checks.expect(not twice, f"steps twice: {twice}")
        checks.expect(len(steps(folder)) == EPOCHS * len(ROWS) // 2, "steps are missing")
    check_nothing_left(scene, checks)


def check_nothing_left(scene: Scene, checks: Checks) -> None:
    wait_for(lambda: not scene.followers() and not scene.workers_there(), TRUE_WITHIN_S)
    checks.expect(not scene.followers(), "a follower is left here")
    checks.expect(not scene.workers_there(), "a process is left there")


def is_true(scene: Scene, run_id: str) -> bool:
    """Whether what get_run says now is what is so there."""
    here, there = scene.look(run_id).status, scene.status_there(run_id)
    return here == "succeeded" or there is None or here == there or here in ACTIVE


def wait_for_news(scene: Scene, run_id: str, contact: str | None) -> None:
    wait_for(
        lambda: (
            scene.look(run_id).last_contact != contact or scene.look(run_id).status not in ACTIVE
        )
    )


def cuts(scene: Scene, checks: Checks, options: argparse.Namespace) -> None:
    """Cuts at random moments, of which some last seconds, until there were as many as asked for."""
    draw, slowest, runs = random.Random(options.seed), 0.0, 0
    while scene.wire.num_cuts < options.cuts and runs < options.cuts:
        run_id, runs = scene.start(), runs + 1
        while scene.look(run_id).status in ACTIVE and scene.wire.num_cuts < options.cuts:
            time.sleep(draw.uniform(0.1, 3.0))
            if draw.random() < 0.3:
                scene.wire.down(draw.uniform(0.5, 4.0))
            else:
                scene.wire.cut()
            began = time.monotonic()
            wait_for_news(scene, run_id, scene.look(run_id).last_contact)
            slowest = max(slowest, time.monotonic() - began)
            checks.expect(
                is_true(scene, run_id),
                f"{scene.look(run_id).status} here, {scene.status_there(run_id)} there",
            )
        check_whole(scene, run_id, checks)
    checks.figures |= {
        "cuts": scene.wire.num_cuts,
        "runs": runs,
        "slowest_contact_s": round(slowest, 1),
    }
    checks.expect(slowest <= TRUE_WITHIN_S, f"{slowest:.1f} s until the machine was heard again")
    checks.expect(scene.wire.num_cuts >= options.cuts, "fewer cuts than asked for")


def sshd_restarted(scene: Scene, checks: Checks, options: argparse.Namespace) -> None:
    run_id = begun(scene)
    scene.sshd.stop()
    scene.wire.cut()
    time.sleep(6)
    run = scene.look(run_id)
    checks.expect(run.status in ACTIVE, f"{run.status} while the machine could not be reached")
    checks.expect(run.unreachable, "it is not said that the machine cannot be reached")
    scene.sshd.start()
    check_whole(scene, run_id, checks)


def here_killed(scene: Scene, checks: Checks, options: argparse.Namespace) -> None:
    """The program that started the run, and every follower, killed again and again."""
    code = "import sys\nfrom stillroom import api\nfrom stillroom.settings import Workspace\nprint(api.start_training(Workspace(__import__('pathlib').Path(sys.argv[1])), api.StartTraining(where='box')).run_id, flush=True)\nimport time; time.sleep(600)"
    server = subprocess.Popen(
        [sys.executable, "-P", "-c", code, str(scene.space.root)], stdout=subprocess.PIPE, text=True
    )
    run_id = server.stdout.readline().strip()
    server.kill()
    server.wait()
    draw, kills = random.Random(options.seed), 0
    while scene.look(run_id).status in ACTIVE and kills < options.kills:
        time.sleep(draw.uniform(0.3, 2.5))
        for process in scene.followers():
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
                kills += 1
        checks.expect(
            is_true(scene, run_id),
            f"{scene.look(run_id).status} here, {scene.status_there(run_id)} there",
        )
    checks.figures["followers_killed"] = kills
    check_whole(scene, run_id, checks)


def worker_killed(scene: Scene, checks: Checks, options: argparse.Namespace) -> None:
    """The worker there is killed; the run goes on from what was brought back, on this machine."""
    run_id = begun(scene, step=2 * SAVE_STEP + 3)
    killed = time.monotonic()
    for process in scene.workers_there(run_id):
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
    run = scene.wait_for_end(run_id, 60)
    checks.figures["true_after_s"] = round(time.monotonic() - killed, 1)
    checks.expect(
        run.status in ("failed", "interrupted"), f"{run.status} after its worker was killed"
    )
    checks.expect(time.monotonic() - killed <= TRUE_WITHIN_S, "the status came late")
    resumed = api.start_training(scene.space, api.StartTraining(resume=run_id)).run_id
    again = scene.wait_for_end(resumed)
    checks.expect(again.status == "succeeded", f"resumed here: {again.status}: {again.error}")
    if again.status == "succeeded":
        done_there = max(steps(scene.folder(run_id).path))
        goes_on = next(note for note in again.notes if note.startswith("resumes at step"))
        checks.figures["steps_lost"] = done_there - int(goes_on.split()[3])
        checks.expect(
            checks.figures["steps_lost"] <= SAVE_STEP, "more than save_step steps were lost"
        )
        checks.expect(
            digest(scene.folder(resumed).path) == weights_here(scene),
            "other weights after going on here",
        )
    check_nothing_left(scene, checks)


def resumed_there(scene: Scene, checks: Checks, options: argparse.Namespace) -> None:
    """A run that was stopped there goes on in another run there."""
    run_id = begun(scene, step=2 * SAVE_STEP + 3)
    api.cancel_run(scene.space, api.CancelRun(run_id=run_id))
    run = scene.wait_for_end(run_id, 60)
    checks.expect(run.status == "cancelled", f"{run.status} after it was cancelled")
    resumed = scene.start(resume=run_id)
    again = scene.wait_for_end(resumed)
    checks.expect(again.status == "succeeded", f"resumed there: {again.status}: {again.error}")
    if again.status == "succeeded":
        checks.expect(
            digest(scene.folder(resumed).path) == weights_here(scene),
            "other weights after going on there",
        )
    check_nothing_left(scene, checks)


def host_key_changed(scene: Scene, checks: Checks, options: argparse.Namespace) -> None:
    run_id = begun(scene)
    other_host_key(scene.sshd)
    scene.wire.cut()
    wait_for(lambda: "host key" in (scene.look(run_id).unreachable or "").lower(), 20)
    run = scene.look(run_id)
    checks.expect(run.status in ACTIVE, f"{run.status} with another host key")
    checks.expect("host key" in (run.unreachable or "").lower(), f"says {run.unreachable!r}")
    checks.figures["says"] = run.unreachable
    first_host_key(scene.sshd)
    scene.wire.cut()
    check_whole(scene, run_id, checks)


def other_version(scene: Scene, checks: Checks, options: argparse.Namespace) -> None:
    """Another version's code lies there, and one of its runs; ours uses its own."""
    check_whole(scene, scene.start(), checks)
    other = scene.there / "code" / ("0" * 64)
    (other / "stillroom").mkdir(parents=True)
    (other / "stillroom/__init__.py").write_text(
        "raise SystemExit('the other version was used')\n", encoding="utf-8"
    )
    check_whole(scene, scene.start(), checks)


def disk_full(scene: Scene, checks: Checks, options: argparse.Namespace) -> None:
    """The machine's disk is full while the run writes; it says so, and nothing is lost."""
    run_id = begun(scene, step=SAVE_STEP + 3)
    filler = scene.there / "filler"
    # Without a buffer, which could not be written when the file is closed.
    with filler.open("wb", buffering=0) as stream, suppress(OSError):
        while True:
            stream.write(b"\0" * (1 << 16))
    run = scene.wait_for_end(run_id, 90)
    checks.expect(run.status == "failed", f"{run.status} on a full disk: {run.error}")
    text = f"{run.error}".lower()
    checks.expect("disk" in text or "space" in text, f"says {run.error}")
    checks.figures["says"] = run.error.problem if run.error else None
    filler.unlink()
    resumed = scene.start(resume=run_id)
    again = scene.wait_for_end(resumed)
    checks.expect(
        again.status == "succeeded", f"after room was made: {again.status}: {again.error}"
    )
    if again.status == "succeeded":
        checks.expect(
            digest(scene.folder(resumed).path) == weights_here(scene),
            "other weights after room was made",
        )
    check_nothing_left(scene, checks)


def clocks_apart(scene: Scene, checks: Checks, options: argparse.Namespace) -> None:
    """The clock of every process there is five hours ahead; only the monotonic one is right."""
    check_whole(scene, scene.start(), checks)  # which makes the environment there
    library = next(Path("/usr/lib").rglob("libfaketime.so.1"), None)
    assert library is not None, "install faketime (apt-get install faketime) for the clocks"
    for python in scene.there.glob("venvs/*/bin/python"):
        real = os.path.realpath(python)
        python.unlink()
        python.write_text(
            f'#!/bin/bash\nexport LD_PRELOAD={library} FAKETIME=+5h DONT_FAKE_MONOTONIC=1\nexec -a "$0" {real} "$@"\n',
            encoding="utf-8",
        )
        python.chmod(0o755)
    before, run_id = time.time(), scene.start()
    check_whole(scene, run_id, checks)
    run = scene.look(run_id)
    said = [
        datetime.fromisoformat(moment).timestamp()
        for moment in (run.started_at, run.ended_at)
        if moment
    ]
    there = json.loads((scene.folder(run_id).path / "remote_view.json").read_bytes())
    lines = scene.folder(run_id).events.read_text(encoding="utf-8").splitlines()
    ahead = datetime.fromisoformat(json.loads(lines[0])["time"]).timestamp() - before
    checks.figures |= {
        "events_ahead_h": round(ahead / 3600, 1),
        "seconds_there": there["seconds_there"],
    }
    checks.expect(ahead > 4 * 3600, "the clock there was not ahead")
    checks.expect(
        len(said) == 2 and all(before - 5 <= moment <= time.time() + 5 for moment in said),
        f"times {run.started_at} to {run.ended_at}",
    )
    checks.expect(there["seconds_there"] < 600, "the clock's difference counts as time used")


def big_model(scene: Scene, checks: Checks, options: argparse.Namespace) -> None:
    """A model of 1 GB in 2,000 files is sent through cuts; a second run sends almost nothing."""
    model = next((scene.space.root / "models").rglob("config.json")).parent
    (model / "parts").mkdir()
    for number in range(2_000):
        (model / "parts" / f"{number}.bin").write_bytes(
            os.urandom(options.megabytes * 1024 * 1024 // 2_000)
        )
    draw, before = random.Random(options.seed), scene.wire.sent
    run_id = scene.start()
    while scene.status_there(run_id) is None and scene.look(run_id).status in ACTIVE:
        time.sleep(draw.uniform(1.0, 6.0))
        if scene.wire.num_cuts < 10:
            scene.wire.cut()
    run = scene.wait_for_end(run_id, 400)
    checks.expect(run.status == "succeeded", f"ended {run.status}: {run.error}")
    sent = scene.wire.sent - before
    checks.figures |= {
        "cuts": scene.wire.num_cuts,
        "sent_mb": round(sent / 1e6),
        "of_mb": round(options.megabytes * 1.048576),
    }
    checks.expect(sent < 1.3 * options.megabytes * 1.05e6, "contents were sent again after cuts")
    before = scene.wire.sent
    second = scene.wait_for_end(scene.start(), 400)
    checks.figures["second_run_sent_kb"] = round((scene.wire.sent - before) / 1e3)
    checks.expect(second.status == "succeeded", f"second run ended {second.status}: {second.error}")
    checks.expect(scene.wire.sent - before < 1e6, "the second run sent 1 MB or more")
    check_nothing_left(scene, checks)


def begun(scene: Scene, step: int = 5) -> str:
    """Starts a run and waits until it has come so far, as seen here."""
    run_id = scene.start()
    events = scene.folder(run_id).events
    wait_for(lambda: events.exists() and len(steps(events.parent)) >= step, 120)
    return run_id


SCENES: dict[str, Callable[[Scene, Checks, argparse.Namespace], None]] = {
    function.__name__: function
    for function in (
        cuts, sshd_restarted, here_killed, worker_killed, resumed_there, host_key_changed,
        other_version, disk_full, clocks_apart, big_model,
    )
}  # fmt: skip


def play(name: str, options: argparse.Namespace) -> Checks:
    checks = Checks()
    with machine() as scene:
        project(scene.space.root)
        if name == "disk_full":
            subprocess.run(
                ["/usr/bin/mount", "-t", "tmpfs", "-o", "size=200m", "tmpfs", str(scene.there)],
                check=True,
            )
        try:
            weights_here(scene)
            SCENES[name](scene, checks, options)
        except EngineError as error:
            checks.expect(False, f"the scene broke off: {error}")
        finally:
            if name == "disk_full":
                subprocess.run(["/usr/bin/umount", "-l", str(scene.there)], check=True)
    return checks


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cuts", type=int, default=50)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default=",".join(SCENES))
    options = parser.parse_args()
    wrong, scenes = 0, options.only.split(",")
    for name in scenes:
        began = time.monotonic()
        checks = play(name, options)
        wrong += len(checks.wrong)
        report(
            name,
            passed=not checks.wrong,
            wrong=checks.wrong,
            seconds=round(time.monotonic() - began),
            **checks.figures,
        )
    return report("all", passed=not wrong, scenes=len(scenes), answers_wrong=wrong)


if __name__ == "__main__":
    sys.exit(main())
