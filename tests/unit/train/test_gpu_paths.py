"""A GPU's training steps, run on a processor, have the gradients of sequences alone in fp32."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fakes.decoding import random_prompts
from fakes.gpu_paths import train_as_on_an_apple_gpu, train_as_on_cuda
from fakes.training import gradients, largest_gap, make_student, one_by_one
from stillroom.models.batches import TokenSequence
from stillroom.teachers.local_hf import LocalTeacher
from stillroom.train.config.distill_sections import AlgorithmSection
from stillroom.train.config.sections import DpoSection
from stillroom.train.methods.dpo import TokenPair, accumulate_preference, add_reference
from stillroom.train.methods.sft import accumulate_loss
from stillroom.train.on_policy.policy_update import UpdateStats, accumulate_gradient
from stillroom.train.on_policy.training_sequences import TrainingSequence

PROMPT, *ENDS = random_prompts((40, 9, 3, 25, 14))
SEQUENCES = [
    TokenSequence([*PROMPT, *end], [False] * len(PROMPT) + [True] * len(end)) for end in ENDS
]
SAMPLED = [TrainingSequence(one, [-2.0] * one.num_trained) for one in SEQUENCES]


def supervised(student, teacher):
    return accumulate_loss(student, SEQUENCES).loss


def preferred(student, teacher):
    pairs = [TokenPair(*SEQUENCES[:2]), TokenPair(*SEQUENCES[2:])]
    referenced = add_reference(student, pairs, is_mean=False)
    # As if the student had moved away from its reference already.
    moved = [type(item)(item.pair, item.chosen - 1.0, item.rejected) for item in referenced]
    return accumulate_preference(student, moved, DpoSection()).loss


def distilled(student, teacher):
    stats = UpdateStats()
    algorithm = AlgorithmSection(loss_fn="full_reverse_kl")
    accumulate_gradient(student, {0: teacher}, SAMPLED, algorithm, stats)
    return stats.loss / stats.num_tokens


def teacher_of(models):
    return LocalTeacher(models.load("qwen3", "chatml", seed=1))


@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("step", [supervised, preferred, distilled])
def test_packs_of_one_kernel_call_train_as_sequences_alone(tiny_models, monkeypatch, step, rank):
    folder = tiny_models.folder("qwen3", "chatml")
    exact = one_by_one(make_student(tiny_models, folder, rank=rank))
    expected = step(exact, teacher_of(tiny_models)), gradients(exact)

    train_as_on_cuda(monkeypatch)
    student = make_student(tiny_models, folder, rank=rank)
    loss, found = step(student, teacher_of(tiny_models)), gradients(student)

    assert student.head.rules.kernel == "varlen"
    assert student.hand_gradients is None
    assert loss == pytest.approx(expected[0], rel=2e-3)
    assert largest_gap(found, expected[1]) < 1e-2


@pytest.mark.parametrize("step", [supervised, preferred, distilled])
def test_an_apple_gpu_packs_span_by_span_in_fp32(tiny_models, monkeypatch, step):
    folder = tiny_models.folder("qwen3", "chatml")
    exact = one_by_one(make_student(tiny_models, folder))
    expected = step(exact, teacher_of(tiny_models)), gradients(exact)

    train_as_on_an_apple_gpu(monkeypatch)
    student = make_student(tiny_models, folder)
    loss, found = step(student, teacher_of(tiny_models)), gradients(student)

    assert (student.head.rules.kernel, student.head.can_pack) == ("spans", True)
    assert student.hand_gradients is None
    assert student.compute_dtype is None
    assert loss == pytest.approx(expected[0], rel=1e-5)
    assert largest_gap(found, expected[1]) < 1e-3


class LogitRows(TorchDispatchMode):
    """Notes of how many tokens at once logits, or anything as wide as they are, are formed."""

    def __init__(self, vocab_size, hidden_size):
        super().__init__()
        self.vocab_size, self.hidden_size = vocab_size, hidden_size
        self.most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        for tensor in output if isinstance(output, list | tuple) else [output]:
            if isinstance(tensor, torch.Tensor) and tensor.shape[-1:] == (self.vocab_size,):
                rows = tensor.numel() // self.vocab_size
                # The head's own matrix may lie that way too.
                if rows != self.hidden_size:
                    self.most = max(self.most, rows)
        return output


@pytest.mark.parametrize("step", [supervised, preferred, distilled])
def test_logits_are_formed_for_a_few_tokens_at_a_time(tiny_models, monkeypatch, step):
    train_as_on_cuda(monkeypatch)
    student = make_student(tiny_models, tiny_models.folder("qwen3", "chatml"))
    head, teacher = student.head, teacher_of(tiny_models)
    monkeypatch.setattr("stillroom.models.lm_head.MAX_LOGITS", 4 * head.vocab_size)
    assert sum(one.num_trained for one in SEQUENCES) == 51

    with LogitRows(head.vocab_size, head.base.config.hidden_size) as rows:
        step(student, teacher)
        teacher.score_tokens(SEQUENCES)

    assert rows.most == 4
