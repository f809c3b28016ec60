import json
import shlex

import pytest

from fakes.mask_families import MASK_FAMILIES, mask_tokenizer
from stillroom.export.serving import (
    PROBE_TOOL,
    SENTINEL,
    ServingFacts,
    UsageExample,
    serve_command,
    snippets,
    tool_parser,
)
from stillroom.export.weights import find_tool_parser

PARSERS = {
    "chatml": "hermes",
    "qwen": "hermes",
    "smollm": "hermes",
    "llama": "llama3_json",
    "mistral": "mistral",
    "gemma": None,  # it takes no tools
    "phi": None,
    "deepseek": None,  # marks of its own, not those of the model it is shaped after
    "harmony": "openai",
    "glm": "glm45",
    "our-chatml": "hermes",
    "our-llama3": "llama3_json",
    "our-gemma": None,
}


@pytest.mark.parametrize("family", list(MASK_FAMILIES))
def test_the_parser_is_known_by_what_the_template_writes(family):
    assert find_tool_parser(mask_tokenizer(MASK_FAMILIES[family])) == PARSERS[family]


BAR = "\N{FULLWIDTH VERTICAL LINE}"
ARGUMENTS = json.dumps({"item": SENTINEL})
SEP = f"<{BAR}tool▁sep{BAR}>"
WRITTEN = {
    "hermes": f'<tool_call>\n{{"name": "{PROBE_TOOL}", "arguments": {ARGUMENTS}}}\n</tool_call>',
    "qwen3_coder": f"<tool_call>\n<function={PROBE_TOOL}>\n<parameter=item>\n{SENTINEL}\n",
    "deepseek_v3": f"<{BAR}tool▁call▁begin{BAR}>function{SEP}{PROBE_TOOL} {ARGUMENTS}",
    "deepseek_v31": f"<{BAR}tool▁call▁begin{BAR}>{PROBE_TOOL}{SEP}{ARGUMENTS}",
    "kimi_k2": f"<|tool_call_begin|>functions.{PROBE_TOOL}:0<|argument_begin|>{ARGUMENTS}",
    "mistral": f'[TOOL_CALLS] [{{"name": "{PROBE_TOOL}", "arguments": {ARGUMENTS}}}]',
    "llama3_json": f'{{"name": "{PROBE_TOOL}", "parameters": {ARGUMENTS}}}',
}


@pytest.mark.parametrize("parser", list(WRITTEN))
def test_each_way_to_write_a_call_has_its_parser(parser):
    tools = json.dumps({"name": PROBE_TOOL, "description": "d", "parameters": {}})
    assert tool_parser(f"system: {tools}\nuser: x\n{WRITTEN[parser]}") == parser


def test_an_example_of_calls_in_the_system_prompt_is_no_call():
    assert tool_parser(f"Answer with {WRITTEN['hermes']}" + "x" * 300) is not None
    plain = WRITTEN["hermes"].replace(SENTINEL, "lamp") + " " * 300 + f"CALL {SENTINEL}"
    assert tool_parser(plain) is None
    assert tool_parser("no call at all") is None


def served(**fields):
    known = {"path": "./out", "name": "out", "precision": "bf16", "max_length": 4096,
             "tool_parser": "hermes"}  # fmt: skip
    return ServingFacts(**{**known, **fields})


def test_the_command_says_only_what_is_known():
    assert serve_command(served()) == (
        "vllm serve ./out --served-model-name out --dtype bfloat16 --max-model-len 4096 "
        "--enable-auto-tool-choice --tool-call-parser hermes"
    )
    bare = served(precision="auto", max_length=None, tool_parser=None)
    assert serve_command(bare) == "vllm serve ./out --served-model-name out"


def test_an_adapter_is_served_on_its_base_with_room_for_its_rank():
    command = serve_command(served(base="Qwen/Qwen3-0.6B", rank=24, precision="auto"))
    assert command is not None
    assert command.startswith(
        "vllm serve Qwen/Qwen3-0.6B --enable-lora --max-lora-rank 32 --lora-modules out=./out"
    )
    assert serve_command(served(base="base", rank=1024)) is None


def test_a_path_with_blanks_is_quoted():
    command = serve_command(served(path="./my model; rm x"))
    assert shlex.split(command or "")[2] == "./my model; rm x"


@pytest.mark.parametrize("kind", ["merged", "adapter", "gguf"])
def test_python_examples_can_be_compiled(kind):
    usage = UsageExample(
        kind, "out", served(base="b" if kind == "adapter" else None, rank=8), "out.gguf"
    )
    examples = {language: text for _, language, text in snippets(usage)}
    if kind != "gguf":
        compile(examples["python"], "card", "exec")
    assert "sh" in examples
