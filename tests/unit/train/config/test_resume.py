"""A run that ended early goes on from its last checkpoint as if it had never stopped."""

import json

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from fakes.conversations import answer, user
from fakes.killed_runs import (
    DyingReporter,
    KilledError,
    assert_resumes_exactly,
    assert_same_weights,
    killed,
    measured,
)
from fakes.reporters import KeptReporter
from fakes.started_runs import ended
from fakes.training import make_project, write_run_files
from stillroom import api
from stillroom.errors import InputError, RunError
from stillroom.lineage import FileRecord
from stillroom.run_folder import RunFolder, create_run
from stillroom.train.config.request import StartTraining, resolve_resume
from stillroom.train.config.resume import (
    RunInputs,
    check_unchanged,
    find_resume_point,
)
from stillroom.types import RunKind, RunStatus

SFT_ROWS = [{"messages": [user(f"Item {i}?"), answer(f"It costs {i}.")]} for i in range(10)]
DPO_ROWS = [
    {
        "prompt": [user(f"Item {i}?")],
        "chosen": [answer(f"It costs {i}.")],
        "rejected": [answer("No.")],
    }
    for i in range(8)
]
PROMPTS = [{"prompt": f"Item {i}?"} for i in range(6)]
DROPOUT = {"attention_dropout": 0.3}


def project_of(method, root, tiny_models, rank=0):
    if method == "distill":
        start = tiny_models.folder("llama", "clerk")
        project = make_project(
            root,
            "distill",
            start,
            teacher={"path": str(tiny_models.folder("llama", "clerk", seed=1))},
            data={"batch_size": 2, "group_size": 2},
            algorithm={"substeps": 2},
            rollout={"max_tokens": 12},
        )
        project.write(PROMPTS)
        project.config["trainer"]["num_epochs"] = 2
    else:
        # With dropout the random numbers must go on as they were, too.
        start = tiny_models.folder("llama", "chatml", **DROPOUT)
        project = make_project(root, method, start, data={"batch_size": 2})
        project.write(SFT_ROWS if method == "sft" else DPO_ROWS)
        project.config["trainer"]["num_epochs"] = 2
    project.config["model"]["qlora_rank"] = rank
    project.config["trainer"]["save_step"] = 2
    return project


@pytest.mark.parametrize(
    ("method", "rank", "quantization"),
    [
        ("sft", 0, None),
        ("sft", 4, "nf4"),
        ("dpo", 4, None),
        ("distill", 0, None),
    ],
)
def test_a_resumed_run_is_the_unbroken_one_bit_for_bit(
    tmp_path, tiny_models, method, rank, quantization
):
    project = project_of(method, tmp_path, tiny_models, rank)
    project.config["model"]["quantization"] = quantization

    assert_resumes_exactly(project, {"sft": 6, "dpo": 5, "distill": 4}[method], save_step=2)


def test_a_run_that_was_resumed_goes_on_again(tmp_path, tiny_models):
    project = project_of("sft", tmp_path, tiny_models)
    project.train("whole")
    killed(project, "first", 3)
    project.reporter = DyingReporter(4)
    with pytest.raises(KilledError):
        project.train("second", resume="first")
    project.reporter = KeptReporter()

    # The second run never got to a checkpoint, so the first one's is taken.
    assert find_resume_point(project.workspace, "second").run_id == "first"
    project.train("third", resume="second")

    assert_same_weights(project, "third", "whole")


@pytest.mark.usefixtures("warm_python")
def test_a_run_that_was_resumed_already_is_resumed_again_only_knowingly(tmp_path, tiny_models):
    project = project_of("sft", tmp_path, tiny_models)
    killed(project, "sft-1", 3)
    project.write_config()
    request = api.StartTraining(resume="sft-1")
    first = create_run(project.workspace, RunKind.SFT, request.model_dump(mode="json"))

    lock = first.owner_lock()
    assert lock.try_acquire()
    with pytest.raises(RunError, match=f"already being continued by {first.run_id}") as caught:
        api.start_training(project.workspace, request)
    lock.release()
    assert f"get_run(run_id={first.run_id})" in caught.value.fix

    first.write(msgspec.structs.replace(first.read(), status=RunStatus.FAILED))
    again = api.start_training(project.workspace, request)
    assert ended(project, again.run_id).status == "succeeded"
    assert any(f"was resumed before by {first.run_id} (failed)" in note for note in again.notes)


def test_the_curves_of_a_resumed_run_are_whole(tmp_path, tiny_models):
    project = project_of("sft", tmp_path, tiny_models)
    killed(project, "killed", 5)
    events = tmp_path / "runs" / "killed" / "events.jsonl"
    lines = ['{"time":"t","event":"note","text":"x"}']
    for step in range(1, 6):
        event = {"event": "metrics", "step": step, "values": {"loss": step + 0.5, "kl": None}}
        lines.append(json.dumps(event))
    lines.append('{"event":"metr')
    events.write_text("\n".join(lines), encoding="utf-8")
    point = find_resume_point(project.workspace, "killed")
    assert [step for step, _ in point.recorded_metrics()] == [1, 2, 3, 4, 5]
    project.reporter = KeptReporter()

    project.train("resumed", resume="killed")

    reported = project.reporter.measured
    assert [m["loss"] for m in reported[:4]] == [1.5, 2.5, 3.5, 4.5]
    assert len(reported) == 10
    assert "resumes at step 4 of killed" in project.reporter.notes


def test_another_configuration_is_refused_with_the_difference(tmp_path, tiny_models):
    project = project_of("sft", tmp_path, tiny_models)
    killed(project, "killed", 3)
    project.config["trainer"]["learning_rate"] = 2e-3

    with pytest.raises(RunError, match="cannot be resumed") as caught:
        project.train("resumed", resume="killed")

    assert "trainer.learning_rate was 0.001 and is 0.002" in caught.value.problem


def test_other_rows_are_refused(tmp_path, tiny_models):
    project = project_of("sft", tmp_path, tiny_models)
    killed(project, "killed", 3)
    project.write(SFT_ROWS[::-1])

    with pytest.raises(RunError, match=r"train\.jsonl differs \(SHA-256 "):
        project.train("resumed", resume="killed")


def test_another_chat_template_is_refused(tmp_path, tiny_models):
    folder = tmp_path / "start"
    start = tiny_models.folder("llama", "chatml")
    folder.mkdir()
    for file in start.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    project = make_project(tmp_path, "sft", folder, trainer={"save_step": 1})
    project.write(SFT_ROWS)
    killed(project, "killed", 2)
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text(encoding="utf-8") + " ", encoding="utf-8")

    with pytest.raises(RunError, match="chat template"):
        project.train("resumed", resume="killed")


def test_how_a_run_is_kept_may_change_when_it_goes_on(tmp_path, tiny_models):
    project = project_of("sft", tmp_path, tiny_models)
    killed(project, "killed", 3)
    project.reporter = KeptReporter()

    project.train("resumed", "trainer.save_step=1", "trainer.keep_checkpoints=1", resume="killed")

    assert project.checkpoints("resumed") == ["final", "step_000009"]


def test_what_was_asked_is_taken_from_the_run(tmp_path, tiny_models):
    project = project_of("sft", tmp_path, tiny_models)
    project.reporter = DyingReporter(3)
    with pytest.raises(KilledError):
        project.train("killed", "trainer.seed=7")

    more = ("model.microbatch_tokens=60",)
    requested = resolve_resume(project.workspace, StartTraining(resume="killed", overrides=more))

    assert requested.overrides == ("trainer.seed=7", *more)
    project.reporter = KeptReporter()
    project.train("resumed", *requested.overrides, resume="killed")


def test_a_run_of_a_version_with_another_default_of_the_group_size_goes_on_with_its_own(
    tmp_path, tiny_models
):
    project = project_of("distill", tmp_path, tiny_models)
    del project.config["data"]["group_size"]
    write_run_files(tmp_path / "runs" / "killed", StartTraining(), RunStatus.INTERRUPTED)
    killed(project, "killed", 3)
    state_file = project.checkpoint("step_000002", "killed") / "training_state.json"
    state = json.loads(state_file.read_text())
    assert state["asked"]["config"]["data"]["group_size"] == 1
    state["asked"]["config"]["data"]["group_size"] = 4
    state_file.write_text(json.dumps(state))

    requested = resolve_resume(project.workspace, StartTraining(resume="killed"))
    assert requested.overrides == ("data.group_size=4",)
    project.reporter = KeptReporter()
    project.train("resumed", *requested.overrides, resume="killed")

    # What is given counts: the change is then named and refused, as any other.
    other = StartTraining(resume="killed", overrides=("data.group_size=2",))
    assert resolve_resume(project.workspace, other).overrides == ("data.group_size=2",)


def test_a_key_that_an_earlier_version_did_not_know_had_its_default_then():
    def inputs(**teacher):
        config = {"dataset_type": "distill", "teacher": {"path": "t", **teacher}}
        return RunInputs(config=config, files=[], models=[])

    before = inputs()
    check_unchanged(before, inputs(tokens="same", concurrency=16), run_id="r")
    with pytest.raises(RunError, match=r"teacher\.tokens was 'same' and is 'reread'"):
        check_unchanged(before, inputs(tokens="reread"), run_id="r")


@pytest.mark.parametrize("before", [{}, {"soft_targets": None}])
def test_a_section_that_a_run_began_without_is_no_default(before):
    # An sft config's teacher was ignored by versions that did not know soft targets.
    soft = {"soft_targets": {"loss": "forward_kl", "temperature": 4.0}}

    old, new = (
        RunInputs(config={"dataset_type": "sft", **config}, files=[], models=[])
        for config in (before, soft)
    )
    with pytest.raises(RunError, match=r"soft_targets\.loss was None and is 'forward_kl'"):
        check_unchanged(old, new, run_id="run-1")


def test_another_module_of_the_users_code_is_refused():
    def inputs(**modules):
        return RunInputs(config={"dataset_type": "sft"}, files=[], models=[], modules=modules)

    before = inputs(prices="a" * 64, shop="b" * 64)
    check_unchanged(before, before, run_id="r")
    # A checkpoint of a version that did not record them.
    check_unchanged(inputs(), before, run_id="r")
    with pytest.raises(RunError, match=r"prices differs .* → c{12}\); shop is gone"):
        check_unchanged(before, inputs(prices="c" * 64), run_id="r")


def test_what_cannot_go_on_is_refused_with_what_to_do(tmp_path, tiny_models):
    project = project_of("sft", tmp_path, tiny_models)
    project.train("done")
    write_run_files(tmp_path / "runs" / "done", StartTraining(), RunStatus.SUCCEEDED)
    killed(project, "early", 1)

    for run_id, error, reported in (
        ("done", RunError, "is finished"),
        ("early", RunError, "has no checkpoint to resume from"),
        ("nothing", InputError, "there is no run 'nothing'"),
        ("../done", InputError, "there is no run"),
    ):
        with pytest.raises(error, match=reported):
            resolve_resume(project.workspace, StartTraining(resume=run_id))


def test_a_damaged_checkpoint_names_itself(tmp_path, tiny_models):
    project = project_of("sft", tmp_path, tiny_models)
    killed(project, "killed", 3)
    tensors = project.checkpoint("step_000002", "killed") / "training_state.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-100])

    with pytest.raises(Exception, match="step_000002 cannot be read"):
        project.train("resumed", resume="killed")


# One pair in three says the opposite of the others, so what is learnt stops to hold.
TURNED_PAIRS = [
    {
        "prompt": [user(f"Item {i}?")],
        "chosen": [answer(f"It costs {i}." if i % 3 else "No.")],
        "rejected": [answer("No." if i % 3 else f"It costs {i}.")],
    }
    for i in range(10)
]


def early_project(tmp_path, tiny_models, rate, method="sft"):
    project = make_project(
        tmp_path,
        method,
        tiny_models.folder("llama", "chatml"),
        data={"batch_size": 4, "val_split": 0.2},
        trainer={"num_epochs": 8, "learning_rate": rate, "early_stop": 1},
    )
    project.write(SFT_ROWS if method == "sft" else TURNED_PAIRS)
    return project


def test_a_run_ends_early_with_the_weights_that_did_best_on_the_held_out_rows(
    tmp_path, tiny_models
):
    project = early_project(tmp_path, tiny_models, rate=0.3)

    result = project.train()

    losses = [m["val_loss"] for m in project.reporter.measured if "val_loss" in m]
    best = min(range(len(losses)), key=losses.__getitem__)
    assert len(losses) == best + 2 < 8
    assert (result.kept_step, result.steps) == ((best + 1) * 2, (best + 2) * 2)
    assert (
        f"early stopping: val_loss was lowest at step {result.kept_step}" in project.reporter.notes
    )
    kept = load_file(project.checkpoint(f"step_{result.kept_step:06d}") / "model.safetensors")
    final = load_file(project.checkpoint() / "model.safetensors")
    assert all(torch.equal(kept[name], final[name]) for name in kept)
    assert not (project.checkpoint() / "training_state.json").exists()


@pytest.mark.parametrize("method", ["sft", "dpo"])
def test_early_stopping_goes_on_over_a_kill(tmp_path, tiny_models, method):
    project = early_project(tmp_path, tiny_models, 0.3, method)
    project.config["trainer"]["save_step"] = 1
    project.config["trainer"]["keep_checkpoints"] = 1

    # Which step is the best one depends on the machine's rounding.
    whole, _ = assert_resumes_exactly(project, lambda whole: whole.kept_step + 1)

    assert whole.kept_step < whole.steps < 16


def test_the_best_checkpoint_in_a_resumed_run_hides_no_newer_one(tmp_path, tiny_models):
    project = early_project(tmp_path, tiny_models, rate=0.3)
    project.config["trainer"]["save_step"] = 1
    best = project.train("whole").kept_step
    killed(project, "first", best + 2)
    project.reporter = DyingReporter(best + 2)
    with pytest.raises(KilledError):
        project.train("second", resume="first")
    assert project.checkpoints("second") == [f"step_{best:06d}"]

    project.reporter = KeptReporter()
    point = find_resume_point(project.workspace, "second")
    assert (point.run_id, point.state.step) == ("first", best + 1)
    project.train("third", resume="second")
    assert_same_weights(project, "third", "whole")


def test_a_change_in_either_of_two_files_of_one_name_is_seen():
    def inputs(first, second):
        files = [
            FileRecord(path=f"/projects/{folder}/train.jsonl", sha256=sha256, num_bytes=1)
            for folder, sha256 in (("a", first), ("b", second))
        ]
        return RunInputs(config={"dataset_type": "sft"}, files=files, models=[])

    check_unchanged(inputs("1", "2"), inputs("1", "2"), run_id="run")
    with pytest.raises(RunError, match=r"changed: train\.jsonl differs"):
        check_unchanged(inputs("1", "2"), inputs("3", "2"), run_id="run")
    with pytest.raises(RunError, match=r"changed: train\.jsonl \(2\) differs"):
        check_unchanged(inputs("1", "2"), inputs("1", "3"), run_id="run")


def limited(project, run, minutes, **options):
    """Trains with a limit on a clock on which each step takes a minute, and loading none."""
    project.config["trainer"]["max_minutes"] = minutes
    project.reporter = reporter = KeptReporter()
    project.clock = lambda: 60.0 * len(reporter.measured)
    return project.train(run, **options)


@pytest.mark.parametrize(("method", "steps"), [("sft", 10), ("dpo", 8), ("distill", 6)])
def test_a_run_ends_at_its_time_limit_with_a_whole_checkpoint_and_is_resumed_exactly(
    tmp_path, tiny_models, method, steps
):
    project = project_of(method, tmp_path, tiny_models)
    # Another schedule would fall with the time.
    project.config["trainer"] |= {"save_step": -1, "schedule": "constant"}
    project.train("whole")
    unbroken = measured(project)

    ended_early = limited(project, "limited", 2.5)

    assert (ended_early.steps, ended_early.planned_steps, ended_early.kept_step) == (3, steps, 3)
    assert ended_early.stopped_by == "trainer.max_minutes"
    # The steps would take a minute each, and the limit ends them.
    assert project.reporter.etas == [60 * 1.5, 60 * 0.5, 0]
    assert project.reporter.progressed[-1] == (3, steps)
    [note] = [note for note in project.reporter.notes if "time limit" in note]
    assert note.startswith(f"stopped at its time limit after step 3 of {steps} (trainer.max_minute")
    assert project.checkpoints("limited") == ["final", "step_000003"]
    reference = load_file(project.checkpoint("step_000003", "limited") / "model.safetensors")
    final = load_file(project.checkpoint("final", "limited") / "model.safetensors")
    assert all(torch.equal(final[name], reference[name]) for name in reference)

    # Its minutes are counted anew, so that it may take the rest with more of them.
    rest = limited(project, "rest", steps, resume="limited")

    assert (rest.steps, rest.planned_steps, rest.stopped_by) == (steps, steps, None)
    assert measured(project) == unbroken[3:]
    assert_same_weights(project, "rest", "whole")


def test_the_learning_rate_falls_with_the_time_if_that_suffices_for_fewer_steps(
    tmp_path, tiny_models
):
    project = project_of("sft", tmp_path, tiny_models)
    project.config["trainer"]["learning_rate"] = 1e-3

    limited(project, "limited", 4)
    rates = [one["learning_rate"] / 1e-3 for one in project.reporter.measured]
    assert rates == pytest.approx([1 - 0.9 * step / 4 for step in range(4)])

    # Of ten minutes, four are used.
    limited(project, "rest", 6, resume="limited")
    rates = [one["learning_rate"] / 1e-3 for one in project.reporter.measured]
    assert rates == pytest.approx([1 - 0.9 * step / 10 for step in range(4, 10)])


def test_after_a_resume_the_time_of_an_earlier_phase_does_not_count_for_the_learning_rate(
    tmp_path, tiny_models
):
    project = project_of("distill", tmp_path, tiny_models)
    project.write(SFT_ROWS, name="cold.jsonl")
    project.config["cold_start"] = {"train_file": "cold.jsonl"}
    project.config["trainer"]["learning_rate"] = 1e-3
    cold_start, on_policy = 5, 3
    limited(project, "limited", cold_start + on_policy)

    limited(project, "rest", 2, resume="limited")

    # Of five minutes since the first rollouts, three are used.
    assert project.reporter.measured[0]["learning_rate"] / 1e-3 == pytest.approx(1 - 0.9 * 3 / 5)


def test_a_time_limit_that_a_run_does_not_reach_does_not_change_it(tmp_path, tiny_models):
    project = project_of("sft", tmp_path, tiny_models)
    project.train("whole")
    unlimited = measured(project)

    limited(project, "limited", 20)

    assert measured(project) == unlimited
    assert_same_weights(project, "limited", "whole")


def test_a_run_that_takes_its_last_step_at_its_time_limit_is_whole(tmp_path, tiny_models):
    project = project_of("sft", tmp_path, tiny_models)

    result = limited(project, "limited", 10)

    assert (result.steps, result.planned_steps, result.stopped_by) == (10, 10, None)
    assert not any("time limit" in note for note in project.reporter.notes)


def test_a_cold_start_that_reaches_the_time_limit_is_not_followed_by_rollouts(
    tmp_path, tiny_models
):
    project = project_of("distill", tmp_path, tiny_models)
    project.write(SFT_ROWS, name="cold.jsonl")
    project.config["cold_start"] = {"train_file": "cold.jsonl"}

    result = limited(project, "limited", 1.5)

    assert (result.steps, result.planned_steps, result.stopped_by) == (
        2,
        5 + 6,
        "trainer.max_minutes",
    )
    rest = limited(project, "rest", 60, resume="limited")
    assert (rest.steps, rest.stopped_by) == (11, None)


def test_only_a_finished_run_that_a_limit_ended_can_be_resumed(tmp_path, tiny_models):
    project = project_of("sft", tmp_path, tiny_models)
    limited(project, "limited", 2)
    run = RunFolder(tmp_path / "runs" / "limited")
    request = StartTraining(resume="limited", overrides=("trainer.max_minutes=60",))
    done = msgspec.structs.replace(run.read(), status=RunStatus.SUCCEEDED)

    run.write(msgspec.structs.replace(done, result={"stopped_by": "trainer.max_minutes"}))
    assert resolve_resume(project.workspace, request).overrides == request.overrides
    run.write(msgspec.structs.replace(done, result={"stopped_by": None}))
    with pytest.raises(RunError, match="is finished"):
        resolve_resume(project.workspace, request)
