"""A model whose layers are in several places scores as one that is in one."""

import pytest
import torch

from fakes.decoding import random_prompts
from fakes.tiny_models import ARCHITECTURES, build_model, build_tokenizer
from stillroom.errors import ConfigError, ModelError
from stillroom.models import load
from stillroom.models.batches import TokenSequence
from stillroom.models.lm_head import HeadRunner
from stillroom.models.load import load_model
from stillroom.models.placement import (
    best_device,
    check_options,
    dtype_for,
    enable_gradient_checkpointing,
)
from stillroom.models.probe import choose_passes
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


def test_an_adapter_is_not_spread(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}", encoding="utf-8")
    location = ModelLocation("run-1", str(tmp_path), is_local=True)

    with pytest.raises(ModelError, match="spread: true does not support adapters such as 'run-1'"):
        load_model(Workspace(tmp_path), location, spread=True)


def test_a_served_teacher_is_not_spread():
    with pytest.raises(ValueError, match="spread needs a teacher in this process"):
        TeacherSection(path="t", provider="vllm", spread=True)


def test_the_number_format_follows_the_precision_and_the_device():
    assert dtype_for("auto", torch.device("cpu")) == torch.float32
    assert dtype_for("auto", torch.device("mps")) == torch.float32
    assert dtype_for("auto", torch.device("cuda")) == torch.bfloat16
    assert dtype_for("fp32", torch.device("cuda")) == torch.float32
    assert dtype_for("bf16", torch.device("cpu")) == torch.bfloat16


@pytest.mark.parametrize(
    ("has_cuda", "has_apple", "chosen"),
    [(True, True, "cuda"), (False, True, "mps"), (False, False, "cpu")],
)
def test_the_best_device_is_chosen(monkeypatch, has_cuda, has_apple, chosen):
    monkeypatch.setattr("torch.cuda.is_available", lambda: has_cuda)
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: has_apple)

    assert best_device().type == chosen


def test_bf16_on_an_apple_gpu_needs_a_system_that_has_it(monkeypatch):
    monkeypatch.setattr("torch.backends.mps.is_macos_or_newer", lambda *version: version < (14, 0))
    with pytest.raises(ConfigError, match="bf16 needs macOS 14"):
        dtype_for("bf16", torch.device("mps"))

    monkeypatch.setattr("torch.backends.mps.is_macos_or_newer", lambda *_: True)
    assert dtype_for("bf16", torch.device("mps")) == torch.bfloat16


def test_options_that_need_cuda_are_refused_by_name_on_an_apple_gpu(tiny_models, monkeypatch):
    check_options(torch.device("mps"), quantization=None, spread=False)
    check_options(torch.device("cpu"), quantization="nf4", spread=True)
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: True)
    location = tiny_models.location("llama", "chatml")

    with pytest.raises(ConfigError, match=r"Apple GPU .* does not support quantization: nf4"):
        load_model(tiny_models.workspace, location, quantization="nf4")
    with pytest.raises(ConfigError, match=r"Apple GPU .* does not support spread: true"):
        load_model(tiny_models.workspace, location, spread=True)


TOKENIZER = build_tokenizer("chatml")


class Held:
    """Counts the numbers that a forward pass keeps for its backward pass."""

    def __init__(self):
        self.numbers = 0

    def __enter__(self):
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._keep, lambda kept: kept)
        self._hooks.__enter__()
        return self

    def __exit__(self, *failure):
        self._hooks.__exit__(*failure)

    def _keep(self, tensor):
        self.numbers += tensor.numel()
        return tensor


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("is_training", [True, False])
def test_gradients_stay_and_less_is_kept(architecture, is_training):
    model = build_model(architecture, TOKENIZER).train(is_training)
    head = HeadRunner(model)
    choose_passes(head)
    rows = [list(range(5, 45)), list(range(40, 52))]
    sequences = [TokenSequence(row, [True] * len(row)) for row in rows]
    batch = head.collate(sequences)

    def gradients():
        with Held() as held:
            hidden = head.batch_hidden(batch)
        weights = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(1))
        (hidden * weights).sum().backward()
        found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        model.zero_grad(set_to_none=True)
        return held.numbers, found

    numbers, expected = gradients()
    enable_gradient_checkpointing(model)
    fewer, found = gradients()

    assert fewer < 0.3 * numbers
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        assert torch.equal(gradient, expected[name])
