"""A teacher that reads the student's tokens after a prompt of its own."""

import random
import re

import pytest
import torch

from fakes.decoding import random_prompts
from fakes.killed_runs import assert_resumes_exactly, measured
from fakes.model_server import FakeModelServer
from fakes.training import (
    PRICE_TOOL,
    gradients,
    largest_gap,
    make_project,
    make_student,
    one_by_one,
)
from stillroom.data.chat.render import ChatRenderer
from stillroom.data.formats import Task
from stillroom.data.instruction import Instruction, PromptViews
from stillroom.errors import ConfigError, DataError, ModelError
from stillroom.models.batches import PADDED, TokenSequence
from stillroom.teachers.local_hf import LocalTeacher
from stillroom.train.config.distill_sections import AlgorithmSection
from stillroom.train.config.request import PlanTraining
from stillroom.train.on_policy.policy_update import UpdateStats, accumulate_gradient
from stillroom.train.on_policy.teachers import prompt_replacer
from stillroom.train.on_policy.training_sequences import TrainingSequence, prepare_sequences
from stillroom.train.planning.plan import plan_training
from stillroom.types import TokenTrace

ALGORITHMS = {
    "full_reverse_kl": AlgorithmSection(loss_fn="full_reverse_kl"),
    "top_k_reverse_kl": AlgorithmSection(loss_fn="top_k_reverse_kl", top_k=3),
    "importance_sampling": AlgorithmSection(loss_fn="importance_sampling"),
}
SYSTEM = "Answer in one word, and add seven to each number that you are asked for."


@pytest.fixture
def student(tiny_models):
    return make_student(tiny_models, tiny_models.folder("llama", "chatml"))


@pytest.fixture
def teacher(tiny_models):
    return LocalTeacher(tiny_models.load("llama", "chatml", seed=1))


def sequences(*, num_own=40):
    """Rollouts of which the teacher reads another, longer prompt than the student."""
    rng = random.Random(3)
    own = random_prompts((num_own,), seed=9)[0]
    found = []
    for ids in random_prompts((12, 30, 21, 9)):
        sampled = [True] * 3 + [False] * 2 + [True] * (len(ids) - 8)
        found.append(
            TrainingSequence(
                TokenSequence(
                    ids,
                    [False] * 3 + sampled,
                    for_teacher=TokenSequence(own + ids[3:], [False] * num_own + sampled),
                ),
                [rng.uniform(-6, -4) for flag in sampled if flag],
                prompt="p",
            )
        )
    return found


def exact_loss(model, teacher_model, rollouts, algorithm):
    """The mean token loss by the formulas, each model on its own tokens, one row at a time."""
    losses = []
    for rollout in rollouts:
        p, chosen = distributions(model, rollout.tokens)
        with torch.no_grad():
            q, same = distributions(teacher_model, rollout.tokens.for_teacher)
        assert chosen.tolist() == same.tolist()
        if algorithm.loss_fn == "full_reverse_kl":
            losses.append((p * (p / q).log()).sum(-1))
        elif algorithm.loss_fn == "top_k_reverse_kl":
            top = q.topk(algorithm.top_k).indices
            p_top, q_top = p.gather(1, top), q.gather(1, top)
            rest = (1 - p_top.sum(1)) * ((1 - p_top.sum(1)) / (1 - q_top.sum(1))).log()
            losses.append((p_top * (p_top / q_top).log()).sum(1) + rest)
        else:
            now, reference = (each.gather(1, chosen[:, None])[:, 0].log() for each in (p, q))
            said = torch.tensor(rollout.sampler_logprobs, dtype=torch.float64)
            losses.append(-(now - said).exp() * -algorithm.kl_coef * (said - reference))
    return torch.cat(losses).mean()


def distributions(model, tokens):
    ids = torch.tensor([tokens.ids])
    where = [i for i in range(1, len(tokens.ids)) if tokens.trained[i]]
    return model(ids).logits[0].softmax(-1)[[i - 1 for i in where]], ids[0, where]


@pytest.mark.parametrize("kind", ALGORITHMS)
@pytest.mark.parametrize("way", ["packed", "padded", "teacher alone padded", "one by one", "small"])
def test_each_model_scores_its_own_tokens(tiny_models, student, teacher, kind, way):
    algorithm = ALGORITHMS[kind]
    if way != "packed":
        teacher.head.rules = PADDED
    if way == "padded":
        student.head.rules = PADDED
    if way == "one by one":
        student = one_by_one(student)
    if way == "small":
        teacher = LocalTeacher(teacher.loaded, max_batch_tokens=64)
    rollouts = prepare_sequences(sequences(), algorithm)
    stats = UpdateStats()

    accumulate_gradient(student, {0: teacher}, rollouts, algorithm, stats)
    ours = gradients(student)
    exact_teacher = tiny_models.load("llama", "chatml", seed=1).model.double()
    loss = exact_loss(student.loaded.model.double(), exact_teacher, rollouts, algorithm)
    loss.backward()

    assert stats.loss / stats.num_tokens == pytest.approx(loss.item(), abs=1e-5)
    assert largest_gap(ours, gradients(student)) < 1e-5


@pytest.mark.parametrize("is_packed", [True, False])
def test_the_teachers_passes_are_no_larger_than_it_may_hold(teacher, is_packed):
    teacher = LocalTeacher(teacher.loaded, max_batch_tokens=100)
    if not is_packed:
        teacher.head.rules = PADDED

    batch = teacher.collate_long([rollout.tokens.for_teacher for rollout in sequences()])

    assert batch.num_trained == sum(rollout.tokens.num_trained for rollout in sequences())
    assert max(one.ids_BT.numel() for one in batch.passes) <= 100
    # A pack holds the prompt that all four share once.
    assert len(batch.passes) == (1 if is_packed else 3)


def test_marks_are_left_out_of_what_both_read(student):
    ids, trained = [1, 7, 8, 9, 7], [False, True, True, False, True]
    own = TokenSequence([2, 7, 3, *ids[1:]], [False] * 3 + trained[1:])
    rollout = TrainingSequence(TokenSequence(ids, trained, own), [-1.0, -2.0, -3.0])
    algorithm = AlgorithmSection(loss_fn="full_reverse_kl", mask_special_tokens=True)

    (prepared,) = prepare_sequences([rollout], algorithm, special_ids=frozenset({7}))

    assert prepared.tokens.trained == [False, False, True, False, False]
    assert prepared.tokens.for_teacher.trained == [False] * 3 + [False, True, False, False]
    assert prepared.sampler_logprobs == [-2.0]


def task(*messages):
    return Task(
        task_id="t",
        messages=list(messages),
        metadata={},
        tool_names=None,
        reward_names=None,
        variables={},
    )


def test_a_rollout_is_read_after_the_teachers_prompt_with_the_very_tokens_sampled(student):
    renderer = ChatRenderer(student.loaded.tokenizer)
    ask = {"role": "user", "content": "How much?"}
    read = prompt_replacer(renderer, PromptViews(teacher=Instruction(SYSTEM)))
    prompt = renderer.prompt_ids([ask], [])
    trace = TokenTrace(
        ids=[*prompt, 5, 6, 7, 8],
        sampled=[False] * len(prompt) + [True, True, False, True],
        logprobs=[0.0] * len(prompt) + [-1.0, -2.0, 0.0, -3.0],
    )

    own = read(task(ask), trace, [])

    expected = renderer.prompt_ids([{"role": "system", "content": SYSTEM}, ask], [])
    assert own.ids == [*expected, 5, 6, 7, 8]
    assert own.sampled == [False] * len(expected) + [True, True, False, True]
    assert own.sampled_logprobs == trace.sampled_logprobs
    # A row that has the message itself is read alike by both.
    assert read(task({"role": "system", "content": SYSTEM}, ask), trace, []) is None
    with pytest.raises(ModelError, match="does not start with the tokens of its prompt"):
        read(task(ask, ask), trace, [])


def distill(root, student, *, path, teacher, **sections):
    project = make_project(
        root, "distill", student, teacher={"path": str(path), **teacher}, **sections
    )
    project.write(
        [{"prompt": f"Item {i}?", "metadata": {"expected_answer": "12"}} for i in range(8)]
    )
    return project


def small(root, models, *, teacher, seed=1, **sections):
    settings = {
        "rollout": {"max_tokens": 6, **sections.pop("rollout", {})},
        "data": {"batch_size": 4, **sections.pop("data", {})},
    }
    project = distill(
        root,
        models.folder("llama", "chatml"),
        path=models.folder("llama", "chatml", seed=seed),
        teacher=teacher,
        **settings,
        **sections,
    )
    (root / "rules.md").write_text(SYSTEM, encoding="utf-8")
    return project


def test_a_model_is_taught_its_own_prompt(tmp_path, tiny_models):
    """The teacher is the student's base with a prompt: without one it has nothing to teach."""
    steps = {"num_epochs": 12, "learning_rate": 2e-2, "schedule": "constant"}
    for name in ("with", "without"):
        (tmp_path / name).mkdir()
    instructed = small(
        tmp_path / "with", tiny_models, teacher={"context_file": "rules.md"}, seed=0, trainer=steps
    )
    plain = small(tmp_path / "without", tiny_models, teacher={}, seed=0)

    instructed.train()
    plain.train()

    kls = [metrics["teacher_kl"] for metrics in instructed.reporter.measured]
    assert sum(kls[-3:]) < 0.7 * sum(kls[:3])
    assert all(metrics["left_out"] == 0 for metrics in instructed.reporter.measured)
    assert all(metrics["logprob_gap"] < 1e-5 for metrics in instructed.reporter.measured)
    assert abs(plain.reporter.measured[0]["teacher_kl"]) < 1e-5
    assert "left_out" not in plain.reporter.measured[0]
    assert any("the student's prompt has" in n for n in instructed.reporter.notes)


@pytest.mark.parametrize("top_k", [None, 4])
def test_a_served_teacher_reads_its_own_prompt(tmp_path, tiny_models, top_k):
    loss = {"loss_fn": "importance_sampling"} if top_k is None else {"top_k": 4}
    algorithm = {"loss_fn": "top_k_reverse_kl", **loss}
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    instruction = {"system": SYSTEM}
    here = small(tmp_path / "here", tiny_models, teacher=instruction, algorithm=algorithm)
    here.train()

    with FakeModelServer(tiny_models.load("llama", "chatml", seed=1)) as server:
        served = {"path": "served", "provider": "vllm", "base_url": server.base_url}
        there = small(
            tmp_path / "there", tiny_models, teacher=instruction | served, algorithm=algorithm
        )
        there.train()

    for ours, reference in zip(measured(there), measured(here), strict=True):
        assert ours["teacher_kl"] == pytest.approx(reference["teacher_kl"], abs=1e-4)
        assert ours["loss"] == pytest.approx(reference["loss"], abs=1e-4)


def test_a_server_without_room_for_the_prompt_is_refused(tmp_path, tiny_models):
    with FakeModelServer(tiny_models.load("llama", "chatml", seed=1), max_model_len=520) as server:
        served = {"path": "served", "provider": "vllm", "base_url": server.base_url}
        project = small(tmp_path, tiny_models, teacher={"system": SYSTEM} | served)

        with pytest.raises(ModelError, match=r"plus \d+ for the teacher's own") as caught:
            project.train()

    fitting = int(caught.value.fix.rpartition(" ")[2])
    assert 400 < fitting < 512


def test_a_resumed_run_is_the_unbroken_one_bit_for_bit(tmp_path, tiny_models):
    project = small(
        tmp_path,
        tiny_models,
        teacher={"context_file": "rules.md"},
        data={"batch_size": 2},
        trainer={"save_step": 1},
        rollout={"max_staleness": 1, "concurrency": 4},
    )

    assert_resumes_exactly(project, 3)


def test_rollouts_beyond_the_teachers_context_are_left_out_and_counted(tmp_path, tiny_models):
    project = small(tmp_path, tiny_models, teacher={"context_file": "rules.md"})
    renderer = ChatRenderer(tiny_models.load("llama", "chatml").tokenizer)
    rules = "Rule. " * 80

    def prompt_of(text):
        messages = [{"role": "system", "content": text}, {"role": "user", "content": "Item 0?"}]
        return len(renderer.prompt_ids(messages, []))

    # Only rollouts with an answer of fewer than four tokens fit.
    padding = next(n for n in range(400) if prompt_of(f"{rules}{'x' * n}") == 512 - 4)
    (tmp_path / "rules.md").write_text(f"{rules}{'x' * padding}", encoding="utf-8")
    with pytest.raises(DataError, match="is longer than the teacher's context") as caught:
        project.train()
    assert any("are skipped and counted" in note for note in project.reporter.notes)
    assert "shorten teacher.context_file" in caught.value.fix


def test_a_prompt_that_fills_the_teachers_context_is_refused(tmp_path, tiny_models):
    project = small(tmp_path, tiny_models, teacher={"context_file": "rules.md"})
    (tmp_path / "rules.md").write_text("Rule. " * 400, encoding="utf-8")

    with pytest.raises(ConfigError, match="which leaves no room for an answer") as caught:
        project.train()

    assert "shorten teacher.context_file" in caught.value.fix
    with pytest.raises(ConfigError, match="which leaves no room for an answer"):
        plan_training(project.workspace, PlanTraining())


def test_a_plan_counts_what_the_teacher_reads(tmp_path, tiny_models):
    project = small(tmp_path, tiny_models, teacher={"context_file": "rules.md"})
    project.write_config()

    forecast = plan_training(project.workspace, PlanTraining())

    (check,) = [check for check in forecast.checks if "the student's prompt has" in check]
    num_student, num_teacher, *_ = map(int, re.findall(r"\d+", check))
    assert num_teacher - num_student > 10
    assert forecast.seconds


def test_with_tools_and_turns_of_the_teacher_both_read_what_is_theirs(tmp_path, tiny_models):
    clerk = tiny_models.folder("llama", "clerk")
    project = distill(
        tmp_path,
        clerk,
        path=tiny_models.folder("llama", "clerk", seed=1),
        teacher={"system": SYSTEM},
        data={"batch_size": 8, "group_size": 4},
        rollout={"max_turns": 3, "max_tokens": 8},
        curriculum={"teacher_share": 0.6, "teacher_steps": 2},
        model={"system": ""},
    )
    own = {"role": "system", "content": "You are a clerk."}
    project.write({"messages": [own, {"role": "user", "content": f"Item {i}?"}]} for i in range(8))
    (tmp_path / "tools.py").write_text(PRICE_TOOL, encoding="utf-8")

    project.train()

    assert project.reporter.measured[0]["teacher_turns"] > 0
    assert any("the student's prompt has" in note for note in project.reporter.notes)
    assert all(metrics["logprob_gap"] < 1e-5 for metrics in project.reporter.measured)
    assert all(metrics["failed"] == 0 for metrics in project.reporter.measured)
