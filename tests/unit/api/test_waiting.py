"""A call that waits for a run answers at what matters."""

import msgspec
import pytest

from stillroom.api import RunReport, RunWatch
from stillroom.run_folder import Progress
from stillroom.types import RunKind, RunStatus


def run(done: int = 0, *, eta_s: float | None = None, phase: str = "train", **fields) -> RunReport:
    progress = Progress(phase=phase, done=done, total=200, unit="steps", eta_s=eta_s)
    given = {
        "run_id": "sft-1", "kind": RunKind.SFT, "status": RunStatus.RUNNING, "created_at": "",
        "started_at": "", "ended_at": None, "progress": progress, "metrics": {}, "alarms": [],
        "notes": [], "result": None, "error": None, "folder": "", "log_path": "",
    }  # fmt: skip
    return RunReport(**{**given, **fields})


FIRST = run(41, alarms=["kl_rising: 0.31 over 0.12"], budget_usd=10.0, metrics={"cost_usd": 6.0})


@pytest.mark.parametrize(
    ("changes", "waited_s", "reason"),
    [
        ({"status": RunStatus.FAILED}, 1, "ended"),
        ({"status": RunStatus.SUCCEEDED}, 0, "ended"),
        ({"alarms": ["kl_rising: 0.4", "truncation: 30 %"]}, 1, "alarm"),
        # The same alarm with other figures is no news, nor is one that ended.
        ({"alarms": ["kl_rising: 0.45 over 0.12"]}, 1, None),
        ({"alarms": []}, 1, None),
        ({"metrics": {"cost_usd": 8.1}}, 1, "budget"),
        ({"metrics": {"cost_usd": 7.9}}, 1, None),
        ({"metrics": {"cost_usd": 8.1}, "budget_usd": None}, 1, None),
        ({}, 109, None),
        ({}, 110, "time"),
    ],
)
def test_a_wait_ends_at_an_end_an_alarm_a_budget_or_its_time(changes, waited_s, reason) -> None:
    watch = RunWatch(FIRST, 110)
    assert watch.reason(msgspec.structs.replace(FIRST, **changes), waited_s) == reason


def test_progress_answers_at_a_tenth_and_only_after_a_while() -> None:
    def reason(report: RunReport, waited_s: float, wait_s: float = 110) -> str | None:
        return RunWatch(run(41), wait_s).reason(report, waited_s)

    assert reason(run(60), 10) is None
    assert reason(run(60), 31) == "progress"
    assert reason(run(59), 31) is None
    assert reason(run(2, phase="evaluate"), 31) == "progress"
    assert reason(run(60), 6, wait_s=10) == "progress"
    recipe = run(41, kind=RunKind.RECIPE)
    assert RunWatch(recipe, 110).reason(run(60, kind=RunKind.RECIPE), 31) is None
    # It ends before the call must answer.
    assert reason(run(180, eta_s=40), 31) is None
    assert reason(run(180, eta_s=90), 31) == "progress"


def test_a_run_that_had_no_progress_yet_is_measured_from_its_first() -> None:
    watch = RunWatch(msgspec.structs.replace(run(), progress=None), 110)
    assert watch.reason(run(100), 31) is None
    assert watch.reason(run(101), 32) is None
    assert watch.reason(run(120), 60) == "progress"


def test_another_package_that_a_machine_installs_is_no_progress() -> None:
    def installing(package: str) -> RunReport:
        return run(phase=f"box: installing packages: Collecting {package}")

    watch = RunWatch(installing("torch"), 110)
    assert watch.reason(installing("peft"), 60) is None
    assert watch.reason(run(phase="box: sending files"), 61) == "progress"
