"""Supervised training on a teacher's probabilities, as whole runs."""

import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from fakes.conversations import answer, user
from fakes.killed_runs import assert_resumes_exactly, killed
from fakes.model_server import FakeModelServer
from fakes.ranks import in_processes
from fakes.reporters import KeptReporter
from fakes.training import (
    gradients,
    largest_gap,
    make_project,
    make_student,
    write_run_files,
)
from stillroom.data.chat.render import ChatRenderer
from stillroom.data.formats import SftRow
from stillroom.errors import ConfigError, ModelError
from stillroom.export.history import read_history
from stillroom.lineage import read_manifest
from stillroom.models.lm_head import HeadRunner
from stillroom.models.load import load_tokenizer
from stillroom.models.resolve import identify, locate_model
from stillroom.settings import Workspace
from stillroom.teachers.local_hf import LocalTeacher
from stillroom.train.config.request import PlanTraining, StartTraining, plan_request
from stillroom.train.config.schema import SftConfig
from stillroom.train.loop.session import Session
from stillroom.train.methods.sft import accumulate_loss, encode_sft, validation_loss
from stillroom.train.on_policy import teachers
from stillroom.train.planning import plan
from stillroom.train.planning.forecast import Speed
from stillroom.train.planning.plan import plan_training
from stillroom.train.planning.trial import Trial
from stillroom.train.run import train_in_process
from stillroom.train.soft_targets import targets as soft_targets
from stillroom.train.soft_targets.targets import prepare_targets
from stillroom.types import RunStatus

ROWS = [{"messages": [user(f"Item {i}?"), answer(f"It costs {i}.")]} for i in range(10)]


@pytest.fixture
def student(tiny_models):
    return tiny_models.folder("llama", "chatml")


@pytest.fixture
def teacher(tiny_models):
    return tiny_models.folder("llama", "chatml", seed=1)


def soft(root, student, teacher, settings=None, **sections):
    teacher = teacher if isinstance(teacher, dict) else {"path": str(teacher)}
    project = make_project(
        root, "sft", student, teacher=teacher, soft_targets=settings or {}, **sections
    )
    project.write(ROWS)
    return project


def weights(project, run="run-1", name="final"):
    return load_file(project.checkpoint(name, run) / "model.safetensors")


def same(ours, theirs, tolerance=0.0):
    return all((ours[n] - theirs[n]).abs().max() <= tolerance for n in ours)


def losses(project):
    return [metrics["loss"] for metrics in project.reporter.measured]


def no_teacher(*_):
    raise AssertionError("a teacher was loaded")


def test_the_student_nears_the_teacher(tmp_path, student, teacher):
    trainer = {"num_epochs": 4, "learning_rate": 1e-2}
    project = soft(tmp_path, student, teacher, {"loss": "jsd"}, trainer=trainer)

    project.train()

    assert losses(project)[-1] < losses(project)[0] / 2


def test_a_teacher_that_is_the_student_teaches_nothing(tmp_path, student):
    project = soft(tmp_path, student, student, data={"val_split": 0.2})

    project.train()

    assert set(losses(project)) == {0.0}
    [alarm] = project.reporter.alarmed[-1]
    assert alarm.startswith("no_gradient: the gradient of the last 2 steps was zero")
    assert project.reporter.alarmed[0] == []
    assert project.reporter.measured[-1]["val_loss"] == 0.0
    assert same(weights(project), load_file(student / "model.safetensors"))


@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
@pytest.mark.parametrize("settings", [{"label_coef": 0.5}, {"top_k": 5, "label_coef": 0.5}])
def test_the_gradient_does_not_depend_on_how_it_is_formed(
    tmp_path, tiny_models, architecture, settings
):
    """By hand and by autograd, of the whole batch and of single sequences."""
    folder = tiny_models.folder(architecture, "chatml")
    config = SftConfig.model_validate(
        {
            "dataset_type": "sft",
            "teacher": {"path": str(tiny_models.folder(architecture, "chatml", seed=1))},
            "soft_targets": settings,
            "model": {"path": str(folder), "qlora_rank": 0},
            "data": {"batch_size": 4},
            "trainer": {"num_epochs": 1},
        }
    )
    one = make_student(tiny_models, folder)
    rows = [SftRow(messages=row["messages"], tools=[], metadata={}) for row in ROWS]
    sequences = encode_sft(rows, ChatRenderer(one.loaded.tokenizer), max_length=500).sequences
    targets = _ready(tmp_path, config, one, sequences)

    whole = accumulate_loss(one, sequences, targets)
    reference = gradients(one)
    other = _without_hand_gradients(make_student(tiny_models, folder))
    by_autograd = accumulate_loss(other, sequences, targets)

    assert by_autograd.loss == pytest.approx(whole.loss, rel=1e-5)
    assert largest_gap(gradients(other), reference) < 1e-5
    assert validation_loss(one, sequences, targets) == pytest.approx(whole.loss, rel=1e-5)


def _ready(root, config, student, sequences):
    """The targets as a run prepares them."""
    workspace = Workspace(root)
    record = identify(workspace, locate_model(workspace, config.teacher.path), role="teacher")
    rows_file = root / "train.jsonl"
    rows_file.write_text("{}\n")
    session = Session(config, student, root, KeptReporter(), 0.0)
    return prepare_targets(workspace, config, record, rows_file, session, sequences)


def _without_hand_gradients(student):
    """The student as one whose output head only autograd can run."""
    module = student.loaded.model
    module.set_output_embeddings(_OtherHead(module.get_output_embeddings()))
    student = replace(student, head=HeadRunner(module))
    assert student.hand_gradients is None
    return student


class _OtherHead(torch.nn.Module):
    """A head that is no plain matrix."""

    def __init__(self, head):
        super().__init__()
        self.weight = head.weight

    def forward(self, hidden):
        return torch.nn.functional.linear(hidden, self.weight)


def test_the_teacher_reads_the_rows_once_for_epochs_runs_and_smaller_k(
    tmp_path, student, teacher, monkeypatch
):
    trainer = {"num_epochs": 3}
    project = soft(tmp_path, student, teacher, {"top_k": 8}, trainer=trainer)
    reads = []
    forward = LocalTeacher.collate

    def counted(self, sequences):
        reads.append(len(sequences))
        return forward(self, sequences)

    monkeypatch.setattr(LocalTeacher, "collate", counted)
    project.train("run-1")
    assert sum(reads) == len(ROWS)

    monkeypatch.setattr(soft_targets, "load_local_teacher", no_teacher)
    monkeypatch.setattr(teachers, "load_model", no_teacher)
    project.train("run-2")
    project.train("run-3", "soft_targets.temperature=2", "soft_targets.label_coef=0.5")
    project.train("run-4", "soft_targets.top_k=3", "data.val_split=0.2")

    assert same(weights(project, "run-1"), weights(project, "run-2"))
    assert not same(weights(project, "run-1"), weights(project, "run-3"))
    [store] = (tmp_path / "teacher_probabilities").glob("*.top")
    assert any("the teacher is not loaded" in note for note in project.reporter.notes)
    assert any("bytes per position" in note for note in project.reporter.notes)
    manifest = read_manifest(project.checkpoint())
    assert str(store) in {record.path for record in manifest.inputs}
    assert {model.role for model in manifest.models} == {"student", "teacher"}
    assert {model.role for model in read_manifest(store).models} == {"teacher"}
    history = read_history(project.workspace, locate_model(project.workspace, "run-3"), None)
    assert history.is_synthetic
    [stage] = history.stages
    assert stage.teacher == str(teacher.name)
    assert stage.soft_targets == (
        "forward KL at temperature 2 over its 8 most probable tokens, and the tokens themselves "
        "with weight 0.5"
    )


def test_scoring_that_was_killed_counts_the_rows_that_it_had_scored(
    tmp_path, student, teacher, monkeypatch
):
    monkeypatch.setattr(soft_targets, "_MAX_BATCH_TOKENS", 1)
    project = soft(tmp_path, student, teacher, {"top_k": 4})
    killed(project, "killed", 4)
    project.reporter = KeptReporter()

    project.train("run-1")

    assert project.reporter.progressed[:6] == [(done, 10) for done in range(5, 11)]


def test_all_tokens_as_likeliest_teach_what_the_whole_distribution_does(tmp_path, student, teacher):
    project = soft(tmp_path, student, teacher)
    vocab = len(load_tokenizer(locate_model(project.workspace, str(student))))

    project.train("run-1")
    project.train("run-2", f"soft_targets.top_k={vocab}")

    per_run = len(losses(project)) // 2
    # The store rounds log-probabilities to sixteen bits.
    assert losses(project)[per_run:] == pytest.approx(losses(project)[:per_run], rel=1e-3)


@pytest.mark.parametrize("settings", [{}, {"top_k": 4}])
def test_a_resumed_run_ends_bit_for_bit_like_one_that_was_not_stopped(
    tmp_path, student, teacher, settings
):
    assert_resumes_exactly(soft(tmp_path, student, teacher, settings, trainer={"save_step": 1}), 3)


@pytest.mark.parametrize("settings", [{}, {"top_k": 4}])
def test_two_processes_train_what_one_does_and_the_teacher_reads_rows_once(
    tmp_path, student, teacher, settings
):
    project = soft(tmp_path, student, teacher, settings)
    project.train("alone")
    shutil.rmtree(tmp_path / "teacher_probabilities", ignore_errors=True)
    folder = tmp_path / "runs/together"
    folder.mkdir()
    request = StartTraining(config="config.yml")
    write_run_files(folder, request, RunStatus.RUNNING)
    plan = plan_request(project.workspace, request)

    def work(peers):
        reporter = KeptReporter()
        train_in_process(
            project.workspace, request, plan, folder=folder, reporter=reporter, peers=peers
        )
        return reporter.notes

    notes = in_processes(work, tmp_path / "forked")

    assert same(weights(project, "alone"), weights(project, "together"), 1e-5)
    assert sum("has scored all rows" in note for one in notes for note in one) == bool(settings)


@pytest.mark.parametrize("provider", ["vllm", "sglang"])
def test_a_served_teacher_teaches_what_it_teaches_in_this_process(
    tmp_path, student, teacher, tiny_models, provider
):
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    here = soft(tmp_path / "here", student, teacher, {"top_k": 5})
    here.train()

    with FakeModelServer(tiny_models.load("llama", "chatml", seed=1)) as server:
        section = {"path": "served", "provider": provider, "base_url": server.base_url}
        there = soft(tmp_path / "there", student, section, {"top_k": 5})
        there.train("run-1")
    # The server is gone, and nothing is asked again.
    there.train("run-2")

    assert losses(there)[:3] == pytest.approx(losses(here), rel=2e-3)
    assert losses(there)[3:] == losses(there)[:3]


def test_a_teacher_with_another_chat_template_is_refused(tmp_path, student, tiny_models):
    other = tiny_models.folder("llama", "llama3")
    for settings in ({}, {"top_k": 4}):
        with pytest.raises(ModelError, match="different"):
            soft(tmp_path, student, other, settings).train()


def test_an_sft_config_that_names_a_teacher_has_soft_targets(tmp_path, student, teacher):
    project = soft(tmp_path, student, teacher)
    del project.config["soft_targets"]
    project.train()

    recorded = (tmp_path / "runs/run-1/config.json").read_text()
    assert '"forward_kl"' in recorded
    with pytest.raises(ConfigError, match="servers do not return"):
        project.train("run-2", "teacher.provider=vllm", "teacher.path=served", "soft_targets={}")


@pytest.mark.parametrize("settings", [{}, {"top_k": 4}])
def test_a_cold_start_learns_from_the_teacher_that_is_loaded_for_the_rollouts(
    tmp_path, student, teacher, settings, monkeypatch
):
    loads = []
    load = teachers.load_model
    monkeypatch.setattr(teachers, "load_model", lambda *a, **k: loads.append(1) or load(*a, **k))
    project = make_project(
        tmp_path,
        "distill",
        student,
        teacher={"path": str(teacher)},
        cold_start={"train_file": "rows.jsonl", "num_epochs": 4, "learning_rate": 1e-2},
        soft_targets=settings,
        rollout={"max_tokens": 8},
    )
    project.write([{"prompt": f"Item {i}?"} for i in range(4)])
    project.write(ROWS, name="rows.jsonl")

    project.train()

    cold = [m["cold_start_loss"] for m in project.reporter.measured if "cold_start_loss" in m]
    assert cold[-1] < cold[0] / 2
    assert loads == [1]


def refused(tmp_path, student, message, **sections):
    project = make_project(tmp_path, sections.pop("method", "sft"), student, **sections)
    project.write(ROWS)
    with pytest.raises(ConfigError, match=message):
        project.train()


@pytest.mark.parametrize(
    ("message", "sections"),
    [
        ("needs teacher.path", {"soft_targets": {}}),
        ("sets the loss of sft", {"method": "dpo", "soft_targets": {"temperature": 2}}),
        (
            "loss of cold_start's rows",
            {"method": "distill", "teacher": {"path": "t"}, "soft_targets": {"temperature": 2}},
        ),
        (
            "leave top_k out",
            {"teacher": {"path": "t"}, "soft_targets": {"top_k": 4, "loss": "jsd"}},
        ),
        ("set it too", {"teacher": {"path": "t"}, "soft_targets": {"store": "kept"}}),
        ("cannot be a list", {"teacher": {"path": ["t", "u"]}}),
        (
            "shards the output head",
            {
                "teacher": {"path": "t"},
                "launcher": {"kind": "accelerate", "num_processes": 2, "strategy": "fsdp2"},
            },
        ),
    ],
)
def test_what_does_not_go_together_is_refused_with_a_reason(tmp_path, student, message, sections):
    refused(tmp_path, student, message, **sections)


def test_a_plan_counts_the_teacher_and_refuses_one_that_reads_text_otherwise(
    tmp_path, student, teacher, tiny_models
):
    project = soft(tmp_path, student, teacher, {"top_k": 4})
    project.write_config()

    forecast = plan_training(project.workspace, PlanTraining())
    live = plan_training(project.workspace, PlanTraining(overrides=("soft_targets.top_k=null",)))

    assert forecast.memory_parts_gb["teacher"] > 0
    assert any("scores the rows once" in note for note in forecast.notes)
    assert not any("scores the rows once" in note for note in live.notes)
    assert live.seconds is not None
    assert forecast.checks == live.checks
    other = tiny_models.folder("llama", "llama3")
    with pytest.raises(ModelError, match="different"):
        plan_training(project.workspace, PlanTraining(overrides=(f"teacher.path={other}",)))


@pytest.mark.parametrize(("val_split", "share"), [(0.0, 0.0), (0.2, 0.25), (0.5, 1.0)])
def test_a_plan_counts_the_rows_that_the_teacher_scores_for_validation(
    tmp_path, student, teacher, monkeypatch, val_split, share
):
    trial = Trial(Speed(token_s=0, step_s=1), 0.0, False, 0.0, [], teacher_s_per_token=1.0)
    monkeypatch.setattr(plan.trial, "try_steps", lambda *_: trial)
    project = soft(tmp_path, student, teacher, {"top_k": 4}, data={"val_split": val_split})
    project.write_config()

    forecast = plan_training(project.workspace, PlanTraining())

    scored_s = forecast.seconds - forecast.start_s - forecast.steps
    assert scored_s == pytest.approx(forecast.epoch_tokens * (1 + share))


SYSTEM = "Answer with twice the price that you find."


def forward_kl(student, teacher, rows, renderer):
    """The mean KL from the instructed teacher to the student at the answers' tokens, by sums."""
    total, num = 0.0, 0
    for row in rows:
        own = [{"role": "system", "content": SYSTEM}, *row["messages"]]
        logprobs = []
        for model, messages in ((teacher, own), (student, row["messages"])):
            one = renderer.conversation(messages, [])
            where = [i - 1 for i in range(1, len(one.ids)) if one.trained[i]]
            with torch.no_grad():
                logits = model(torch.tensor([one.ids])).logits[0, where]
            logprobs.append(logits.double().log_softmax(-1))
        q, p = logprobs
        total, num = total + (q.exp() * (q - p)).sum().item(), num + len(q)
    return total / num


@pytest.mark.parametrize("settings", [{}, {"top_k": 400}])
def test_the_teacher_reads_an_instruction_that_the_rows_do_not_have(
    tmp_path, tiny_models, student, settings
):
    teacher = {"path": str(student), "system": SYSTEM}
    project = soft(tmp_path, student, teacher, {"temperature": 1.0, "label_coef": 0.0, **settings})
    project.config["data"]["batch_size"] = len(ROWS)
    model = tiny_models.load("llama", "chatml")

    project.train()

    exact = forward_kl(model.model, model.model, ROWS, ChatRenderer(model.tokenizer))
    assert exact > 1e-3
    # A store holds the teacher's probabilities in half precision.
    assert losses(project)[0] == pytest.approx(exact, rel=0.02 if settings else 1e-3)


def test_another_instruction_is_read_anew(tmp_path, student, teacher):
    instructed = {"path": str(teacher), "system": SYSTEM}
    project = soft(tmp_path, student, instructed, {"top_k": 4})
    project.train("run-1")
    project.config["teacher"]["system"] = "Answer in one word."
    project.train("run-2")

    read = [note for note in project.reporter.notes if "the teacher has scored all rows" in note]
    assert len(read) == 2
    assert not same(weights(project, "run-1"), weights(project, "run-2"))


def test_rows_that_the_teacher_has_no_room_for_are_refused_by_the_plan_too(
    tmp_path, student, teacher
):
    (tmp_path / "rules.md").write_text("Rule. " * 400, encoding="utf-8")
    project = soft(tmp_path, student, {"path": str(teacher), "context_file": "rules.md"})

    with pytest.raises(
        ConfigError, match=r"with the teacher's prompt the longest row has \d+ tokens"
    ) as caught:
        project.train()
    assert "shorten teacher.context_file" in caught.value.fix
    with pytest.raises(
        ConfigError, match=r"with the teacher's prompt the longest row has \d+ tokens"
    ):
        plan_training(project.workspace, PlanTraining())
