import pytest
import torch
from peft import LoraConfig, get_peft_model

from fakes.training import make_student
from stillroom.errors import ConfigError
from stillroom.train.config.sections import ModelSection
from stillroom.train.student.model import load_student, microbatch_tokens


@pytest.fixture
def llama(tiny_models):
    return tiny_models.folder("llama", "chatml")


def test_a_rank_trains_an_adapter_on_every_linear_layer_and_nothing_else(tiny_models, llama):
    student = make_student(tiny_models, llama, rank=4)

    assert student.is_adapter
    names = [name for name, p in student.module.named_parameters() if p.requires_grad]
    assert all("lora_" in name for name in names)
    # Two layers, seven linear maps in each, A and B.
    assert len(names) == 2 * 7 * 2
    assert student.module.peft_config["default"].lora_alpha == 8


def test_a_new_adapter_changes_nothing_yet(tiny_models, llama):
    ids = torch.arange(6)[None]

    plain = make_student(tiny_models, llama)
    adapted = make_student(tiny_models, llama, rank=4)

    assert torch.allclose(adapted.head.hidden(ids), plain.head.hidden(ids), atol=1e-6)


def test_the_same_seed_begins_with_the_same_adapter(tiny_models, llama):
    def begin(seed):
        student = make_student(tiny_models, llama, rank=4, seed=seed)
        return torch.cat([p.flatten() for p in student.trainable()])

    assert torch.equal(begin(1), begin(1))
    assert not torch.equal(begin(1), begin(2))


@pytest.fixture
def adapter(tiny_models, llama, tmp_path):
    """An adapter of rank 4 with weights that are not zero."""
    student = make_student(tiny_models, llama)
    config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    get_peft_model(student.loaded.model, config).save_pretrained(tmp_path / "adapter")
    student.loaded.tokenizer.save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


@pytest.mark.parametrize("rank", [0, 8])
def test_an_adapter_of_another_rank_is_refused(tiny_models, adapter, rank):
    with pytest.raises(ConfigError, match="LoRA adapter of rank 4") as caught:
        make_student(tiny_models, adapter, rank=rank)
    assert "model.qlora_rank: 4" in caught.value.fix


def test_microbatches_shrink_with_the_vocabulary(tiny_models, llama):
    student = make_student(tiny_models, llama)
    assert student.max_microbatch_tokens == 16384

    student.loaded.model.config.vocab_size = 150_000
    assert student.max_microbatch_tokens == 894

    student.loaded.model.config.vocab_size = 10_000_000
    assert student.max_microbatch_tokens == 512


@pytest.mark.parametrize(
    ("room", "activation_bytes", "tokens"),
    [(1e9, 1e6, 512), (5e9, 1e6, 4096), (8.1e9, 1e6, 4096), (1e12, 1e6, 32768), (-1.0, 1e6, 512)],
)
def test_microbatches_on_a_gpu_fill_its_memory(room, activation_bytes, tokens):
    assert microbatch_tokens(room, activation_bytes) == tokens


def test_only_who_asks_for_fp32_computes_in_it_on_a_gpu(tiny_models, llama):
    for precision in ("auto", "bf16", "fp32"):
        section = ModelSection(path=str(llama), qlora_rank=4, precision=precision)

        assert load_student(tiny_models.workspace, section, seed=0).precision == precision
