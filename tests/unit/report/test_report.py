"""The report page: what it says, what it leaves out, and that nothing in it becomes markup."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from fakes.html_pages import parse, text_of
from fakes.lineages import RUN, Lineages
from fakes.run_folders import answer, evaluate, write_evaluation, write_run, write_training
from stillroom.api.reports import write_report as write_report_of
from stillroom.evaluate.files import TaskCost
from stillroom.evaluate.intervals import Estimate
from stillroom.files import write_json
from stillroom.report.request import WriteReport
from stillroom.report.write import write_report

SUFFIX = "abcdefghijkmnpqrstuvwxyz23"
ATTACK = """<script>alert(1)</script>"' onload="x()" <img src=x onerror=y()>"""

Write = Callable[[], Path]


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    folder = tmp_path / "runs"
    folder.mkdir()
    return folder


@pytest.fixture
def written(runs: Path, tmp_path: Path) -> Write:
    return lambda: write_report(runs, tmp_path / "report.html", title="shop")


def test_workspace_without_runs_gets_a_page_that_says_so(tmp_path: Path) -> None:
    path = write_report(tmp_path / "missing", tmp_path / "out" / "report.html", title="shop")
    assert path == tmp_path / "out" / "report.html"
    assert "There are no runs in this workspace yet." in text_of(path)
    assert "Getting started" in text_of(path)


def test_runs_say_what_they_took_and_cost_and_how_to_start_them_again(
    runs: Path, tmp_path: Path
) -> None:
    result = {"requested": 3, "succeeded": 3, "cost_usd": 1.5}
    run = write_run(runs, "rollouts-a", result=result, metrics={"cost_usd": 1.4})
    write_run(runs, "sft-b", minute=1, metrics={"cost_usd": 0.25})
    document = {"kind": "rollouts", "workspace": "/w", "request": {"input": "my prompts.jsonl"}}
    write_json(run / "request.json", document)
    text = text_of(
        write_report(runs, tmp_path / "r.html", title="shop", command_of=lambda one: one.workspace)
    )
    assert "In total, they took 1 min 1 s and cost $1.75." in text
    assert "installation" not in text
    assert "30.5 s · $1.50" in text
    assert "30.5 s · $0.25" in text
    assert "Command /w" in text


def test_the_time_of_runs_elsewhere_says_what_it_leaves_out(runs: Path, written: Write) -> None:
    run = write_run(runs, "sft-a")
    write_json(run / "remote.json", {"machine": {"name": "gpu-box"}})

    text = text_of(written())

    assert "they took 30.5 s without installation and transfers on other machines." in text


def test_evaluations_of_different_files_have_bars_of_their_own(runs: Path, written: Write) -> None:
    rows = [answer(i, is_right=True) for i in range(4)]
    for minute, (name, data) in enumerate(
        [("base", "test.jsonl"), ("student", "test.jsonl"), ("student", "reworded.jsonl")]
    ):
        run = f"evaluate-{minute}"
        write_evaluation(runs, run, rows, minute=minute, model=name, name=name, data=data)

    text = text_of(written())

    assert "test.jsonl 4 tasks base first 100.0 %" in text
    assert "reworded.jsonl 4 tasks student" in text
    assert "student (2)" not in text
    assert "easy in test.jsonl 2 tasks base first" in text
    assert "easy in reworded.jsonl" not in text


def test_the_latest_recipe_says_what_its_figures_do_not_show(runs: Path, written: Write) -> None:
    write_run(runs, "recipe-a", result={"caveats": ["old"]})
    gain = {"value": 0.62, "low": 0.5, "high": 0.74, "n": 80}
    result = {
        "caveats": ["texts follow 12 <b>templates</b>"],
        "folder": "student/model",
        "gguf": "student/gguf/gguf.gguf",
        "system": "",
        "gain": gain,
        "gain_over": "untrained student, 5-shot",
        "above_teacher": {"value": -0.025, "low": -0.1, "high": 0.05, "n": 40},
    }
    write_run(runs, "recipe-b", minute=1, result=result)
    write_run(runs, "recipe-c", minute=2, status="failed", result={"caveats": ["of none"]})
    text = text_of(written())
    assert "student/model is for transformers and vLLM, student/gguf/gguf.gguf for" in text
    assert "Send no system message" in text
    assert (
        "Compared with the untrained student, 5-shot, on 80 test prompts: +62.0 points (95 % "
        "interval 50.0 to 74.0)." in text
    )
    assert "Compared with the teacher, on 40 validation prompts: \N{MINUS SIGN}2.5 points" in text
    write_run(runs, "recipe-d", minute=3, result=result | {"system": "Be <brief>."})
    assert "with which the student was trained: Be <brief>." in text_of(written())
    assert "Try it stillroom chat student/model llama-server -m student/gguf/gguf.gguf" in text
    assert "What the figures do not show texts follow 12 <b>templates</b>" in text
    assert "old" not in text
    assert "of none" not in text


def test_rows_that_each_stage_left_out_are_counted_by_reason_on_the_way_to_a_training(
    tmp_path: Path,
) -> None:
    project = Lineages(tmp_path)
    project.all()
    result = {
        "checkpoint": f"runs/{RUN}/checkpoints/final",
        "rows": 3,
        "skipped": {"over 64 tokens": 1},
    }
    write_run(tmp_path / "runs", RUN, result=result)

    write_report_of(project.workspace, WriteReport(output="r.html"))

    text = text_of(tmp_path / "r.html")
    stages = [
        "generate_rollouts rollouts.jsonl 8 rows; left out: none",
        "filter_dataset good.jsonl 4 rows; left out: 4 reward below 1",
        "convert_rollouts sft.jsonl 4 rows; left out: none",
        "start_training sft-run 3 rows; left out: 1 over 64 tokens",
    ]
    assert "Rows left out" in text
    assert [stage for stage in stages if stage not in text] == []
    places = [text.index(stage) for stage in stages]
    assert places == sorted(places)

    # A manifest of an older version has no reasons, but the sums.
    manifest = tmp_path / "good.jsonl.manifest.json"
    write_json(manifest, json.loads(manifest.read_text("utf-8")) | {"left_out": {}})
    write_report_of(project.workspace, WriteReport(output="r.html", overwrite=True))
    assert "left out: 4 for reasons that an older version did not record" in text_of(
        tmp_path / "r.html"
    )


def test_it_says_what_a_task_costs_with_student_and_teacher_and_when_that_pays(
    runs: Path, written: Write
) -> None:
    def cost(usd: float) -> dict[str, object]:
        one = TaskCost(usd=usd, seconds=2.0, machine_seconds=0.5, tokens=300, is_local=False)
        return {"per_task": one, "cost_usd": 0.0}

    right = [answer(i, is_right=i < 18) for i in range(20)]
    wrong = [answer(i, is_right=False) for i in range(20)]
    write_evaluation(runs, "evaluate-a", wrong, model="base", measured=cost(0.001))
    write_evaluation(
        runs, "evaluate-b", right, minute=1, model="sft-1", teacher="big", measured=cost(0.001)
    )
    write_evaluation(runs, "evaluate-c", right, minute=2, model="big", measured=cost(0.021))
    write_run(runs, "rollouts-a", result={"cost_usd": 3.0})
    text = text_of(written())
    assert "a task: 0.5 s (2 s from prompt to answer), $0.001, 300 tokens" in text
    assert "Per task, sft-1 takes 0.5 s (2 s from prompt to answer) and $0.001, big 0.5 s" in text
    assert "and $0.021; after 150 tasks the student has paid back all costs so far" in text
    name = "final: SFT + on-policy at two temperatures, evaluated once more on all prompts"
    write_evaluation(
        runs, "evaluate-d", right, minute=3, model="sft-1", teacher="big", name=name,
        measured=cost(0.001),
    )  # fmt: skip
    assert f"Per task, {name[:59]}… takes 0.5 s" in text_of(written())
    (runs.parent / "prices.yml").write_text("- no mapping\n", encoding="utf-8")
    assert "Per task, " not in text_of(written())


def test_headline_compares_best_student_with_first_and_teacher(runs: Path, written: Write) -> None:
    write_training(
        runs, f"distill-{SUFFIX}", [{"teacher_kl": 0.5}], minute=1, teacher="big-teacher"
    )
    evaluate(runs, "big-teacher", set(range(30)), minute=0)
    evaluate(runs, "base", set(range(6)), minute=2)
    evaluate(runs, f"distill-{SUFFIX}", set(range(24)), minute=3, teacher="big-teacher")
    text = text_of(written())
    assert "distill-abcdef answers 80.0 % of 30 tasks correctly, base 20.0 %: 60.0 points more" in (
        text
    )
    assert "the teacher, big-teacher , answers 100.0 %." in text
    assert "Gap to the teacher closed 75.0 %" in text
    assert "Wrong before, right after" in text
    assert "Before base" in text
    assert "After distill-abcdef" in text


def test_headline_does_not_claim_what_the_interval_leaves_open(runs: Path, written: Write) -> None:
    evaluate(runs, "base", set(range(10)), minute=0)
    evaluate(runs, "student", set(range(11)), minute=1)
    assert "which may be chance" in text_of(written())


def test_headline_says_when_nothing_beats_the_first(runs: Path, written: Write) -> None:
    evaluate(runs, "base", set(range(20)), minute=0)
    evaluate(runs, "worse", set(range(5)), minute=1)
    evaluate(runs, "bad", set(range(9)), minute=2)
    text = text_of(written())
    assert "base is not beaten: it answers 66.7 % of 30 tasks correctly; bad , the best of 2," in (
        text
    )


def test_a_trial_on_a_few_prompts_is_not_what_the_headline_compares_with(
    runs: Path, written: Write
) -> None:
    rows = [answer(i, is_right=True) for i in range(4)]
    write_evaluation(runs, "evaluate-trial", rows, minute=0, model="base", name="trial")
    evaluate(runs, "base", set(range(6)), minute=1)
    evaluate(runs, "student", set(range(24)), minute=2)
    text = text_of(written())
    assert "student answers 80.0 % of 30 tasks correctly, base 20.0 %" in text


def test_distance_to_the_teacher_is_shown_with_its_interval(runs: Path, written: Write) -> None:
    for minute, value in enumerate((0.262, 0.03)):
        estimate = Estimate(value=value, low=value / 2, high=value * 2, n=90)
        evaluate(runs, f"m{minute}", {1}, minute=minute, teacher="big", teacher_kl=estimate)
    text = text_of(written())
    assert "0.262 → 0.03 nats per token, to big; lower is closer" in text
    assert "0.03 0.015 to 0.06" in text


def test_without_a_student_the_first_model_is_compared_with_the_teacher(
    runs: Path, written: Write
) -> None:
    folder = write_run(runs, "rollouts-a", minute=0)
    request = {"kind": "rollouts", "workspace": str(runs.parent), "request": {"model": "big-api"}}
    write_json(folder / "request.json", request)
    evaluate(runs, "big-api", set(range(30)), minute=1)
    evaluate(runs, "base", set(range(6)), minute=2)
    text = text_of(written())
    assert "big-api answers 100.0 % of 30 tasks correctly, base 20.0 %" in text
    assert "24 were wrong before and right with the teacher" in text
    assert "Teacher big-api" in text


def test_an_evaluation_that_shares_few_tasks_is_not_the_best(runs: Path, written: Write) -> None:
    evaluate(runs, "base", set(), minute=0)
    evaluate(runs, "student", set(range(20)), minute=1)
    # Reworded prompts, three of which are as they were.
    rows = [answer(i, is_right=True) for i in (0, 1, 2, *range(50, 77))]
    write_evaluation(runs, "evaluate-reworded", rows, minute=2, model="student", name="reworded")
    assert "student answers 66.7 % of 30 tasks correctly, base 0.0 %" in text_of(written())


def test_evaluations_of_other_tasks_are_not_compared(runs: Path, written: Write) -> None:
    evaluate(runs, "base", {0}, minute=0, total=4)
    rows = [answer(i, is_right=True) for i in range(50, 54)]
    write_evaluation(runs, "evaluate-other", rows, minute=1, model="other")
    text = text_of(written())
    assert "no other evaluation has the same tasks." in text
    assert "no other evaluation shares two tasks with the first." in text


def test_model_output_names_and_settings_never_become_markup(runs: Path, written: Write) -> None:
    metadata = {"expected_answer": ATTACK, "task_type": ATTACK, "difficulty": ATTACK}
    for minute, name in enumerate(("base", ATTACK)):
        rows = [answer(i, is_right=bool(minute), said=ATTACK, **metadata) for i in range(4)]
        write_evaluation(runs, f"evaluate-{minute}", rows, minute=minute, model=name, data=ATTACK)
    folder = write_training(runs, f"sft-{SUFFIX}", [{"loss": 1.0}], minute=3)
    write_json(folder / "config.json", {"model": {"path": ATTACK}, "data": {ATTACK: ATTACK}})
    error = {"problem": ATTACK, "fix": ATTACK}
    write_run(runs, "dpo-failed", minute=4, status="failed", error=error)
    (runs / "<b>broken" / "x").mkdir(parents=True)
    page = parse(written())
    assert not {"script", "img", "b-broken"} & set(page.tags)
    assert not [name for name, _ in page.attributes if name.startswith("on") or name == "src"]
    assert ATTACK in page.texts


def test_page_asks_for_nothing_but_itself(runs: Path, written: Write) -> None:
    evaluate(runs, "base", {1}, minute=0)
    html = written().read_text(encoding="utf-8")
    page = parse(written())
    links = [value for name, value in page.attributes if name in ("src", "href")]
    assert all(link.startswith(("#", "data:")) for link in links)
    assert not re.search(r"https?://|url\(|@import", html)
    assert "default-src 'none'" in html


def test_broken_folders_are_listed_and_the_rest_is_shown(runs: Path, written: Write) -> None:
    evaluate(runs, "base", {1}, minute=0)
    (runs / "sft-half").mkdir()
    (runs / "dpo-torn").mkdir()
    (runs / "dpo-torn" / "run.json").write_text('{"kind": "dp', encoding="utf-8")
    write_run(runs, "evaluate-lost", minute=2)
    (evaluate(runs, "torn", {2}, minute=3) / "evaluation.json").write_bytes(b"\xff\x00")
    text = text_of(written())
    assert "sft-half/run.json is missing" in text
    assert "dpo-torn/run.json Input data was truncated" in text
    assert "evaluate-lost/evaluation.json is missing" in text
    assert "evaluate-torn/evaluation.json" in text
    assert "base answers" in text


def test_torn_lines_of_events_and_rollouts_are_passed_over(runs: Path, written: Write) -> None:
    folder = write_training(runs, f"sft-{SUFFIX}", [{"loss": 2.0}, {"loss": 1.0}], status="running")
    with (folder / "events.jsonl").open("a", encoding="utf-8") as stream:
        stream.write('{"event": "note", "text": "saved"}\n{"event": "metr')
    for minute, name in enumerate(("base", "student"), start=1):
        path = evaluate(runs, name, {0} if minute == 1 else {0, 1, 2}, minute=minute)
        with (path / "rollouts.jsonl").open("a", encoding="utf-8") as stream:
            stream.write('{"task_id": "ta')
    text = text_of(written())
    assert "2 → 1" in text
    assert "student says 1" in text


def test_missing_conversations_are_said_to_be_missing(runs: Path, written: Write) -> None:
    evaluate(runs, "base", set(), minute=0)
    (evaluate(runs, "student", {1, 2}, minute=1) / "rollouts.jsonl").unlink()
    assert "The conversations are no longer in the run folders." in text_of(written())


def test_values_that_are_not_finite_are_left_out_and_counted(runs: Path, written: Write) -> None:
    metrics = [{"loss": 1.0}, {"loss": None}, {"loss": 0.5, "val_loss": 0.7}]
    write_training(runs, f"sft-{SUFFIX}", metrics)
    text = text_of(written())
    assert "1 → 0.5" in text
    assert "validation 0.7" in text
    assert "1 step without a finite value left out" in text


def test_evaluations_of_a_training_run_are_drawn(runs: Path, written: Write) -> None:
    metrics = [{"loss": 1.0, "eval/heldout/pass1": 0.25}, {"loss": 0.5, "eval/heldout/pass1": 0.75}]
    folder = write_training(runs, f"sft-{SUFFIX}", metrics)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["evals"] = [{"name": "heldout", "step": 1, "pass1": True, "pass4": False}]
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    text = text_of(written())
    assert "heldout: pass@1" in text
    assert "0.25 → 0.75" in text
    assert "pass@4" not in text


def test_runs_without_a_step_say_why(runs: Path, written: Write) -> None:
    write_training(runs, "sft-a", [], status="running", minute=0)
    write_training(runs, "dpo-b", [{"loss": None}], status="failed", minute=1)
    text = text_of(written())
    assert "No step has finished yet." in text
    assert "The run ended before its first step." in text


def test_failed_and_running_runs_tell_problem_fix_and_progress(runs: Path, written: Write) -> None:
    error = {"problem": "out of memory", "fix": "lower data.batch_size"}
    write_run(runs, "sft-a", minute=0, status="failed", error=error)
    progress = {"phase": "dpo", "done": 3, "total": 1200, "unit": "steps", "eta_s": None}
    write_run(runs, "dpo-b", minute=1, status="running", progress=progress)
    text = text_of(written())
    assert "out of memory Fix: lower data.batch_size" in text
    assert "3 of 1 200 steps" in text


def test_settings_of_a_run_are_shown_without_those_that_are_absent(
    runs: Path, written: Write
) -> None:
    write_training(runs, f"distill-{SUFFIX}", [{"teacher_kl": 0.5}], teacher="big")
    text = text_of(written())
    assert "trainer.learning_rate 0.0002" in text
    assert "teacher.path big" in text
    assert "model.max_length" not in text


def test_examples_come_from_different_kinds_of_tasks(runs: Path, written: Write) -> None:
    evaluate(runs, "base", {1}, minute=0)
    evaluate(runs, "student", set(range(20)) - {1}, minute=1)
    text = text_of(written())
    assert (
        "Of 30 tasks that both answered, 19 were wrong before and right after, 1 right before"
        in text
    )
    shown = re.findall(
        r"(Wrong before, right after|Right before, wrong after|Wrong in both) (.*?) [+–]? ?System",
        text,
    )
    kinds = [kind.split(" · ")[1] for change, kind in shown if change.startswith("Wrong before")]
    assert len(kinds) == 4
    assert len(set(kinds)) == 3
    assert [change for change, _ in shown][4:] == ["Right before, wrong after", "Wrong in both"]


def test_sampling_several_times_shows_a_rollout_that_fits_the_verdict(
    runs: Path, written: Write
) -> None:
    old = [answer(i, is_right=False, said="no") for i in (0, 0, 1)]
    new = [
        answer(0, is_right=False, said="unlucky"),
        *(answer(0, is_right=True, said="lucky"),) * 2,
    ]
    write_evaluation(runs, "evaluate-a", old, minute=0)
    write_evaluation(
        runs, "evaluate-b", [*new, answer(1, is_right=False)], minute=1, model="student"
    )
    text = text_of(written())
    assert "lucky" in text
    assert "unlucky" not in text
    assert "at least half of its samples" in text


@pytest.mark.thorough
def test_two_hundred_runs_make_a_page_of_bearable_size(runs: Path, written: Write) -> None:
    metrics = [{"loss": 1 / step} for step in range(1, 1000)]
    for index in range(100):
        minute = index % 60
        write_training(runs, f"sft-{index:03d}", metrics, minute=minute)
        evaluate(runs, f"student-{index:03d}", {index % 7}, minute=minute, total=8)
    path = written()
    assert path.stat().st_size < 2_000_000
    text = text_of(path)
    assert "60 older training runs are not shown." in text
    assert "76 older evaluations not shown in the table" in text
    assert all(f"sft-{index:03d}" in text for index in range(100))
