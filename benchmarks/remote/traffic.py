"""What goes over the wire to a machine, and how fast get_run answers while it is down.

    .venv/bin/python benchmarks/remote/traffic.py

Counted by a proxy in front of sshd, encryption included: the bytes of a first and of a second run with the same data, the bytes for a second
of following while a run trains (without checkpoints, whose bytes are those of their files), and the slowest of 50 calls of get_run while the machine cannot be reached. Prints a JSON line; exits with 1 if
a second run sends 1 MB, following costs 1 KB/s (of a training of 16 steps a second, if this one is faster), or a call takes .2 s.
"""

import json
import sys
import time

from faults import project, steps
from scene import ACTIVE, machine, report, wait_for

FOLLOWED_S = 20.0
FASTEST = 16
"""Steps a second of the fastest training whose following may cost 1 KB/s; tiny models take more."""


def main() -> int:
    with machine() as scene:
        project(scene.space.root, epochs=400, save_step=0, batch_size=12)
        first = scene.start()
        events = scene.folder(first).events
        wait_for(lambda: events.exists() and len(steps(events.parent)) > 20, 120)
        sent_first = scene.wire.sent
        before, begun, taken = (
            scene.wire.sent + scene.wire.received,
            time.monotonic(),
            len(steps(events.parent)),
        )
        time.sleep(FOLLOWED_S)
        per_second = (scene.wire.sent + scene.wire.received - before) / (time.monotonic() - begun)
        num_steps = len(steps(events.parent)) - taken
        scene.wire.is_down = True
        scene.wire.cut()
        time.sleep(6)
        slowest = 0.0
        for _ in range(50):
            called = time.perf_counter()
            run = scene.look(first)
            slowest = max(slowest, time.perf_counter() - called)
        is_said = run.status in ACTIVE and bool(run.unreachable) and bool(run.last_contact)
        scene.wire.is_down = False
        ended = scene.wait_for_end(first, 400)
        before = scene.wire.sent
        second = scene.wait_for_end(scene.start(), 400)
        again = scene.wire.sent - before
        figures = {
            "first_run_sent_kb": round(sent_first / 1e3),
            "second_run_sent_kb": round(again / 1e3),
            "following_bytes_per_s": round(per_second),
            "steps_per_s": round(num_steps / FOLLOWED_S, 1),
            "following_bytes_per_step": round(per_second * FOLLOWED_S / max(1, num_steps)),
            "slowest_get_run_ms": round(1e3 * slowest),
            "last_contact": run.last_contact,
        }
        passed = (
            is_said
            and ended.status == second.status == "succeeded"
            and again < 1e6
            and (per_second < 1024 or per_second / (num_steps / FOLLOWED_S) * FASTEST < 1024)
            and slowest <= 0.2
        )
        if not passed:
            print(
                json.dumps([ended.status, str(ended.error), second.status, str(second.error)]),
                file=sys.stderr,
            )
        return report("traffic", passed=passed, **figures)


if __name__ == "__main__":
    sys.exit(main())
