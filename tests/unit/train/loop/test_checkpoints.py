import json

import pytest

from fakes.training import make_student
from stillroom.errors import ModelError, RunError
from stillroom.models.load import LoadedModel
from stillroom.models.resolve import locate_model
from stillroom.settings import Workspace
from stillroom.train.loop.checkpoints import save_checkpoint
from stillroom.train.student.model import Student


class FullDisk:
    """A tokenizer that cannot be written any more."""

    def save_pretrained(self, folder):
        (folder / "tokenizer.json").write_text("{", encoding="utf-8")
        raise OSError(28, "No space left on device")


@pytest.fixture
def student(tiny_models):
    return make_student(tiny_models, tiny_models.folder("llama", "chatml"), rank=2)


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "runs" / "run-1"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text("{}", encoding="utf-8")
    return folder


def without_space(student):
    loaded = student.loaded
    broken = LoadedModel(loaded.location, loaded.model, FullDisk(), loaded.stop_ids)
    return Student(broken, student.head, student.base, student.is_adapter)


def test_a_checkpoint_that_could_not_be_written_whole_is_not_there(student, run, tmp_path):
    with pytest.raises(RunError, match="No space left"):
        save_checkpoint(run, without_space(student), method="sft", step=5, is_final=True)

    assert list((run / "checkpoints").iterdir()) == []
    with pytest.raises(ModelError, match=r"has no final checkpoint\n"):
        locate_model(Workspace(tmp_path), "run-1")


def test_what_a_failed_write_left_behind_does_not_get_into_the_next_one(student, run):
    with pytest.raises(RunError, match="No space left"):
        save_checkpoint(run, without_space(student), method="sft", step=5, is_final=False)
    # As a process that was killed leaves it.
    partial = run / "checkpoints" / ".step_000005.partial"
    partial.mkdir()
    (partial / "rubbish").write_text("", encoding="utf-8")

    folder = save_checkpoint(run, student, method="sft", step=5, is_final=False)

    assert folder == run / "checkpoints" / "step_000005"
    assert not (folder / "rubbish").exists()
    assert [entry.name for entry in (run / "checkpoints").iterdir()] == ["step_000005"]
    assert json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
