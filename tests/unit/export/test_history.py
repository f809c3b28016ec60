import json
import shutil

import pytest

from fakes.exports import trained
from fakes.lineages import Lineages
from fakes.rollout_rows import rollout_row, write_rows
from fakes.training import make_project
from stillroom.data.instruction import RemovedSystem
from stillroom.export.conversation import trained_conversation
from stillroom.export.history import History, TrainingStage, read_history
from stillroom.export.provenance import answering_models, data_steps, public_name
from stillroom.files import write_json
from stillroom.lineage import ModelRecord, now, record_file, write_manifest
from stillroom.models.resolve import RECORD, CheckpointRecord, locate_model
from stillroom.settings import Workspace
from stillroom.versions import tag_file


@pytest.fixture
def project(tmp_path):
    lineages = Lineages(tmp_path)
    lineages.write_prompts()
    path = lineages.rollouts()
    write_manifest(
        path,
        operation="generate_rollouts",
        inputs=[tmp_path / "prompts.jsonl"],
        request={"provider": "openrouter", "model": "maker/large"},
        counts={"rows": 8},
    )
    lineages.filter(min_reward=1)
    lineages.convert()
    return lineages


def steps_of(project, name="sft.jsonl"):
    return list(data_steps(project.workspace, record_file(project.root / name)))


def test_the_rows_lead_back_to_the_teacher_that_wrote_them(project):
    steps = steps_of(project)
    assert [(step.operation, step.output) for step in steps] == [
        ("convert_rollouts", "sft.jsonl"),
        ("filter_dataset", "good.jsonl"),
        ("generate_rollouts", "rollouts.jsonl"),
    ]
    assert [step.teacher for step in steps] == [None, None, "openrouter/maker/large"]
    assert steps[2].provider == "openrouter"
    assert steps[1].counts == {"read": 8, "kept": 4}


@pytest.mark.parametrize(
    ("address", "teacher", "provider"),
    [
        ("http://127.0.0.1:8000/v1", "big", "an endpoint with the API of openai"),
        ("https://openrouter.ai/api/v1", "openrouter/big", "openrouter"),
        ("https://api.openai.com/v1", "openai/big", "openai"),
    ],
)
def test_a_teacher_is_named_after_the_provider_whose_address_it_has(
    project, address, teacher, provider
):
    write_manifest(
        project.root / "rollouts.jsonl",
        operation="generate_rollouts",
        inputs=[project.root / "prompts.jsonl"],
        request={"provider": "openai", "model": "big", "base_url": address},
        counts={"rows": 8},
    )
    [*_, step] = steps_of(project)
    assert (step.teacher, step.provider) == (teacher, provider)


def test_a_model_whose_rows_were_filtered_out_is_no_teacher(project):
    root, teacher = project.root, {"provider": "litellm", "settings": {}}
    rows = [
        rollout_row(task_id=f"{n}", teacher=teacher | {"model": "ab"[n % 2]}, reward=n % 2)
        for n in range(8)
    ]
    models = [ModelRecord(role="policy", name=name, location="litellm") for name in "ab"]
    write_rows(root / "log.jsonl", rows)
    write_rows(root / "rollouts.jsonl", rows)
    write_manifest(
        root / "rollouts.jsonl",
        operation="import_rollouts",
        inputs=[root / "log.jsonl", *models],
        request={},
        counts={"kept": 8},
    )
    project.filter(min_reward=1)
    project.convert()
    used = record_file(root / "sft.jsonl")

    def teachers(answered_by):
        data = tuple(data_steps(project.workspace, used))
        stage = TrainingStage("sft", "sft-1", 1, "base", data=data, answered_by=answered_by)
        return History(None, "base", (stage,), ()).teachers

    ids = trained_conversation(project.workspace, used).rollout_ids
    assert ids == {"1-0", "3-0", "5-0", "7-0"}
    answered_by = answering_models(project.workspace, used, ids)
    assert answered_by == {"b"}
    assert teachers(answered_by) == ["b"]
    # What is no longer there says nothing; then all who may have answered are named.
    (root / "good.jsonl").unlink()
    assert answering_models(project.workspace, used, ids) is None
    assert teachers(None) == ["a", "b"]


def test_rollouts_that_were_added_to_since_still_have_their_teacher(project):
    with (project.root / "rollouts.jsonl").open("a", encoding="utf-8") as stream:
        stream.write("{}\n")
    assert steps_of(project)[-1].operation == "generate_rollouts"


def test_a_file_that_was_replaced_since_says_nothing_of_the_rows_used(project):
    used = record_file(project.root / "sft.jsonl")
    project.filter(min_reward=0, output="all.jsonl")
    project.convert("all.jsonl", include_failed=True)
    assert list(data_steps(project.workspace, used)) == []


def test_a_filter_that_keeps_everything_does_not_end_the_way_back(project):
    project.filter(min_reward=0, output="all.jsonl")
    project.convert("all.jsonl")
    assert steps_of(project)[-1].teacher == "openrouter/maker/large"


def test_a_tagged_version_still_says_how_it_was_made(project):
    file = project.root / "sft.jsonl"
    used = record_file(file)
    manifest = json.loads((project.root / "sft.jsonl.manifest.json").read_text("utf-8"))
    tag_file(project.root, file, "v1", created_at=now(), manifest=manifest)
    project.filter(min_reward=0, output="all.jsonl")
    project.convert("all.jsonl", include_failed=True)
    assert list(data_steps(project.workspace, used))[-1].teacher == "openrouter/maker/large"


def test_rows_of_ones_own_and_damaged_manifests_have_no_steps(project):
    write_rows(project.root / "mine.jsonl", [{"messages": []}])
    assert steps_of(project, "mine.jsonl") == []
    (project.root / "sft.jsonl.manifest.json").write_text("{", encoding="utf-8")
    assert steps_of(project) == []


def test_manifests_that_lead_in_a_circle_end(project):
    first, second = project.root / "a.jsonl", project.root / "b.jsonl"
    write_rows(first, [{"a": 1}])
    write_rows(second, [{"b": 1}])
    for output, source in ((first, second), (second, first)):
        write_manifest(output, operation="filter_dataset", inputs=[source], request={}, counts={})
    assert len(steps_of(project, "a.jsonl")) == 2


def test_names_in_a_card_have_no_folders_of_this_machine(tmp_path):
    workspace = Workspace(tmp_path)
    assert public_name(workspace, "Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"
    assert public_name(workspace, str(tmp_path / "models" / "mine")) == "models/mine"
    assert public_name(workspace, "/data/secret-project/base") == "base"


DPO_ROWS = [
    {
        "prompt": [{"role": "user", "content": f"Item {i}?"}],
        "chosen": [{"role": "assistant", "content": f"It costs {i}."}],
        "rejected": [{"role": "assistant", "content": "No."}],
    }
    for i in range(4)
]


def test_training_after_training_is_told_from_the_first_one_on(tmp_path, tiny_models):
    start = tiny_models.folder("llama")
    first = trained(tmp_path, start, rank=4)
    (tmp_path / "config.yml").rename(tmp_path / "sft.yml")
    second = make_project(tmp_path, "dpo", start, model={"qlora_rank": 4, "path": "run-1"},
                          data={"train_file": "pairs.jsonl"})  # fmt: skip
    second.write(DPO_ROWS, name="pairs.jsonl")
    second.train("run-2")

    found = locate_model(first.workspace, "run-2")
    history = read_history(first.workspace, found, None)

    assert [(stage.method, stage.run_id, stage.train_file) for stage in history.stages] == [
        ("sft", "run-1", "train.jsonl"),
        ("dpo", "run-2", "pairs.jsonl"),
    ]
    assert history.base is not None
    assert history.base.path == start
    assert history.base_name == start.name
    assert history.stages[0].identity is not None
    assert history.stages[0].identity.startswith("sha256 ")
    assert history.stages[1].started_from == "run-1"
    assert not history.is_synthetic

    # What is left when the first run is deleted.
    shutil.rmtree(tmp_path / "runs" / "run-1")
    rest = read_history(first.workspace, found, None)
    assert [stage.run_id for stage in rest.stages] == ["run-2"]
    assert (rest.base, rest.base_name) == (None, "run-1")


def test_checkpoints_that_name_each_other_end(tmp_path):
    workspace = Workspace(tmp_path)
    for name, base in (("a", "b"), ("b", "a")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}", encoding="utf-8")
        record = CheckpointRecord(run_id=f"run-{name}", method="sft", step=1, base_model=base)
        write_json(tmp_path / name / RECORD, record)
    history = read_history(workspace, locate_model(workspace, "a"), None)
    assert [stage.run_id for stage in history.stages] == ["run-b", "run-a"]


def test_what_a_teacher_read_and_its_student_did_not_is_on_record(tmp_path, tiny_models):
    (tmp_path / "rules.md").write_text("Add seven.", encoding="utf-8")
    folder = tiny_models.folder("llama", "chatml")
    project = make_project(
        tmp_path,
        "distill",
        folder,
        model={"system": "Be short."},
        teacher={"path": str(folder), "system": "Be a clerk.", "context_file": "rules.md"},
        rollout={"max_tokens": 4},
    )
    project.write([{"prompt": f"Item {i}?"} for i in range(4)])
    project.train()

    checkpoint = locate_model(project.workspace, "run-1")
    (stage,) = read_history(project.workspace, checkpoint, None).stages

    digest = record_file(tmp_path / "rules.md").sha256[:16]
    assert stage.instruction == (
        f"the system message 'Be a clerk.' and the text of rules.md (sha256 {digest})"
    )
    assert stage.conversation.system == "Be short."


def test_rows_keep_what_was_removed_from_them(project):
    project.convert(output="plain.jsonl", system="Be short.")
    (project.root / "plain.jsonl.manifest.json").unlink()

    conversation = trained_conversation(
        project.workspace, record_file(project.root / "plain.jsonl")
    )

    assert conversation.systems == {"Be short.": 4}
    assert not conversation.removed
    rows = [
        json.loads(line)
        for line in (project.root / "plain.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    said = {"sha256": "0" * 16, "begins": "Add seven."}
    path = write_rows(
        project.root / "said.jsonl", [{**row, "removed_system": said} for row in rows]
    )
    (removed,) = trained_conversation(project.workspace, record_file(path)).removed.items()
    assert removed == (RemovedSystem("0" * 16, "Add seven."), 4)
    # A field of the user's own is no such record.
    path = write_rows(project.root / "own.jsonl", [{**row, "removed_system": 3} for row in rows])
    assert not trained_conversation(project.workspace, record_file(path)).removed
