"""The facts of an exported model, the command that serves it, and usage examples."""

import json
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from stillroom.evaluate.intervals import Estimate
from stillroom.export.request import ExportFormat
from stillroom.serving.model_server import vllm_lora_rank

SENTINEL = "0123456789"
"""The argument of the tool call that a chat template writes in the probe."""
PROBE_TOOL = "probe_tool"
_VLLM_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}

# vLLM's names of tool-call formats, and what their chat templates write before the argument.
_TOOL_CALL_FORMATS: Sequence[tuple[str, re.Pattern[str]]] = (
    ("hermes", re.compile(r'<tool_call>\s*\{\s*"name":\s*"probe_tool",\s*"arguments":')),
    ("qwen3_coder", re.compile(r"<tool_call>\s*<function=probe_tool>")),
    ("glm45", re.compile(r"<tool_call>\s*probe_tool\s*<arg_key>")),
    ("mistral", re.compile(r"\[TOOL_CALLS\]\s*\[?\s*(\{[^}]*\"name\":\s*\")?probe_tool")),
    # The bars in these tokens are full-width.
    ("deepseek_v3", re.compile(r"tool▁call▁begin\W>function<\Wtool▁sep\W>probe_tool")),
    ("deepseek_v31", re.compile(r"tool▁call▁begin\W>probe_tool<\Wtool▁sep\W>")),
    ("kimi_k2", re.compile(r"<\|tool_call_begin\|>\s*functions\.probe_tool")),
    ("openai", re.compile(r"to=functions\.probe_tool")),
    ("llama3_json", re.compile(r'\{\s*"name":\s*"probe_tool",\s*"parameters":')),
)


class ReadBack(msgspec.Struct, frozen=True, kw_only=True):
    """How well the reloaded files agree with the checkpoint on a few conversations."""

    positions: int
    same_token: float
    """The share of positions at which the most probable token is the same."""
    kl: float
    """Mean KL(checkpoint || export) in nats."""


@dataclass(frozen=True, slots=True)
class WrittenModel:
    """The facts about an exported model that are known once its files are written."""

    precision: str
    """fp32, bf16 or fp16; auto means the number format of the base."""
    tool_parser: str | None
    """vLLM's name for the tool-call format, if known."""
    max_context: int | None = None
    parameters: int | None = None
    read_back: ReadBack | None = None
    """None for an adapter, whose files are copies."""
    is_multimodal: bool = False
    """Whether the files (or those of an adapter's base) are a multimodal model."""
    other_parts: str | None = None
    """What was done with the untrained parts of a multimodal model."""


class VerifiedAccuracy(msgspec.Struct, frozen=True, kw_only=True):
    """The accuracy of the written files on prompts from an evaluation of the checkpoint."""

    served_by: str
    """transformers, vLLM or llama.cpp."""
    tasks: int
    accuracy: float
    checkpoint_accuracy: float
    difference: Estimate
    """The files' accuracy minus the checkpoint's, paired by task."""
    evaluation: str
    """The run that evaluated the checkpoint."""
    same_answers: float | None = None
    """The share of answers that repeat the checkpoint's word for word; None if it sampled them."""

    @property
    def sentence(self) -> str:
        """The result in one or two sentences."""
        text = (
            f"{self.served_by} loaded the written files to verify this export: they "
            f"solved {self.accuracy:.1%} of {self.tasks} tasks of run {self.evaluation}; the "
            f"checkpoint solved {self.checkpoint_accuracy:.1%}."
        )
        if self.same_answers is None:
            return text
        return f"{text} {self.same_answers:.0%} of the answers are the same word for word."


@dataclass(frozen=True, slots=True)
class ServingFacts:
    """The facts about a model that its serving command needs."""

    path: str
    name: str
    precision: str
    max_length: int | None
    """The maximum number of tokens of prompt and answer in training."""
    tool_parser: str | None
    """vLLM's name for the tool-call format; None if it is unknown."""
    base: str | None = None
    """The base model of an adapter."""
    rank: int | None = None


def serve_command(served: ServingFacts) -> str | None:
    """Returns the `vllm serve` command, or None for an adapter whose rank vLLM does not support."""
    command = ["vllm", "serve", served.base or served.path]
    if served.base is not None:
        if (rank := vllm_lora_rank(served.rank)) is None:
            return None
        command += ["--enable-lora", "--max-lora-rank", str(rank)]
        command += ["--lora-modules", f"{served.name}={served.path}"]
    else:
        command += ["--served-model-name", served.name]
    if served.precision in _VLLM_DTYPES:
        command += ["--dtype", _VLLM_DTYPES[served.precision]]
    if served.max_length is not None:
        command += ["--max-model-len", str(served.max_length)]
    if served.tool_parser is not None:
        command += ["--enable-auto-tool-choice", "--tool-call-parser", served.tool_parser]
    return shlex.join(command)


def tool_parser(conversation: str) -> str | None:
    """Returns vLLM's parser for the tool call at the end of a rendered conversation, if known.

    conversation: the rendered call of PROBE_TOOL with the argument SENTINEL.
    """
    text_before = conversation[: max(0, conversation.rfind(SENTINEL))][-200:]
    return next((name for name, pattern in _TOOL_CALL_FORMATS if pattern.search(text_before)), None)


TOOLS = "tools.json"
"""The file of an export with the schemas of the tools used in training."""
_GENERATE = """\
messages = {messages}
inputs = tokenizer.apply_chat_template(
    messages, {tools}add_generation_prompt=True, return_tensors="pt", return_dict=True
)
output = model.generate(**inputs, max_new_tokens=512)
print(tokenizer.decode(output[0, inputs["input_ids"].shape[1]:], skip_special_tokens=True))"""


@dataclass(frozen=True, slots=True)
class UsageExample:
    """The facts that usage examples need."""

    format: ExportFormat
    name: str
    """The name of the export's folder."""
    served: ServingFacts
    gguf_file: str | None = None
    system: str | None = None
    """The system message of most training rows."""
    has_tools: bool = False
    """Whether most training rows had tools; their schemas are then in the file TOOLS."""
    is_multimodal: bool = False
    """Whether the model (or an adapter's base) is multimodal."""

    @property
    def command(self) -> str | None:
        """The command that serves the export; None if there is none."""
        if self.format == "gguf":
            return f"llama-server -m {self.served.path}/{self.gguf_file} --jinja"
        return serve_command(self.served)


def snippets(usage: UsageExample) -> Iterator[tuple[str, str, str]]:
    """Yields a title, a language and the text of each example."""
    if usage.format == "gguf":
        yield "With llama.cpp:", "sh", usage.command or ""
        yield (
            "Quantised, at some cost in quality:",
            "sh",
            f"llama-quantize {usage.served.path}/{usage.gguf_file} small-Q4_K_M.gguf Q4_K_M",
        )
        return
    yield "With transformers 5 (from the parent folder):", "python", _python(usage)
    if (command := usage.command) is not None:
        yield "With vLLM, as an OpenAI-compatible server:", "sh", command
    if usage.has_tools:
        yield (
            "With its tools, which are called until it answers (tools.py has their code):",
            "sh",
            f"stillroom chat {usage.served.path} --tools tools.py",
        )
    if usage.format in ("merged", "text"):
        yield (
            "As GGUF, with a checkout of llama.cpp:",
            "sh",
            (
                f"python llama.cpp/convert_hf_to_gguf.py {usage.served.path} "
                f"--outfile {usage.name}.gguf --outtype auto"
            ),
        )


def _python(usage: UsageExample) -> str:
    """Returns the example that loads the export with transformers and generates an answer."""
    path = usage.served.path
    if usage.format == "adapter" and usage.is_multimodal:
        load = (
            "from peft import PeftModel\n"
            "from transformers import AutoModelForImageTextToText, AutoTokenizer\n\n"
            f'base = AutoModelForImageTextToText.from_pretrained("{usage.served.base}", '
            'dtype="auto")\n'
            f'model = PeftModel.from_pretrained(base, "{path}")'
        )
    elif usage.format == "adapter":
        load = (
            "from peft import AutoPeftModelForCausalLM\n"
            "from transformers import AutoTokenizer\n\n"
            f'model = AutoPeftModelForCausalLM.from_pretrained("{path}", dtype="auto")'
        )
    else:
        loader = f"AutoModelFor{'ImageTextToText' if usage.is_multimodal else 'CausalLM'}"
        load = (
            f"from transformers import {loader}, AutoTokenizer\n\n"
            f'model = {loader}.from_pretrained("{path}", dtype="auto")'
        )
    messages = [{"role": "user", "content": "…"}]
    if usage.system:
        messages.insert(0, {"role": "system", "content": usage.system})
    # A JSON string is a Python string as well.
    lines = [f"    {json.dumps(message, ensure_ascii=False)},\n" for message in messages]
    tools = ""
    if usage.has_tools:
        load = f'{load}\ntools = json.loads(Path("{path}/{TOOLS}").read_text(encoding="utf-8"))'
        load, tools = f"import json\nfrom pathlib import Path\n\n{load}", "tools=tools, "
    generate = _GENERATE.format(messages=f"[\n{''.join(lines)}]", tools=tools)
    return f'{load}\ntokenizer = AutoTokenizer.from_pretrained("{path}")\n{generate}'
