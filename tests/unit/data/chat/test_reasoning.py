import pytest

from fakes import chat_templates
from fakes.conversations import LAMP, calls, reply, user
from fakes.mask_families import HARMONY
from fakes.tiny_models import build_tokenizer
from stillroom.data.chat.render import ChatRenderer
from stillroom.data.chat.template import reasoning_variables
from stillroom.errors import ConfigError, ModelError

SWITCH = chat_templates.QWEN3
OTHER_SWITCH = "{% if not thinking is defined %}{% set thinking = false %}{% endif %}{{ thinking }}"
EFFORT = "{% if reasoning_effort is defined %}{{ reasoning_effort }}{% endif %}"
BOTH = SWITCH + EFFORT


@pytest.mark.parametrize(
    ("template", "mode", "variables"),
    [
        (SWITCH, None, {}),
        (chat_templates.CHATML, None, {}),
        (SWITCH, "none", {"enable_thinking": False}),
        (SWITCH, "disabled", {"enable_thinking": False}),
        (SWITCH, "enabled", {"enable_thinking": True}),
        (SWITCH, "high", {"enable_thinking": True}),
        (OTHER_SWITCH, "none", {"thinking": False}),
        (OTHER_SWITCH, "low", {"thinking": True}),
        (EFFORT, "low", {"reasoning_effort": "low"}),
        (EFFORT, "minimal", {"reasoning_effort": "low"}),
        (EFFORT, "enabled", {"reasoning_effort": "medium"}),
        (EFFORT, "xhigh", {"reasoning_effort": "high"}),
        (BOTH, "none", {"enable_thinking": False}),
        (BOTH, "high", {"reasoning_effort": "high"}),
    ],
)
def test_a_mode_becomes_what_the_template_reads(template, mode, variables):
    assert reasoning_variables(template, mode) == variables


@pytest.mark.parametrize(
    "template",
    # A variable of its own, and a message's field, are no choice that a template gives.
    [chat_templates.CHATML_TAGGED, HARMONY, "{% for m in messages %}{{ m.thinking }}{% endfor %}",
     "{% set thinking = 'x' %}{{ thinking }}enable_thinking"],
)  # fmt: skip
@pytest.mark.parametrize("mode", ["none", "high"])
def test_a_template_without_the_choice_is_refused_by_name(template, mode):
    with pytest.raises(ConfigError, match=f"reasoning_mode: {mode}: .*cannot switch reasoning"):
        reasoning_variables(template, mode)


def test_a_model_that_always_thinks_is_not_told_to_stop():
    with pytest.raises(ConfigError, match="always thinks") as caught:
        reasoning_variables(EFFORT, "none")
    assert "low" in caught.value.fix


def test_a_broken_template_is_an_error_of_the_model():
    with pytest.raises(ModelError, match="cannot be read"):
        reasoning_variables("{% if %}", "none")


def test_answers_begin_without_thinking_also_after_tools():
    renderer = ChatRenderer(build_tokenizer("qwen3"), variables=reasoning_variables(SWITCH, "none"))

    requested = renderer.decode(renderer.prompt_ids([user("How much?")], []))
    replied = renderer.decode(renderer.reply_ids(calls(LAMP), [reply("12")], []))

    assert requested.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert replied.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
