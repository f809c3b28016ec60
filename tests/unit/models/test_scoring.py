import pytest

from stillroom.errors import ConfigError
from stillroom.models.scoring import refuse_api_teacher


@pytest.mark.parametrize(
    "name",
    ["gpt-5-mini", "openai/gpt-4o", "o3", "o4-mini", "anthropic/claude-opus-5", "Claude-3",
     "google/gemini-2.5-pro", "gemini", "chatgpt-4o-latest"],
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
