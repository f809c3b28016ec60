"""A model whose layers are in several places scores as one that is in one."""

import pytest
import torch

from fakes.decoding import random_prompts
from stillroom.errors import ModelError
from stillroom.models import load
from stillroom.models.batches import TokenSequence
from stillroom.models.load import load_model
from stillroom.models.placement import input_device
from stillroom.models.resolve import ModelLocation
from stillroom.settings import Workspace
from stillroom.teachers.local_hf import LocalTeacher
from stillroom.train.config.distill_sections import TeacherSection

PLACES = {
    "model.embed_tokens": "disk",
    "model.layers.0": "cpu",
    "model.layers.1": "disk",
    "model.norm": "disk",
    "model.rotary_emb": "cpu",
    "lm_head": "disk",
}


def sequences():
    return [
        TokenSequence(ids, [i % 2 == 1 for i in range(len(ids))]) for ids in random_prompts((9, 30))
    ]


@pytest.fixture
def spread_over_disk(monkeypatch, tmp_path):
    """Layers that are fetched where they are needed, as those of another GPU's are."""
    options = {"device_map": PLACES, "offload_folder": str(tmp_path / "offload")}
    monkeypatch.setattr(load, "spread_options", lambda: options)


@pytest.mark.parametrize("architecture", ["qwen3", "gemma2"])
def test_a_spread_teacher_scores_as_a_whole_one(tiny_models, spread_over_disk, architecture):
    folder = tiny_models.folder(architecture, "chatml")
    location = ModelLocation("t", str(folder), is_local=True)
    workspace = Workspace(folder.parent)
    whole = LocalTeacher(load_model(workspace, location, precision="fp32"))

    spread = LocalTeacher(load_model(workspace, location, precision="fp32", spread=True))

    assert any(p.is_meta for p in spread.loaded.model.parameters())
    assert spread.loaded.device == torch.device("cpu")
    reported = spread.score_tokens(sequences())
    for ours, reference in zip(reported, whole.score_tokens(sequences()), strict=True):
        torch.testing.assert_close(ours, reference, atol=1e-5, rtol=0)


def test_a_model_in_one_place_takes_its_inputs_there(tiny_models):
    assert input_device(tiny_models.load("llama", "chatml").model) == torch.device("cpu")


def test_an_adapter_is_not_spread(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}", encoding="utf-8")
    location = ModelLocation("run-1", str(tmp_path), is_local=True)

    with pytest.raises(ModelError, match="'run-1' is an adapter, and only a whole model"):
        load_model(Workspace(tmp_path), location, spread=True)


def test_a_served_teacher_is_not_spread():
    with pytest.raises(ValueError, match="spread is of a teacher in this process"):
        TeacherSection(path="t", provider="vllm", spread=True)
