import pytest

from stillroom.errors import ModelError
from stillroom.models.pairing import check_pair


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

    with pytest.raises(ModelError, match=r"different chat templates.*\(line \d+\) on '") as caught:
        check_pair(student, teacher)
    assert "chat_template.jinja" in caught.value.fix


def test_a_model_without_weights_for_some_tokens_is_refused(tiny_models):
    student = tiny_models.load("qwen3", "chatml", vocab_size=384)
    teacher = tiny_models.load("llama", "chatml")
    for model in (student, teacher):
        model.tokenizer.add_tokens(["<new>"])

    with pytest.raises(ModelError, match="llama-chatml-0' has no weights for token 352, '<new>'"):
        check_pair(student, teacher)
