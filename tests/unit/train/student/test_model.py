import math

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from fakes.training import make_student
from stillroom.errors import ConfigError, DivergedError
from stillroom.train.config.sections import ModelSection, TrainerSection
from stillroom.train.student.collective import Collective
from stillroom.train.student.model import (
    Optimizer,
    learning_rate_at,
    load_student,
    microbatch_tokens,
)


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


def settings(**values):
    return TrainerSection(**{"num_epochs": 1, "learning_rate": 1.0, "warmup_steps": 0, **values})


def rates(total, **values):
    return [learning_rate_at(step, total, settings(**values)) for step in range(total)]


def test_a_linear_schedule_falls_evenly_towards_a_tenth():
    assert rates(5) == pytest.approx([1.0, 0.82, 0.64, 0.46, 0.28])


def test_a_cosine_schedule_is_half_way_between_in_the_middle():
    found = rates(4, schedule="cosine")

    assert found[0] == pytest.approx(1.0)
    assert found[2] == pytest.approx(0.55)
    assert found[3] == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(0.75 * math.pi)))


def test_the_warm_up_rises_evenly_and_is_at_most_a_tenth_of_the_run():
    requested = rates(100, warmup_steps=4, schedule="constant")
    assert requested[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])

    short = rates(20, warmup_steps=10, schedule="constant")
    assert short[:3] == pytest.approx([1 / 3, 2 / 3, 1.0])


def test_the_decay_follows_the_time_where_it_is_ahead_of_the_steps():
    late = [learning_rate_at(2, 10, settings(), time_share=share) for share in (0.1, 0.2, 0.6, 1)]
    assert late == pytest.approx([0.82, 0.82, 0.46, 0.1])

    constant = settings(schedule="constant")
    assert learning_rate_at(2, 10, constant, time_share=0.9) == 1.0


@pytest.mark.parametrize("num_steps", [100, 60])
def test_the_decay_begins_after_the_warm_up_also_if_time_allows_fewer_steps(num_steps):
    warm = settings(warmup_steps=10)
    limited = [
        learning_rate_at(step, 100, warm, time_share=step / num_steps) for step in range(num_steps)
    ]

    assert limited[:11] == rates(100, warmup_steps=10)[:11]
    decay = [1 - 0.9 * step / (num_steps - 10) for step in range(num_steps - 10)]
    assert limited[10:] == pytest.approx(decay)


def parameter(*values):
    return nn.Parameter(torch.tensor(values))


def test_a_first_step_moves_every_weight_by_the_learning_rate_against_its_gradient():
    weights = parameter(1.0, 2.0)
    optimizer = Optimizer([weights], settings(learning_rate=0.1), total_steps=10)
    (weights * torch.tensor([0.5, -0.25])).sum().backward()

    info = optimizer.step()

    # Adam's first step has the size of the learning rate, whatever the gradient's.
    assert weights.tolist() == pytest.approx([0.9, 2.1], abs=1e-4)
    assert info.grad_norm == pytest.approx(math.hypot(0.5, 0.25))
    assert info.learning_rate == pytest.approx(0.1)
    assert weights.grad is None
    assert optimizer.num_steps == 1


def test_the_second_moment_is_kept_as_long_as_asked():
    weights = parameter(0.0)
    optimizer = Optimizer(
        [weights], settings(learning_rate=0.1, adam_beta2=0.5, schedule="constant"), total_steps=9
    )
    for gradient in (1.0, 0.5):
        (weights * gradient).sum().backward()
        optimizer.step()

    # m = (0.9 × 0.1 × 1 + 0.1 × 0.5) / (1 - 0.81), v = (0.5 × 0.5 × 1 + 0.5 × 0.25) / (1 - 0.25)
    second = (0.14 / 0.19) / math.sqrt(0.375 / 0.75)
    assert weights.item() == pytest.approx(-0.1 - 0.1 * second, abs=1e-6)


def test_weights_decay_towards_zero_by_their_share_of_the_rate():
    weights = parameter(2.0)
    optimizer = Optimizer([weights], settings(learning_rate=0.1, weight_decay=0.5), total_steps=9)
    (weights * 0.0).sum().backward()

    optimizer.step()

    assert weights.item() == pytest.approx(2.0 * (1 - 0.1 * 0.5))


def test_large_gradients_are_clipped_but_reported_as_they_were():
    # Weight decay aside, Adam does not see the gradient's size, so two steps are needed to tell.
    results = []
    for scale in (1.0, 1000.0):
        weights = parameter(0.0, 0.0)
        optimizer = Optimizer([weights], settings(max_grad_norm=0.5), total_steps=10)
        for factor in (scale, 1.0):
            (weights * torch.tensor([3.0, 4.0]) * factor).sum().backward()
            info = optimizer.step()
        results.append((weights.tolist(), info.grad_norm))

    assert results[0][0] == pytest.approx(results[1][0])
    assert results[0][1] == pytest.approx(5.0)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_stops_training_before_the_weights_are_harmed(bad):
    weights = parameter(1.0, 2.0)
    optimizer = Optimizer([weights], settings(), total_steps=10)
    (weights * torch.tensor([1.0, bad])).sum().backward()

    with pytest.raises(DivergedError, match=r"the gradient of step 0 is (nan|inf)") as caught:
        optimizer.step()
    assert "learning_rate" in caught.value.fix
    assert weights.tolist() == [1.0, 2.0]


def test_a_step_without_gradients_only_counts():
    weights = parameter(1.0)
    optimizer = Optimizer([weights], settings(), total_steps=2)

    info = optimizer.step()

    assert info.grad_norm == 0.0
    assert weights.tolist() == [1.0]
    assert optimizer.num_steps == 1


@pytest.mark.parametrize(("rank", "gathered"), [(0, ["0.exp_avg", "0.exp_avg_sq"]), (1, [])])
def test_only_the_first_process_keeps_a_sharded_state(monkeypatch, rank, gathered):
    weights = parameter(1.0, 2.0)
    optimizer = Optimizer([weights], settings(), total_steps=2)
    weights.sum().backward()
    optimizer.step()
    optimizer._peers = Collective(rank=rank, is_sharded=True)
    # As of a sharded tensor, unlike of the number of steps.
    monkeypatch.setattr(
        "stillroom.train.student.model.full_tensor", lambda t: t.clone() if t.dim() else t
    )

    assert sorted(optimizer.state()) == [*gathered, "0.step"]
