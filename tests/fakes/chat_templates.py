"""Chat templates in the manner of the well-known families, written for the tests."""

_HERMES_HEAD = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- 'Tools:\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' + tool | tojson }}{%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
"""
_HERMES_CALLS = """\
{%- for call in message.tool_calls or [] %}
    {%- if not loop.first or content %}{{- '\\n' }}{%- endif %}
    {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
    {{- call.function.arguments | tojson }}
    {{- '}\\n</tool_call>' }}
{%- endfor %}
"""
# The replies to one turn share a block, as in Qwen's templates.
_HERMES_REPLIES = """\
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
    {{- '<|im_start|>user' }}
{%- endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
"""
_CHATML_PROMPT = "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"


def _chatml(open_tag: str, close_tag: str) -> str:
    return (
        _HERMES_HEAD
        + """\
{%- for message in messages %}
    {%- set content = message.content or '' %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}"""
        + open_tag
        + """{{- content }}
"""
        + _HERMES_CALLS
        + "{{- '<|im_end|>' }}"
        + close_tag
        + """{{- '\\n' }}
    {%- elif message.role == 'tool' %}
"""
        + _HERMES_REPLIES
        + """\
    {%- elif not (message.role == 'system' and loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
"""
        + _CHATML_PROMPT
    )


CHATML = _chatml("", "")
CHATML_TAGGED = _chatml("{%- generation %}", "{%- endgeneration %}")

# Thinking is kept only after the last user message; the last turn always has a thinking block.
QWEN3 = (
    _HERMES_HEAD
    + """\
{%- set ns = namespace(last_query=messages | length - 1, found=false) %}
{%- for message in messages[::-1] %}
    {%- if not ns.found and message.role == 'user' %}
        {%- set ns.found = true %}
        {%- set ns.last_query = messages | length - 1 - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content or '' %}
    {%- if message.role == 'assistant' %}
        {%- set thinking = '' %}
        {%- if message.reasoning_content is string %}
            {%- set thinking = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thinking = content.split('</think>')[0].split('<think>')[-1] %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last_query and (loop.last or thinking) %}
            {{- '<think>\\n' + thinking.strip('\\n') + '\\n</think>\\n\\n' }}
            {%- set content = content.lstrip('\\n') %}
        {%- endif %}
        {{- content }}
"""
    + _HERMES_CALLS
    + """\
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
"""
    + _HERMES_REPLIES
    + """\
    {%- elif not (message.role == 'system' and loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
)

LLAMA3 = """\
{{- bos_token }}
{%- for message in messages %}
    {%- set role = 'ipython' if message.role == 'tool' else message.role %}
    {{- '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' }}
    {%- if tools and loop.first %}
        {{- 'Answer, or write {"name": function, "parameters": arguments}:\\n' }}
        {%- for tool in tools %}{{- tool | tojson(indent=4) + '\\n\\n' }}{%- endfor %}
    {%- endif %}
    {%- if message.tool_calls %}
        {%- if message.tool_calls | length != 1 %}
            {{- raise_exception('This model only supports single tool-calls at once!') }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson + '}' }}
    {%- else %}
        {{- message.content | trim }}
    {%- endif %}
    {{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

GEMMA = """\
{{- bos_token }}
{%- if messages[0].role == 'system' %}
    {%- set first = messages[0].content + '\\n\\n' %}
    {%- set rest = messages[1:] %}
{%- else %}
    {%- set first = '' %}
    {%- set rest = messages %}
{%- endif %}
{%- for message in rest %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant') }}
    {%- endif %}
    {%- set role = 'model' if message.role == 'assistant' else message.role %}
    {{- '<start_of_turn>' + role + '\\n' + (first if loop.first else '') }}
    {{- message.content | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}
"""

# No header: an answer follows right after [/INST] or [/TOOL_RESULTS].
MISTRAL = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- if tools and (loop.last or messages[loop.index0 + 1:]
                | selectattr('role', 'equalto', 'user') | list | length == 0) %}
            {{- '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST] ' + message.content + '[/INST]' }}
    {%- elif message.role == 'assistant' and message.tool_calls %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in message.tool_calls %}
            {%- if call.id | length != 9 %}
                {{- raise_exception('Tool call IDs should have length 9!') }}
            {%- endif %}
            {{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' }}
            {{- ', ' if not loop.last else ']' + eos_token }}
        {%- endfor %}
    {%- elif message.role == 'assistant' %}
        {{- ' ' + message.content | trim + eos_token }}
    {%- elif message.role == 'tool' %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content + ', "call_id": "' }}
        {{- message.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- else %}
        {{- raise_exception('Only user, assistant and tool roles are supported') }}
    {%- endif %}
{%- endfor %}
"""

# A user's turn has no end of its own, only the next header.
DEEPSEEK = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'user' %}{{- '<|User|>' + message.content }}
    {%- elif message.role == 'assistant' %}
        {{- '<|Assistant|>' + message.content + eos_token }}
    {%- else %}{{- message.content }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|Assistant|>' }}{%- endif %}
"""

# The whole text ends with a token of its own, so no conversation begins another.
PHI3 = """\
{%- for message in messages %}
    {{- '<|' + message.role + '|>\\n' + message.content + '<|end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{%- else %}{{- eos_token }}{%- endif %}
"""

# The header of a model that always thinks opens the thinking itself.
ALWAYS_THINKS = CHATML.replace(
    "{{- '<|im_start|>assistant\\n' }}{%- endif %}",
    "{{- '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}",
)

# A tool call disappears from the conversation as soon as its reply stands there.
TOOLLESS = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
FORGETFUL = """\
{%- for message in messages %}
    {%- if not (message.tool_calls and not loop.last) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content }}
        {{- '<tool_call>' if message.tool_calls else '' }}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
