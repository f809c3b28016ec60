import shutil
from pathlib import Path

import msgspec
import pytest

from fakes.lineages import NUM_PROMPTS, RUN, Lineages
from fakes.rollout_rows import write_lines, write_rows
from stillroom.errors import EngineError, InputError
from stillroom.lineage import record_file
from stillroom.trace.request import Lineage, LineageNode, ShowLineage
from stillroom.trace.show import MAX_INPUTS, MAX_NODES, show_lineage


@pytest.fixture
def project(tmp_path: Path) -> Lineages:
    return Lineages(tmp_path / "project")


def shown(project: Lineages, path: str, **given) -> Lineage:
    return show_lineage(project.workspace, ShowLineage(path=path, **given))


def chain(node: LineageNode) -> list[tuple[str, str]]:
    """Returns path and state along the first input with rows."""
    found = [(node.path, str(node.state))]
    for child in node.inputs:
        if child.path.endswith(".jsonl"):
            return found + chain(child)
    return found


def nodes(node: LineageNode) -> list[LineageNode]:
    return [node, *(inner for child in node.inputs for inner in nodes(child))]


CHAIN = [
    (f"runs/{RUN}/checkpoints/final", "same"),
    ("sft.jsonl", "same"),
    ("good.jsonl", "same"),
    ("rollouts.jsonl", "same"),
    ("prompts.jsonl", "same"),
]


@pytest.mark.parametrize("given", [RUN, f"runs/{RUN}", f"runs/{RUN}/checkpoints/final", "sft-ru"])
def test_a_checkpoint_leads_back_to_the_prompts(project: Lineages, given: str) -> None:
    project.all()
    lineage = shown(project, given)
    assert chain(lineage.root) == CHAIN
    assert lineage.problems == []
    made = [node.made_by for node in nodes(lineage.root) if node.path.endswith(".jsonl")]
    assert made == ["convert_rollouts", "filter_dataset", "generate_rollouts", None]
    assert lineage.root.run_id == RUN
    models = {node.role: node for node in nodes(lineage.root) if node.role}
    assert models["student"].state == "same"
    assert models["policy"].note == "served by openai"


def test_a_filter_says_what_it_was_asked_for(project: Lineages) -> None:
    project.all()
    node = shown(project, "good.jsonl").root
    assert node.options["min_reward"] == 1.0
    assert node.counts == {"read": 2 * NUM_PROMPTS, "kept": NUM_PROMPTS}
    assert "output" not in node.options


def test_an_option_of_zero_is_an_option(project: Lineages) -> None:
    project.write_prompts()
    project.rollouts()
    project.filter(min_reward=0)
    assert shown(project, "good.jsonl").root.options["min_reward"] == 0


@pytest.mark.parametrize(
    ("name", "state"),
    [
        ("prompts.jsonl", "changed"),
        ("good.jsonl", "changed"),
        ("sft.jsonl", "changed"),
        ("config.yml", "changed"),
    ],
)
def test_what_has_changed_since_is_told(project: Lineages, name: str, state: str) -> None:
    project.all()
    path = project.root / name
    path.write_bytes(path.read_bytes().replace(b"s", b"z", 1))
    lineage = shown(project, RUN)
    changed = [node.path for node in nodes(lineage.root) if node.state == state]
    assert changed == [name]
    assert len(lineage.problems) == 1
    assert lineage.problems[0].startswith(f"{name} (")


def test_what_is_missing_is_told_and_its_manifest_leads_on(project: Lineages) -> None:
    project.all()
    (project.root / "good.jsonl").unlink()
    lineage = shown(project, RUN)
    assert chain(lineage.root) == [
        (path, "missing" if path == "good.jsonl" else state) for path, state in CHAIN
    ]
    assert "good.jsonl" in lineage.problems[0]


def test_a_file_that_was_made_again_differently_ends_the_way_there(project: Lineages) -> None:
    project.all()
    project.filter(min_reward=0)
    lineage = shown(project, RUN)
    assert chain(lineage.root) == [*CHAIN[:2], ("good.jsonl", "changed")]
    node = next(n for n in nodes(lineage.root) if n.path == "good.jsonl")
    assert node.made_by is None
    assert node.note is not None
    assert "its origin is unknown" in node.note


def test_a_kept_version_leads_on_where_the_file_was_replaced(project: Lineages) -> None:
    project.all()
    assert shown(project, "good.jsonl", tag="v1.0").tagged == "good@v1.0"
    project.filter(min_reward=0)
    lineage = shown(project, RUN)
    assert chain(lineage.root)[2:] == [("good.jsonl", "changed"), *CHAIN[3:]]
    assert "tagged as good@v1.0" in lineage.problems[0]


def test_rows_that_were_added_do_not_change_those_that_were_used(project: Lineages) -> None:
    project.all()
    path = project.root / "rollouts.jsonl"
    with path.open("ab") as stream:
        stream.write(b'{"id": "later"}\n')
    lineage = shown(project, RUN)
    assert (path.name, "grown") in chain(lineage.root)
    assert lineage.problems == []
    assert shown(project, "rollouts.jsonl").root.state == "grown"


def test_a_file_edited_after_it_was_made_is_told(project: Lineages) -> None:
    project.all()
    write_lines(project.root / "sft.jsonl", [b"{}"])
    root = shown(project, "sft.jsonl").root
    assert root.state == "changed"
    assert root.note == "the content has changed since convert_rollouts wrote it"


def test_other_weights_than_the_run_wrote_are_told(project: Lineages) -> None:
    folder = project.all()
    (folder / "model.safetensors").write_bytes(b"others")
    lineage = shown(project, RUN)
    assert lineage.root.state == "changed"


def test_another_base_model_is_told(project: Lineages) -> None:
    project.all()
    (project.root / "base" / "config.json").write_text("{ }", encoding="utf-8")
    lineage = shown(project, RUN)
    assert [node.role for node in nodes(lineage.root) if node.state == "changed"] == ["student"]


def test_a_checkpoint_that_was_copied_keeps_its_lineage(project: Lineages) -> None:
    folder = project.all()
    shutil.copytree(folder, project.root / "mine")
    lineage = shown(project, "mine")
    assert chain(lineage.root)[1:] == CHAIN[1:]
    assert lineage.root.run_id == RUN


def test_a_project_that_was_moved_keeps_its_lineage(project: Lineages, tmp_path: Path) -> None:
    project.all()
    project.root.rename(tmp_path / "elsewhere")
    moved = Lineages(tmp_path / "elsewhere")
    lineage = shown(moved, RUN)
    assert chain(lineage.root) == CHAIN


def test_a_student_trained_on_what_another_one_did_leads_to_that_ones_data(
    project: Lineages,
) -> None:
    first = project.all()
    folder = project.root / "runs" / RUN
    folder.rename(project.root / "runs" / "sft-first")
    first = project.root / "runs" / "sft-first" / "checkpoints" / "final"
    project.checkpoint(base=first)
    lineage = shown(project, RUN)
    student = next(node for node in lineage.root.inputs if node.role == "student")
    assert student.made_by == "start_training"
    # Its rows are those of the run at hand, and drawn there already.
    assert [node.note for node in student.inputs if node.path == "sft.jsonl"] == ["shown above"]


def test_many_inputs_are_told_in_a_few_words_and_those_with_trouble_first(
    project: Lineages,
) -> None:
    project.write_prompts()
    project.rollouts()
    source = project.root / "rollouts.jsonl"
    for number in range(40):
        shutil.copy(source, _folder(project) / f"{number}.jsonl")
    project.convert("shards")
    (project.root / "shards" / "33.jsonl").write_bytes(b"{}\n")
    lineage = shown(project, "sft.jsonl")
    assert len(lineage.root.inputs) == MAX_INPUTS
    assert "shards/33.jsonl" in [node.path for node in lineage.root.inputs]
    assert lineage.root.more_inputs == {"same": 40 - MAX_INPUTS}
    assert len(nodes(lineage.root)) <= MAX_NODES
    assert len(msgspec.json.encode(lineage)) < 4000


def _folder(project: Lineages) -> Path:
    folder = project.root / "shards"
    folder.mkdir(exist_ok=True)
    return folder


def test_a_file_that_nothing_made_stands_alone(project: Lineages) -> None:
    project.write_prompts()
    root = shown(project, "prompts.jsonl").root
    assert (root.state, root.made_by, root.inputs) == ("same", None, [])
    assert root.sha256 == record_file(project.root / "prompts.jsonl").sha256[:12]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("nothing.jsonl", "does not exist"),
        ("sft-none", "there is no run"),
        ("base", "so its origin is unknown"),
        ("good@v9", "there is no version"),
    ],
)
def test_what_has_no_lineage_is_refused(project: Lineages, given: str, expected: str) -> None:
    project.all()
    with pytest.raises(EngineError, match=expected):
        shown(project, given)


def test_a_folder_is_not_tagged(project: Lineages) -> None:
    project.all()
    with pytest.raises(InputError, match="only files can be tagged"):
        shown(project, RUN, tag="v1")


def test_a_tagged_version_is_an_input_and_its_lineage_goes_on(project: Lineages) -> None:
    project.all()
    shown(project, "rollouts.jsonl", tag="v1")
    kept = project.rows("rollouts.jsonl")
    write_rows(project.root / "rollouts.jsonl", kept[:2])
    project.filter("rollouts@v1", "again.jsonl", min_reward=1)
    assert len(project.rows("again.jsonl")) == NUM_PROMPTS
    root = shown(project, "again.jsonl").root
    assert root.inputs[0].versions == ["rollouts@v1"]
    assert root.inputs[0].made_by == "generate_rollouts"
    assert root.inputs[0].inputs[0].path == "prompts.jsonl"
