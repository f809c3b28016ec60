"""An adapter on a base of 4 bits a weight."""

import importlib.util

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM

from fakes.conversations import answer, user
from fakes.training import make_project, make_student
from stillroom.errors import ConfigError, MissingExtraError
from stillroom.models.load import load_model
from stillroom.models.resolve import locate_model
from stillroom.train.config.sections import ModelSection
from stillroom.train.student.model import load_student

SFT_ROWS = [{"messages": [user(f"Item {i}?"), answer(f"It costs {i}.")]} for i in range(10)]
DPO_ROWS = [
    {
        "prompt": [user(f"Item {i}?")],
        "chosen": [answer(f"It costs {i}.")],
        "rejected": [answer("No.")],
    }
    for i in range(6)
]
QLORA = {"qlora_rank": 4, "quantization": "nf4"}
IDS = torch.arange(5, 45).view(2, 20)


@pytest.fixture
def folder(tiny_models):
    return tiny_models.folder("qwen3", "chatml")


def quantised(model):
    return [name for name, p in model.named_parameters() if p.dtype == torch.uint8]


def qlora_student(tiny_models, path):
    return load_student(tiny_models.workspace, ModelSection(path=str(path), **QLORA), seed=0)


def test_the_linear_layers_are_quantised_and_only_the_adapter_is_trained(tiny_models, folder):
    student = qlora_student(tiny_models, folder)

    plain = make_student(tiny_models, folder, rank=4)
    # Seven linear layers in each of two blocks.
    assert len(quantised(student.module)) == 14
    assert sum(p.numel() for p in student.trainable()) == sum(p.numel() for p in plain.trainable())
    assert student.head.can_pack


@pytest.mark.parametrize(("method", "rows"), [("sft", SFT_ROWS), ("dpo", DPO_ROWS)])
def test_it_trains_and_the_checkpoint_is_an_adapter_of_the_base_as_it_is(
    tmp_path, folder, method, rows
):
    trainer = {"num_epochs": 6, "learning_rate": 1e-2}
    project = make_project(tmp_path, method, folder, model=QLORA, trainer=trainer)
    project.write(rows)

    project.train()

    losses = [metrics["loss"] for metrics in project.reporter.measured]
    assert losses[-1] < 0.9 * losses[0]
    reference = AutoPeftModelForCausalLM.from_pretrained(project.checkpoint()).eval()
    merged = load_model(project.workspace, locate_model(project.workspace, "run-1"))
    plain = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        assert torch.allclose(merged.model(IDS).logits, reference(IDS).logits, atol=1e-4)
        assert not torch.allclose(reference(IDS).logits, plain(IDS).logits, atol=1e-2)
        assert merged.model.generate(IDS[:1], max_new_tokens=4, do_sample=False).shape[1] > 20


def test_weights_of_four_bits_are_not_trained_themselves(tmp_path, folder):
    project = make_project(tmp_path, "sft", folder, model={"quantization": "nf4"})
    project.write(SFT_ROWS)

    with pytest.raises(ConfigError, match="quantization needs an adapter"):
        project.train()


def test_without_bitsandbytes_the_error_names_what_to_install(tiny_models, folder, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *more: None if name == "bitsandbytes" else found(name, *more),
    )

    with pytest.raises(MissingExtraError, match="qlora") as caught:
        qlora_student(tiny_models, folder)
    assert "stillroom[qlora]" in caught.value.fix
