"""Ten families of chat templates, each in the shape of a well-known one and written for the tests.

The three templates that come with Stillroom follow them.

With each goes a tokenizer of the same kind as the family's, trained here on a few lines. The
shapes keep what makes masks hard: dropped thinking, other ends of earlier turns, headers in the
midst of a turn, no header at all, tools that move with the conversation.
"""

from collections.abc import Callable
from dataclasses import dataclass

from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from fakes import chat_templates
from stillroom.data.chat.template import template_file

# Calls between marks, replies after them without a header, thinking never repeated.
DEEPSEEK = """\
{{- bos_token }}
{%- set ns = namespace(is_reply=false) %}
{%- if tools %}{{- 'Tools: ' + tools | tojson + '\\n\\n' }}{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'system' %}{{- message.content }}
    {%- elif message.role == 'user' %}
        {%- set ns.is_reply = false %}{{- '<|User|>' + message.content }}
    {%- elif message.role == 'assistant' %}
        {%- set thinking = message.reasoning_content if loop.last else none %}
        {{- '' if ns.is_reply else '<|Assistant|>' }}
        {%- if thinking %}{{- '<think>' + thinking + '</think>' }}{%- endif %}
        {{- (message.content or '').split('</think>')[-1] }}
        {%- if message.tool_calls %}
            {{- '<|calls_begin|>' }}
            {%- for call in message.tool_calls %}
                {{- '<|call_begin|>' + call.function.name + '<|sep|>' }}
                {{- call.function.arguments | tojson + '<|call_end|>' }}
            {%- endfor %}
            {{- '<|calls_end|>' }}
        {%- endif %}
        {{- eos_token }}
        {%- set ns.is_reply = false %}
    {%- else %}
        {%- set ns.is_reply = true %}
        {{- '<|output_begin|>' + message.content + '<|output_end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt and not ns.is_reply %}{{- '<|Assistant|>' }}{%- endif %}
"""

# Channels: a turn has headers of its own inside, the last turn another end than earlier ones, a
# call a third one; thinking stays only as long as no final answer has followed it.
HARMONY = """\
{{- '<|start|>system<|message|>You are a model.<|end|>' }}
{%- if tools or messages[0].role == 'system' %}
    {{- '<|start|>developer<|message|>' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content }}{%- endif %}
    {%- for tool in tools or [] %}{{- '\\ntype ' + tool.function.name + ' = any;' }}{%- endfor %}
    {{- '<|end|>' }}
{%- endif %}
{%- for message in messages %}
    {%- set later = messages[loop.index:] | selectattr('role', 'equalto', 'assistant')
                    | rejectattr('tool_calls', 'defined') | list %}
    {%- if message.role == 'assistant' and message.tool_calls %}
        {%- if message.content and message.thinking %}
            {{- raise_exception('Cannot pass both content and thinking with tool calls!') }}
        {%- endif %}
        {%- if message.thinking and not later %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json' }}
        {{- '<|message|>' + call.arguments | tojson + '<|call|>' }}
    {%- elif message.role == 'assistant' %}
        {%- if message.thinking and loop.last %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}
        {%- endif %}
        {{- '<|start|>assistant<|channel|>final<|message|>' + message.content }}
        {{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}
    {%- elif message.role == 'tool' %}
        {{- '<|start|>functions.' + message.name + ' to=assistant<|channel|>commentary' }}
        {{- '<|message|>' + message.content + '<|end|>' }}
    {%- elif message.role == 'user' %}
        {{- '<|start|>user<|message|>' + message.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}
"""

# A turn has no end of its own: the next role's token is what stops the model.
GLM_BARE = """\
{{- '[gMASK]<sop>' }}
{%- if tools %}
    {{- '<|system|>\\nTools:' }}
    {%- for tool in tools %}{{- '\\n' + tool | tojson }}{%- endfor %}
{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- set thinking = message.reasoning_content or '' %}
        {{- '<|assistant|>\\n<think>' + (thinking if loop.index0 > ns.last else '') + '</think>' }}
        {{- '\\n' + message.content if message.content else '' }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>' + call.function.name + '\\n' }}
            {%- for key, value in call.function.arguments.items() %}
                {{- '<arg_key>' + key + '</arg_key>\\n<arg_value>' + value + '</arg_value>\\n' }}
            {%- endfor %}
            {{- '</tool_call>' }}
        {%- endfor %}
    {%- elif message.role == 'tool' %}
        {{- '<|observation|>\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
    {%- else %}
        {{- '<|' + message.role + '|>\\n' + message.content }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{%- endif %}
"""
_GLM_CALLS_END = "{{- '</tool_call>' }}\n        {%- endfor %}"
GLM = GLM_BARE.replace(_GLM_CALLS_END, _GLM_CALLS_END + "\n        {{- '<|endoftext|>' }}")

# Its own generation tags; a system message is always there; empty thinking stays in the history.
SMOLLM = """\
{{- '<|im_start|>system\\n## Metadata\\nReasoning Mode: /think\\n\\n' }}
{{- (messages[0].content if messages[0].role == 'system' else 'You are helpful.') }}
{%- for tool in tools or [] %}{{- '\\n' + tool | tojson }}{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content }}
        {{- '\\n</tool_response><|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- generation %}
        {{- '<think>\\n' + (message.reasoning_content or '') + '\\n</think>\\n' }}
        {{- message.content or '' }}
        {%- for call in message.tool_calls or [] %}
            {{- '<tool_call>' + call.function | tojson + '</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
        {%- endgeneration %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

# The tools stand in the system's turn; the whole text ends with a token of its own.
PHI = """\
{%- for message in messages %}
    {%- if message.role == 'system' and tools %}
        {{- '<|system|>' + message.content + '<|tool|>' + tools | tojson + '<|/tool|><|end|>' }}
    {%- elif message.role == 'tool' %}
        {{- '<|tool_response|>' + message.content + '<|end|>' }}
    {%- elif message.tool_calls %}
        {{- '<|assistant|>' + message.content + '<|tool_call|>[' }}
        {%- for call in message.tool_calls %}
            {{- call.function | tojson + (', ' if not loop.last else '') }}
        {%- endfor %}
        {{- ']<|/tool_call|><|end|>' }}
    {%- else %}
        {{- '<|' + message.role + '|>' + message.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{{- '<|assistant|>' if add_generation_prompt else eos_token }}
"""

LINES = [
    "The lamp costs 12. The chair costs 30. What does the lamp cost? Be brief, please.",
    '{"name": "price", "arguments": {"item": "lamp"}} I should look up the price first.',
    "user assistant system tool think analysis final commentary functions",
]
_HERMES_MARKUP = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>",
                  "</tool_response>")  # fmt: skip


def byte_level(core: Tokenizer) -> None:
    """As GPT-2, Qwen, Llama 3: bytes, blanks belong to the word after them."""
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()


def blanks_as_marks(core: Tokenizer) -> None:
    """As Gemma: blanks are a character of their own, nothing is put before a text."""
    core.normalizer = normalizers.Replace(" ", "▁")
    core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])


def blank_first(core: Tokenizer) -> None:
    """As SentencePiece of Mistral: a text gets a blank before it, so pieces do not add up."""
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    core.decoder = decoders.Metaspace(prepend_scheme="first")


@dataclass(frozen=True)
class MaskFamily:
    """A template, its control tokens (the first two: beginning and end), and kind of tokenizer."""

    template: str
    control: tuple[str, ...]
    markup: tuple[str, ...] = ()
    kind: Callable[[Tokenizer], None] = byte_level
    has_system: bool = True
    has_tools: bool = True
    has_thinking: bool = False


MASK_FAMILIES = {
    "chatml": MaskFamily(
        chat_templates.CHATML, ("<|endoftext|>", "<|im_end|>", "<|im_start|>"), _HERMES_MARKUP
    ),
    "qwen": MaskFamily(
        chat_templates.QWEN3,
        ("<|endoftext|>", "<|im_end|>", "<|im_start|>"),
        _HERMES_MARKUP,
        has_thinking=True,
    ),
    "smollm": MaskFamily(
        SMOLLM,
        ("<|endoftext|>", "<|im_end|>", "<|im_start|>"),
        _HERMES_MARKUP,
        has_thinking=True,
    ),
    "llama": MaskFamily(
        chat_templates.LLAMA3,
        ("<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"),
    ),
    "mistral": MaskFamily(
        chat_templates.MISTRAL,
        ("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]",
         "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        kind=blank_first,
        has_system=False,
    ),
    "gemma": MaskFamily(
        chat_templates.GEMMA,
        ("<bos>", "<end_of_turn>", "<start_of_turn>"),
        kind=blanks_as_marks,
        has_tools=False,
    ),
    "phi": MaskFamily(
        PHI,
        ("<s>", "<|endoftext|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>", "<|tool|>",
         "<|/tool|>", "<|tool_call|>", "<|/tool_call|>", "<|tool_response|>"),
    ),
    "deepseek": MaskFamily(
        DEEPSEEK,
        ("<|begin|>", "<|eos|>", "<|User|>", "<|Assistant|>", "<|calls_begin|>", "<|calls_end|>",
         "<|call_begin|>", "<|call_end|>", "<|sep|>", "<|output_begin|>", "<|output_end|>"),
        ("<think>", "</think>"),
        has_thinking=True,
    ),
    "harmony": MaskFamily(
        HARMONY,
        ("<|startoftext|>", "<|return|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>",
         "<|call|>"),
        has_thinking=True,
    ),
    "glm": MaskFamily(
        GLM,
        ("[gMASK]", "<|endoftext|>", "<sop>", "<|user|>", "<|assistant|>", "<|system|>",
         "<|observation|>"),
        _HERMES_MARKUP,
        has_thinking=True,
    ),
    "our-chatml": MaskFamily(
        template_file("chatml").read_text("utf-8"),
        ("<|endoftext|>", "<|im_end|>", "<|im_start|>"),
    ),
    "our-llama3": MaskFamily(
        template_file("llama3").read_text("utf-8"),
        ("<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"),
    ),
    "our-gemma": MaskFamily(
        template_file("gemma").read_text("utf-8"),
        ("<bos>", "<end_of_turn>", "<start_of_turn>"),
        kind=blanks_as_marks,
        has_tools=False,
    ),
}  # fmt: skip


def mask_tokenizer(family: MaskFamily) -> PreTrainedTokenizerFast:
    """Returns the family's tokenizer."""
    unknown = "<unk>"
    core = Tokenizer(BPE(unk_token=unknown, fuse_unk=False))
    family.kind(core)
    letters = sorted({*"".join(LINES), *pre_tokenizers.ByteLevel.alphabet(), "▁", "\n"})
    core.train_from_iterator(
        LINES,
        trainers.BpeTrainer(
            vocab_size=len(letters) + 90,
            initial_alphabet=letters,
            special_tokens=[unknown],
            show_progress=False,
        ),
    )
    special = [AddedToken(text, special=True, normalized=False) for text in family.control]
    core.add_special_tokens(special)
    core.add_tokens([AddedToken(text, normalized=False) for text in family.markup])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=family.control[0],
        eos_token=family.control[1],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = family.template
    return tokenizer
