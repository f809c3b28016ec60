import pytest

from stillroom.errors import ConfigError, ModelError
from stillroom.models.pairing import check_pair, refuse_api_teacher


def test_models_with_the_same_tokens_and_template_go_together(tiny_models):
    student = tiny_models.load("qwen3", "chatml")
    teacher = tiny_models.load("llama", "chatml")

    check_pair(student, teacher)


def test_a_teacher_with_other_tokens_is_refused_with_an_example_and_another_way(tiny_models):
    student = tiny_models.load("qwen3", "chatml")
    teacher = tiny_models.load("llama", "chatml")
    teacher.tokenizer.add_tokens(["<new>"])

    with pytest.raises(ModelError, match="'<new>' is None and 352") as caught:
        check_pair(student, teacher)
    assert "generate_rollouts" in caught.value.fix


def test_a_teacher_with_another_template_is_refused(tiny_models):
    student = tiny_models.load("qwen3", "chatml")
    teacher = tiny_models.load("qwen3", "qwen3")

    with pytest.raises(
        ModelError, match=r"different chat templates.*\(line \d+\) on, the student's has '"
    ) as caught:
        check_pair(student, teacher)
    assert "chat_template.jinja" in caught.value.fix


def test_a_model_without_weights_for_some_tokens_is_refused(tiny_models):
    student = tiny_models.load("qwen3", "chatml", vocab_size=384)
    teacher = tiny_models.load("llama", "chatml")
    for model in (student, teacher):
        model.tokenizer.add_tokens(["<new>"])

    with pytest.raises(ModelError, match="llama-chatml-0' has embeddings for 352 tokens, but"):
        check_pair(student, teacher)


@pytest.mark.parametrize(
    "name",
    ["gpt-5-mini", "openai/gpt-4o", "o3", "anthropic/claude-opus-5", "Claude-3", "gemini",
     "chatgpt-4o-latest"],
)  # fmt: skip
def test_teachers_that_cannot_score_tokens_are_refused_with_the_off_policy_way(name):
    with pytest.raises(ConfigError, match="Unsupported teacher model") as caught:
        refuse_api_teacher(name)
    assert "convert_rollouts" in caught.value.fix


@pytest.mark.parametrize(
    "name",
    ["Qwen/Qwen3-8B", "openai/gpt-oss-20b", "google/gemma-3-4b-it", "demo/teacher", "runs/o1x",
     "models/claude-like", "EleutherAI/gpt-neox-20b"],
)  # fmt: skip
def test_open_weight_teachers_are_let_through(name):
    refuse_api_teacher(name)
