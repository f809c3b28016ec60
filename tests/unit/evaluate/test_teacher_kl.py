import msgspec
import pytest
import torch

from fakes.base_models import with_chatml
from fakes.conversations import PRICE
from fakes.decoding import random_prompts
from fakes.rollout_rows import rollout_row
from fakes.training import make_student
from stillroom.data.chat.render import ChatRenderer
from stillroom.errors import InputError, ModelError
from stillroom.evaluate.request import KLModels
from stillroom.evaluate.teacher_kl import measure_teacher_kl
from stillroom.models.batches import sampled_sequence
from stillroom.models.load import load_model
from stillroom.models.reread.pair_check import open_pair
from stillroom.models.resolve import ModelLocation, locate_model
from stillroom.teachers.local_hf import LocalTeacher
from stillroom.train.config.distill_sections import AlgorithmSection
from stillroom.train.on_policy.policy_update import UpdateStats, accumulate_gradient
from stillroom.train.on_policy.training_sequences import TrainingSequence
from stillroom.types import Trajectory


def rollout(index, ids, sampled):
    tokens = {"ids": ids, "sampled": sampled, "logprobs": [0.0] * len(ids)}
    row = rollout_row(task_id=f"task-{index}", tokens=tokens if ids else None)
    return msgspec.convert(row, Trajectory)


@pytest.fixture
def rollouts():
    """Of ragged lengths, with tokens that were given between those that were sampled."""
    return [
        rollout(index, ids, [i > 2 and i % 3 > 0 for i in range(len(ids))])
        for index, ids in enumerate(random_prompts((9, 31, 14, 22)))
    ]


def measure(tiny_models, model, teacher, rollouts):
    workspace = tiny_models.workspace
    models = KLModels(locate_model(workspace, str(model)), locate_model(workspace, str(teacher)))
    return measure_teacher_kl(workspace, models, rollouts)


@torch.no_grad()
def exact(models, rollouts):
    """KL(model || teacher) summed over each rollout's sampled tokens, and their number."""
    student, teacher = (loaded.model.double() for loaded in models)
    sums, sizes = [], []
    for one in rollouts:
        ids = torch.tensor([one.tokens.ids])
        before = [i - 1 for i, is_sampled in enumerate(one.tokens.sampled) if is_sampled]
        log_p = student(ids).logits[0].log_softmax(-1)[before]
        log_q = teacher(ids).logits[0].log_softmax(-1)[before]
        sums.append((log_p.exp() * (log_p - log_q)).sum().item())
        sizes.append(len(before))
    return sums, sizes


def test_it_is_the_exact_divergence_per_sampled_token(tiny_models, rollouts):
    model = tiny_models.folder("gemma2", "chatml")
    teacher = tiny_models.folder("llama", "chatml", seed=1)

    found = measure(tiny_models, model, teacher, rollouts)

    sums, sizes = exact(
        (tiny_models.load("gemma2", "chatml"), tiny_models.load("llama", "chatml", seed=1)),
        rollouts,
    )
    assert found.value == pytest.approx(sum(sums) / sum(sizes), abs=1e-5)
    assert found.n == 4
    assert found.low < found.value < found.high


def test_rollouts_without_sampled_tokens_are_left_out(tiny_models, rollouts):
    model, teacher = tiny_models.folder("llama", "chatml"), tiny_models.folder("gemma2", "chatml")
    empty = [rollout(8, [], []), rollout(9, [1, 2, 3], [False] * 3)]

    assert measure(tiny_models, model, teacher, [*empty, *rollouts]) == measure(
        tiny_models, model, teacher, rollouts
    )


def test_one_rollout_gives_a_value_without_an_interval(tiny_models, rollouts):
    model, teacher = tiny_models.folder("llama", "chatml"), tiny_models.folder("gemma2", "chatml")

    found = measure(tiny_models, model, teacher, rollouts[:1])

    assert found.value > 0
    assert (found.low, found.high, found.n) == (None, None, 1)


def test_nothing_to_measure_is_an_error_that_says_why(tiny_models):
    folder = tiny_models.folder("llama", "chatml")

    with pytest.raises(InputError, match="no rollout has a sampled token") as caught:
        measure(tiny_models, folder, folder, [rollout(0, [1, 2], [False, False])])
    assert "leave teacher out" in caught.value.fix


def conversation(loaded, index, text, tools=()):
    """Returns a rollout in which the model wrote the text."""
    question = {"role": "user", "content": f"Item {index}?"}
    answer = {"role": "assistant", "content": text}
    renderer = ChatRenderer(loaded.tokenizer)
    prompt = renderer.prompt_ids([question], tools)
    ids = loaded.tokenizer.encode(renderer.turn_text(answer, tools), add_special_tokens=False)
    sampled = [False] * len(prompt) + [True] * len(ids)
    tokens = {"ids": prompt + ids, "sampled": sampled, "logprobs": [0.0] * len(sampled)}
    row = rollout_row(
        task_id=f"task-{index}", messages=[question, answer], tools=tools, turns=1, tokens=tokens
    )
    return msgspec.convert(row, Trajectory)


def test_a_teacher_with_other_tokens_is_compared_at_each_byte(tiny_models):
    loaded = tiny_models.load("llama", "clerk")
    texts = ["The answer is 12.", "Red chair? No, größer!", "12 or 3.14159"]
    samples = [conversation(loaded, index, text) for index, text in enumerate(texts)]
    student = tiny_models.folder("llama", "clerk")
    teacher = tiny_models.folder("llama", "llama3", seed=1)
    workspace = tiny_models.workspace
    models = KLModels(*(locate_model(workspace, str(one)) for one in (student, teacher)))
    notes = []

    found = measure_teacher_kl(workspace, models, samples, note=notes.append)

    # A distillation's first iteration says the same of the same rollouts.
    here = LocalTeacher(tiny_models.load("llama", "llama3", seed=1))
    made = make_student(tiny_models, student)
    pair = open_pair(made.loaded, here.loaded)
    sequences = [
        TrainingSequence(
            sampled_sequence(one.tokens),
            one.tokens.sampled_logprobs,
            reading=pair.read(one.tokens, one.messages, [], num_turns=1),
        )
        for one in samples
    ]
    stats = UpdateStats()
    algorithm = AlgorithmSection(loss_fn="byte_reverse_kl")
    accumulate_gradient(made, {0: here}, sequences, algorithm, stats)
    compared = sum(one.tokens.num_trained - one.reading.num_uncompared_tokens for one in sequences)
    assert found.value == pytest.approx(stats.loss / compared, rel=1e-5)
    assert found.low < found.value < found.high
    assert "per byte" in notes[0]


def test_a_student_that_was_sampled_with_another_template_is_compared_with_it(
    tmp_path, tiny_models
):
    toolless = tiny_models.folder("llama", "toolless")
    chatml = with_chatml(toolless, tmp_path / "chatml")
    location = ModelLocation("chatml", str(chatml), is_local=True)
    loaded = load_model(tiny_models.workspace, location)
    teacher = tiny_models.folder("llama", "llama3", seed=1)
    samples = [conversation(loaded, index, "The answer is 12.", [PRICE]) for index in range(3)]

    expected = measure(tiny_models, chatml, teacher, samples)

    assert measure(tiny_models, toolless, teacher, samples) == expected


def test_a_teacher_that_cannot_read_the_model_is_refused(tiny_models, rollouts):
    with pytest.raises(ModelError, match="always thinks before an answer") as caught:
        measure(
            tiny_models,
            tiny_models.folder("llama", "chatml"),
            tiny_models.folder("llama", "always-thinks"),
            rollouts,
        )
    assert "compare accuracies" in caught.value.fix
