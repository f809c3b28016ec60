import math
import random
from dataclasses import replace

import pytest
import torch

from fakes.decoding import random_prompts
from fakes.training import gradients, largest_gap, make_student
from stillroom.errors import DataError, TeacherError
from stillroom.models.batches import TokenSequence
from stillroom.models.lm_head import HeadRunner
from stillroom.serving.scoring import TeacherScores
from stillroom.teachers.local_hf import LocalTeacher
from stillroom.train.config.distill_sections import AlgorithmSection
from stillroom.train.config.schema import DistillConfig
from stillroom.train.on_policy.policy_update import UpdateStats, accumulate_gradient, update_student
from stillroom.train.on_policy.training_sequences import (
    TrainingSequence,
    prepare_sequences,
    special_token_ids,
)
from stillroom.train.student.model import Optimizer

KINDS = {
    "importance_sampling": AlgorithmSection(loss_fn="importance_sampling", kl_penalty_coef=0.3),
    "importance_sampling, baseline": AlgorithmSection(
        loss_fn="importance_sampling", kl_baseline="exact"
    ),
    "importance_sampling, capped": AlgorithmSection(
        loss_fn="importance_sampling", importance_cap=1.05
    ),
    "importance_sampling, rewards": AlgorithmSection(
        loss_fn="importance_sampling", reward_coef=0.5, adv_estimator="gae", gae_lambda=0.9
    ),
    "ppo": AlgorithmSection(loss_fn="ppo", kl_penalty_coef=0.3, clip_ratio=0.1),
    "ppo, all": AlgorithmSection(
        loss_fn="ppo", kl_baseline="exact", importance_cap=1.05, reward_coef=0.5
    ),
    "full_reverse_kl": AlgorithmSection(loss_fn="full_reverse_kl"),
    "full_reverse_kl, rewards": AlgorithmSection(
        loss_fn="full_reverse_kl", kl_penalty_coef=0.2, reward_coef=0.5, adv_estimator="reinforce"
    ),
    "jsd": AlgorithmSection(loss_fn="jsd", jsd_beta=0.3),
    "top_k_reverse_kl": AlgorithmSection(loss_fn="top_k_reverse_kl", top_k=3),
}
WITHOUT_REWARDS = [name for name, algorithm in KINDS.items() if algorithm.reward_coef == 0]
REWARDS = [1.0, 0.0, None, 1.0]


@pytest.fixture
def student(tiny_models):
    return make_student(tiny_models, tiny_models.folder("llama", "chatml"))


@pytest.fixture
def teacher(tiny_models):
    return LocalTeacher(tiny_models.load("llama", "chatml", seed=1))


@torch.no_grad()
def sampled_by(model, *, off_policy=0.2):
    """Rollouts of one prompt with two turns each, and a sampler that is a little off."""
    rng = random.Random(0)
    sequences = []
    for ids, reward in zip(random_prompts((12, 30, 21, 9)), REWARDS, strict=True):
        sampled = [False] * 3 + [True] * 3 + [False] * 2 + [True] * (len(ids) - 8)
        logprobs = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
        where = [i for i in range(1, len(ids)) if sampled[i]]
        said = [logprobs[i - 1, ids[i]].item() + rng.gauss(0, off_policy) for i in where]
        tokens = TokenSequence(ids, sampled)
        sequences.append(TrainingSequence(tokens, said, reward=reward, prompt="p"))
    return sequences


def exact_loss(model, teacher_model, prepared, algorithm):
    """The mean token loss by the formulas, sequence by sequence, in the models' precision."""
    losses, kls = [], []
    for sequence in prepared:
        tokens = sequence.tokens
        ids = torch.tensor([tokens.ids])
        where = [i for i in range(1, len(tokens.ids)) if tokens.trained[i]]
        before = [i - 1 for i in where]
        chosen = ids[0, where]
        p = model(ids).logits[0].softmax(-1)[before]
        with torch.no_grad():
            q = teacher_model(ids).logits[0].softmax(-1)[before]
        now = p.gather(1, chosen[:, None])[:, 0].log()
        reference = q.gather(1, chosen[:, None])[:, 0].log()
        sampler = torch.tensor(sequence.sampler_logprobs, dtype=torch.float64)
        rewards = torch.tensor(sequence.advantages or [0.0] * len(where), dtype=torch.float64)
        coef = algorithm.kl_coef
        full = (p * (p / q).log()).sum(-1)
        if algorithm.loss_fn == "full_reverse_kl":
            loss = coef * full - (now - sampler).exp() * rewards
        elif algorithm.loss_fn == "jsd":
            beta = algorithm.jsd_beta
            m = beta * q + (1 - beta) * p
            loss = beta * (q * (q / m).log()).sum(-1) + (1 - beta) * (p * (p / m).log()).sum(-1)
        elif algorithm.loss_fn == "top_k_reverse_kl":
            loss = torch.stack(
                [buckets_kl(*row, algorithm.top_k) for row in zip(p, q, strict=True)]
            )
        else:
            cap = algorithm.importance_cap
            old = sampler if cap is None else now.detach()
            weight = 1.0 if cap is None else (old - sampler).exp().clamp(max=cap)
            advantage = -coef * (old - reference) + rewards
            if algorithm.kl_baseline == "exact":
                advantage = advantage + coef * full.detach()
            ratio = (now - old).exp()
            gain = ratio * advantage
            if algorithm.loss_fn == "ppo":
                low, high = 1 - algorithm.clip_ratio, 1 + algorithm.clip_ratio
                gain = torch.minimum(gain, ratio.clamp(low, high) * advantage)
            loss = -weight * gain
        losses.append(loss)
        kls.append(sampler - reference)
    return torch.cat(losses).mean(), torch.cat(kls).mean().item()


def buckets_kl(p, q, k):
    """KL over the teacher's k likeliest tokens and all others together, by sums."""
    top = sorted(range(len(q)), key=lambda i: -q[i].item())[:k]
    rest = [i for i in range(len(q)) if i not in top]
    p_all, q_all = [*p[top], p[rest].sum()], [*q[top], q[rest].sum()]
    return sum(a * (a / b).log() for a, b in zip(p_all, q_all, strict=True))


@torch.no_grad()
def scored_by_server(model, prepared, k):
    """The sequences as a served teacher scores them, with its k likeliest tokens at each."""
    found = []
    for sequence in prepared:
        tokens = sequence.tokens
        logprobs = model(torch.tensor([tokens.ids])).logits[0].log_softmax(-1)
        where = [i for i in range(1, len(tokens.ids)) if tokens.trained[i]]
        tops = [logprobs[i - 1].topk(k) for i in where]
        scores = TeacherScores(
            [logprobs[i - 1, tokens.ids[i]].item() for i in where],
            [top.indices.tolist() for top in tops],
            [top.values.tolist() for top in tops],
        )
        found.append(replace(sequence, teacher=scores))
    return found


def with_another_head(student):
    """The same student, whose head has a bias: its gradients are left to autograd."""
    head = student.module.get_output_embeddings()
    head.bias = torch.nn.Parameter(torch.zeros(head.weight.shape[0]))
    student = replace(student, head=HeadRunner(student.module))
    assert student.hand_gradients is None
    return student


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", ["whole", "adapter", "tiles", "autograd"])
def test_loss_and_gradient_are_those_of_the_formulas_in_float64(
    tiny_models, teacher, monkeypatch, kind, way
):
    folder = tiny_models.folder("llama", "chatml")
    student = make_student(tiny_models, folder, rank=4 if way == "adapter" else 0)
    if way == "autograd":
        student = with_another_head(student)
    if way == "tiles":
        monkeypatch.setattr("stillroom.models.cpu.gradients._LOSS_TILE_LOGITS", 5 * 352)
    prepared = prepare_sequences(sampled_by(student.loaded.model), KINDS[kind])
    stats = UpdateStats()

    accumulate_gradient(student, {0: teacher}, prepared, KINDS[kind], stats)
    ours = gradients(student)
    exact_teacher = tiny_models.load("llama", "chatml", seed=1).model.double()
    loss, kl = exact_loss(student.loaded.model.double(), exact_teacher, prepared, KINDS[kind])
    loss.backward()

    assert stats.loss / stats.num_tokens == pytest.approx(loss.item(), abs=1e-5)
    assert stats.teacher_kl / stats.num_tokens == pytest.approx(kl, abs=1e-5)
    assert largest_gap(ours, gradients(student)) < 1e-5


def test_a_server_that_told_too_few_tokens_is_an_error(student, teacher):
    algorithm = AlgorithmSection(loss_fn="top_k_reverse_kl", top_k=6)
    prepared = prepare_sequences(sampled_by(student.loaded.model), algorithm)

    reported = scored_by_server(teacher.loaded.model, prepared, k=5)
    with pytest.raises(TeacherError, match="did not return the top 6") as caught:
        accumulate_gradient(student, {}, reported, algorithm, UpdateStats())
    assert "max-logprobs" in caught.value.fix


def test_a_rollout_that_nobody_scored_is_an_error(student, teacher):
    prepared = prepare_sequences(sampled_by(student.loaded.model), KINDS["ppo"])
    reported = scored_by_server(teacher.loaded.model, prepared, k=1)

    with pytest.raises(TeacherError, match=r"the teacher of dataset 0 .* did not score 1 rollouts"):
        accumulate_gradient(student, {}, [*reported[:3], prepared[3]], KINDS["ppo"], UpdateStats())


def config_of(algorithm, *, learning_rate=1e-4):
    return DistillConfig.model_validate(
        {
            "dataset_type": "distill",
            "data": {"batch_size": 4},
            "model": {"path": "s"},
            "teacher": {"path": "t"},
            "algorithm": algorithm.model_dump(),
            "trainer": {"num_epochs": 1, "learning_rate": learning_rate, "schedule": "constant"},
        }
    )


@torch.no_grad()
def reverse_kl(model, teacher_model, sequences):
    """The largest divergence at any sampled token, in float64."""
    largest = 0.0
    for sequence in sequences:
        ids = torch.tensor([sequence.tokens.ids])
        p, q = (m(ids).logits[0].double().log_softmax(-1) for m in (model, teacher_model))
        largest = max(largest, (p.exp() * (p - q)).sum(-1).max().item())
    return largest


@pytest.mark.parametrize("kind", WITHOUT_REWARDS)
def test_a_student_that_is_its_teacher_does_not_drift(tiny_models, student, kind):
    twin = LocalTeacher(tiny_models.load("llama", "chatml"))
    config = config_of(KINDS[kind].model_copy(update={"substeps": 2}))
    optimizer = Optimizer(student.trainable(), config.trainer, total_steps=10)
    for iteration in range(5):
        sequences = sampled_by(student.loaded.model, off_policy=0.0)
        update_student(student, {0: twin}, sequences, optimizer, config, iteration)

    # Adam would make steps of the learning rate's size of what rounding leaves.
    assert reverse_kl(student.loaded.model, twin.loaded.model, sequences) < 1e-9


@pytest.mark.parametrize("loss_fn", ["full_reverse_kl", "jsd", "top_k_reverse_kl"])
def test_a_teacher_with_padding_in_its_vocabulary_teaches_the_same(tiny_models, student, loss_fn):
    """Its padding's weights say little, and what they say is left out."""
    algorithm = AlgorithmSection(loss_fn=loss_fn)
    prepared = prepare_sequences(sampled_by(student.loaded.model), algorithm)
    width = student.loaded.model.config.vocab_size
    teacher = LocalTeacher(tiny_models.load("llama", "chatml", seed=1))
    padded = LocalTeacher(tiny_models.load("llama", "chatml", seed=1))
    padded.loaded.model.resize_token_embeddings(width + 24, mean_resizing=False)
    found = []
    for one in (teacher, padded):
        accumulate_gradient(student, {0: one}, prepared, algorithm, UpdateStats())
        found.append(gradients(student))

    assert largest_gap(found[1], found[0]) < 1e-5


def test_metrics_say_how_far_the_student_is_from_what_was_sampled(student, teacher):
    algorithm = KINDS["ppo, all"]
    sequences = sampled_by(student.loaded.model)
    exact = sampled_by(student.loaded.model, off_policy=0.0)
    ratios = [
        math.exp(own - said)
        for one, other in zip(sequences, exact, strict=True)
        for said, own in zip(one.sampler_logprobs, other.sampler_logprobs, strict=True)
    ]
    stats = UpdateStats()

    prepared = prepare_sequences(sequences, algorithm)
    accumulate_gradient(student, {0: teacher}, prepared, algorithm, stats)

    metrics = stats.metrics(is_clipped=True, is_capped=True)
    assert metrics["ratio"] == pytest.approx(sum(ratios) / len(ratios), abs=1e-4)
    assert metrics["ratio_max"] == pytest.approx(max(ratios), abs=1e-4)
    assert metrics["capped"] == pytest.approx(sum(r >= 1.05 for r in ratios) / len(ratios))
    # Under a cap, a step's first ratio is to the student itself.
    assert metrics["clipped"] == 0
    assert metrics["advantage_std"] > 0
    vocabulary = student.loaded.model.config.vocab_size
    assert 0 < metrics["entropy"] <= math.log(vocabulary)


def test_what_the_clip_holds_back_is_counted(student, teacher):
    """Sampler and student differ by a factor of 2, the clip is a tenth: gains count, losses not."""
    algorithm = AlgorithmSection(loss_fn="ppo", clip_ratio=0.1)
    exact = sampled_by(student.loaded.model, off_policy=0.0)
    sequences = [
        replace(one, sampler_logprobs=[x - math.log(2) for x in one.sampler_logprobs])
        for one in exact
    ]
    reported = scored_by_server(teacher.loaded.model, prepare_sequences(sequences, algorithm), k=1)
    gains = sum(
        reference > said
        for sequence in reported
        for reference, said in zip(
            sequence.teacher.logprobs, sequence.sampler_logprobs, strict=True
        )
    )
    stats = UpdateStats()

    accumulate_gradient(student, {}, reported, algorithm, stats)

    assert stats.num_clipped == gains > 0


def test_marks_of_the_template_are_not_learnt_if_so_asked(tiny_models, student, teacher):
    ends = special_token_ids(student.loaded)
    text, end = 7, min(ends)
    assert text not in ends
    tokens = TokenSequence([5, text, end, 9, text, end], [False, True, True, False, True, True])
    scores = TeacherScores([-1.0, -2.0, -3.0, -4.0], [[1], [2], [3], [4]], [[-0.1]] * 4)
    sampled = TrainingSequence(tokens, [-1.5, -2.5, -3.5, -4.5], scores, reward=1.0)
    mark_only = TrainingSequence(TokenSequence([5, end], [False, True]), [-0.5], reward=0.0)
    algorithm = AlgorithmSection(
        loss_fn="ppo",
        mask_special_tokens=True,
        reward_coef=1.0,
        adv_estimator="gae",
        gae_lambda=0.5,
    )

    (sequence,) = prepare_sequences([sampled, mark_only], algorithm, special_ids=ends)

    assert sequence.tokens.trained == [False, True, False, False, True, False]
    assert sequence.sampler_logprobs == [-1.5, -3.5]
    assert sequence.teacher == TeacherScores([-1.0, -3.0], [[1], [3]], [[-0.1]] * 2)
    # Reward 1 less the other's 0, and less by half for each token that follows.
    assert sequence.advantages == [0.125, 0.5]
    accumulate_gradient(student, {}, [sequence], algorithm, UpdateStats())


def test_rewards_that_count_must_be_there(student):
    sequences = [replace(s, reward=None) for s in sampled_by(student.loaded.model)]

    with pytest.raises(DataError, match="no rollout of the iteration has a reward") as caught:
        prepare_sequences(sequences, KINDS["importance_sampling, rewards"])
    assert "rewards.py" in caught.value.fix
    assert len(prepare_sequences(sequences, KINDS["ppo"])) == 4


def test_the_correction_is_to_the_student_before_the_first_step(tiny_models, student, teacher):
    """Later steps' ratios are to it too: the sampler's own numbers decide the weights only."""
    algorithm = AlgorithmSection(loss_fn="importance_sampling", importance_cap=1.05, substeps=2)
    config = config_of(algorithm, learning_rate=1e-2)
    sequences = sampled_by(student.loaded.model)
    model = tiny_models.load("llama", "chatml").model
    optimizer = Optimizer(student.trainable(), config.trainer, total_steps=2)

    stats = update_student(student, {0: teacher}, sequences, optimizer, config, 0)

    with torch.no_grad():
        first = [
            model(torch.tensor([s.tokens.ids])).logits[0].double().log_softmax(-1)
            for s in sequences
        ]
    capped = sum(
        math.exp(rows[i - 1, s.tokens.ids[i]].item() - said) >= 1.05
        for s, rows in zip(sequences, first, strict=True)
        for i, said in zip(
            (i for i in range(1, len(s.tokens.ids)) if s.tokens.trained[i]),
            s.sampler_logprobs,
            strict=True,
        )
    )
    assert stats.num_capped == capped
    assert stats.num_tokens == sum(s.tokens.num_trained for s in sequences)
