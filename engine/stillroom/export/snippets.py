"""Commands and code examples that load and serve an export."""

import json
from collections.abc import Iterator
from dataclasses import dataclass

from stillroom.export.request import ExportFormat
from stillroom.export.serving import Served, serve_command

TOOLS = "tools.json"
"""The file of an export with the schemas of the tools that it was trained with."""
_GENERATE = """\
messages = {messages}
inputs = tokenizer.apply_chat_template(
    messages, {tools}add_generation_prompt=True, return_tensors="pt", return_dict=True
)
output = model.generate(**inputs, max_new_tokens=512)
print(tokenizer.decode(output[0, inputs["input_ids"].shape[1]:], skip_special_tokens=True))"""


@dataclass(frozen=True, slots=True)
class UsageExample:
    """The facts that the examples are written from."""

    format: ExportFormat
    name: str
    """The name of the export's folder."""
    served: Served
    gguf_file: str | None = None
    system: str | None = None
    """The system message of most training rows."""
    has_tools: bool = False
    """Whether most training rows had tools, which are then in TOOLS beside the weights."""
    is_multimodal: bool = False
    """Whether the weights (or those of an adapter's base) are a multimodal model's."""

    @property
    def command(self) -> str | None:
        """The command that serves the export, or None if none is known."""
        if self.format == "gguf":
            return f"llama-server -m {self.served.path}/{self.gguf_file} --jinja"
        return serve_command(self.served)


def snippets(usage: UsageExample) -> Iterator[tuple[str, str, str]]:
    """Yields a title, a language and the text of each example."""
    if usage.format == "gguf":
        yield "With llama.cpp:", "sh", usage.command or ""
        yield (
            "Smaller, at some cost in quality:",
            "sh",
            f"llama-quantize {usage.served.path}/{usage.gguf_file} small-Q4_K_M.gguf Q4_K_M",
        )
        return
    yield "With transformers 5 (beside the folder):", "python", _python(usage)
    if (command := usage.command) is not None:
        yield "With vLLM, as an OpenAI-compatible server:", "sh", command
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
