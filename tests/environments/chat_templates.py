"""Tokenizers of the forms that families of models have: special tokens, and what their templates write and refuse.

The templates are short, and write what the models' own do for the conversations of the tests. With the traps of these:
Qwen2.5, Qwen3 (hybrid, thinking, instruct), Llama 3.1 and 3.2, Gemma 3, Mistral Nemo and Small 3, GLM 4.5 and 4.6,
DeepSeek R1 and V3.1, gpt-oss.
"""

import re
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TOOLS_OF_CHATML = (
    "{%- if tools %}<|im_start|>system\n"
    "{% if messages[0].role == 'system' %}{{ messages[0].content + '\n\n' }}{% endif %}"
    "# Tools\n<tools>{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}\n</tools>\nWrite "
    '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call><|im_end|>\n'
    "{%- elif messages[0].role == 'system' %}<|im_start|>system\n{{ messages[0].content }}<|im_end|>\n{% endif %}\n"
)
CALLS_OF_CHATML = (
    "{% for call in message.tool_calls or [] %}{% if content or not loop.first %}{{ '\n' }}{% endif %}"
    '<tool_call>\n{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "{{ '\n</tool_call>' }}{% endfor %}"
)
ANSWERS_OF_CHATML = (
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "{{ '\n<tool_response>\n' + message.content + '\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"
)
CHATML = (
    TOOLS_OF_CHATML.strip("\n") + "{% for message in messages %}{% set content = message.content or '' %}"
    "{% if message.role == 'assistant' %}{{ '<|im_start|>assistant\n' + content }}"
    + CALLS_OF_CHATML
    + "{{ '<|im_end|>\n' }}{% elif message.role == 'tool' %}"
    + ANSWERS_OF_CHATML
    + "{% elif message.role == 'user' %}{{ '<|im_start|>user\n' + content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Of Qwen2.5 and of Qwen3-Instruct: append-only."""
QWEN3 = (
    TOOLS_OF_CHATML.strip("\n") + "{% set ns = namespace(last=-1) %}"
    "{% for message in messages %}{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for message in messages %}{% set content = message.content or '' %}"
    "{% if message.role == 'assistant' %}{{ '<|im_start|>assistant\n' }}"
    "{% set reasoning = message.reasoning_content or '' %}"
    "{% if loop.index0 > ns.last and (loop.last or reasoning) %}"
    "{{ '<think>\n' + reasoning.strip('\n') + '\n</think>\n\n' }}{% endif %}{{ content }}"
    + CALLS_OF_CHATML
    + "{{ '<|im_end|>\n' }}{% elif message.role == 'tool' %}"
    + ANSWERS_OF_CHATML
    + "{% elif message.role == 'user' %}{{ '<|im_start|>user\n' + content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{% endif %}"
)
"""Drops the reasoning of turns before the last message of the user's."""
QWEN3_THINKING = QWEN3.replace(
    "{{ '<|im_start|>assistant\n' }}{% if enable_thinking",
    "{{ '<|im_start|>assistant\n<think>\n' }}{% if enable_thinking",
)
"""The generation prompt begins a thought, as of Qwen3-Thinking and DeepSeek-R1."""
LLAMA3 = (
    "{{ bos_token }}<|start_header_id|>system<|end_header_id|>\n\n{% if tools %}Environment: ipython\n"
    'Write {"name": function name, "parameters": dictionary of argument name and its value}.'
    "{% for tool in tools %}{{ tool | tojson(indent=4) }}{% endfor %}{% endif %}"
    "{% if messages[0].role == 'system' %}{{ messages[0].content }}{% set messages = messages[1:] %}{% endif %}"
    "<|eot_id|>{% for message in messages %}"
    "{% if message.tool_calls %}{% if message.tool_calls | length != 1 %}"
    "{{ raise_exception('This model only supports single tool-calls at once!') }}{% endif %}"
    "{% set call = message.tool_calls[0].function %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
    '{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}<|eot_id|>'
    "{% elif message.role == 'tool' %}{{ '<|start_header_id|>ipython<|end_header_id|>\n\n' }}"
    "{{ message.content | tojson }}<|eot_id|>"
    "{% else %}{{ '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' + message.content | trim }}<|eot_id|>"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
"""One call a turn."""
ALTERNATES = (
    "{% if (message.role == 'user') != (turns.number % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% set turns.number = turns.number + 1 %}"
)
GEMMA3 = (
    "{{ bos_token }}{% set turns = namespace(number=0, first='') %}{% if messages[0].role == 'system' %}"
    "{% set turns.first = messages[0].content + '\n\n' %}{% set messages = messages[1:] %}{% endif %}"
    "{% for message in messages %}"
    + ALTERNATES
    + "{% set role = 'model' if message.role == 'assistant' else message.role %}"
    "{{ '<start_of_turn>' + role + '\n' + (turns.first if loop.first else '') + message.content | trim }}"
    "{{ '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
"""No tools, and nobody speaks twice; the system message is the beginning of the user's first one."""
MISTRAL = (
    "{{ bos_token }}{% set turns = namespace(number=0) %}{% if messages[0].role == 'system' %}"
    "[SYSTEM_PROMPT]{{ messages[0].content }}[/SYSTEM_PROMPT]{% set messages = messages[1:] %}{% endif %}"
    "{% set asked = messages | selectattr('role', 'equalto', 'user') | list %}"
    "{% for message in messages %}{% if not message.tool_calls and message.role != 'tool' %}"
    + ALTERNATES
    + "{% endif %}{% if message.role == 'user' %}"
    "{% if tools and message == asked[-1] %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "[INST]{{ message.content }}[/INST]"
    "{% elif message.role == 'tool' %}{% if message.tool_call_id | length != 9 %}"
    "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}"
    '[TOOL_RESULTS]{"content": {{ message.content | tojson }}, "call_id": "{{ message.tool_call_id }}"}[/TOOL_RESULTS]'
    "{% elif message.tool_calls %}[TOOL_CALLS][{% for call in message.tool_calls %}"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}, "id": "{{ call.id }}"}'
    "{% if not loop.last %}, {% endif %}{% endfor %}]{{ eos_token }}"
    "{% else %}{{ message.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
"""No generation prompt; ids of calls are text; the user's last message has the tools."""
GLM = (
    "[gMASK]<sop>{% if tools %}<|system|>\n{{ tools | tojson }}{% endif %}{% for message in messages %}"
    "{% if message.role in ('user', 'system') %}{{ '<|' + message.role + '|>\n' + message.content }}"
    "{% elif message.role == 'tool' %}{% if messages[loop.index0 - 1].role != 'tool' %}<|observation|>{% endif %}"
    "{{ '\n<tool_response>\n' + message.content + '\n</tool_response>' }}"
    "{% else %}{{ '<|assistant|>\n<think></think>' }}{% if message.content %}{{ '\n' + message.content }}{% endif %}"
    "{% for call in message.tool_calls or [] %}{{ '\n<tool_call>' + call.function.name + '\n' }}"
    "{% for name, value in call.function.arguments.items() %}{{ '<arg_key>' + name + '</arg_key>\n' }}"
    "<arg_value>{{ value if value is string else value | tojson }}</arg_value>{{ '\n' }}{% endfor %}</tool_call>"
    "{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n<think></think>' }}{% endif %}"
)
"""No token ends a turn: the one that begins the next does."""
DEEPSEEK = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ messages[0].content }}{% set messages = messages[1:] %}"
    "{% endif %}{% for message in messages %}{% if message.role == 'user' %}<|User|>{{ message.content }}"
    "{% elif message.role == 'tool' %}<|tool_output_begin|>{{ message.content }}<|tool_output_end|>"
    "{% elif message.tool_calls %}{% if messages[loop.index0 - 1].role == 'user' %}<|Assistant|></think>{% endif %}"
    "{{ message.content or '' }}<|tool_calls_begin|>{% for call in message.tool_calls %}<|tool_call_begin|>"
    "{{ call.function.name + '<|tool_sep|>' + call.function.arguments }}<|tool_call_end|>{% endfor %}"
    "<|tool_calls_end|><|end_of_sentence|>"
    "{% else %}{% if messages[loop.index0 - 1].role == 'user' %}<|Assistant|></think>{% endif %}"
    "{{ message.content }}<|end_of_sentence|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt and messages[-1].role == 'user' %}<|Assistant|></think>{% endif %}"
)
"""Of V3.1, with plain bars and spaces: no turn begins after answers of tools; arguments of calls are text."""
DEEPSEEK_R1 = (
    DEEPSEEK.replace(
        "messages[-1].role == 'user' %}<|Assistant|></think>", "messages[-1].role == 'user' %}<|Assistant|><think>\n"
    )
    .replace("</think>", "")
    .replace("{{ call.function.name", "function<|tool_sep|>{{ call.function.name")
    .replace("'<|tool_sep|>' + call.function.arguments", "'\n```json\n' + call.function.arguments + '\n```'")
)
"""The generation prompt begins a thought, none of which is rendered again; calls have code blocks."""
GPT_OSS = (
    "<|start|>system<|message|># Valid channels: analysis, commentary, final.<|end|>"
    "{% set last = namespace(name='') %}{% if messages[0].role == 'system' or tools %}<|start|>developer<|message|>"
    "{% if messages[0].role == 'system' %}{{ messages[0].content }}{% set messages = messages[1:] %}{% endif %}"
    "{{ tools | tojson if tools else '' }}<|end|>{% endif %}"
    "{% for message in messages %}{% if message.role == 'user' %}<|start|>user<|message|>{{ message.content }}<|end|>"
    "{% elif message.role == 'tool' %}{{ '<|start|>functions.' + last.name + ' to=assistant<|channel|>commentary' }}"
    "<|message|>{{ message.content | tojson }}<|end|>"
    "{% elif message.tool_calls %}{% set call = message.tool_calls[0].function %}{% set last.name = call.name %}"
    "{% if message.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ message.thinking }}<|end|>{% endif %}"
    "{{ '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}"
    "{{ call.arguments | tojson }}<|call|>"
    "{% elif loop.last and not add_generation_prompt %}"
    "{% if message.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ message.thinking }}<|end|>{% endif %}"
    "<|start|>assistant<|channel|>final<|message|>{{ message.content }}<|return|>"
    "{% else %}<|start|>assistant<|channel|>final<|message|>{{ message.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
"""Channels; what ends a turn is another token once a message follows; the first call of a turn alone is written."""


def with_wide_marks(text: str) -> str:
    """Return a text with DeepSeek's bars and spaces in the marks of its template."""
    return re.sub(r"<\|([A-Za-z_]+)\|>", lambda mark: f"<｜{mark[1].replace('_', '▁')}｜>", text)  # noqa: RUF001


TEMPLATES = {
    "qwen2.5": CHATML,
    "qwen3": QWEN3,
    "qwen3 thinking": QWEN3_THINKING,
    "llama3": LLAMA3,
    "gemma3": GEMMA3,
    "mistral": MISTRAL,
    "glm": GLM,
    "deepseek": with_wide_marks(DEEPSEEK),
    "deepseek r1": with_wide_marks(DEEPSEEK_R1),
    "gpt-oss": GPT_OSS,
}
OF_CHATML = "<|im_end|> <|im_start|> <|endoftext|>"
OF_DEEPSEEK = with_wide_marks(
    "<|end_of_sentence|> <|begin_of_sentence|> <|User|> <|Assistant|> <|tool_calls_begin|> <|tool_calls_end|> "
    "<|tool_call_begin|> <|tool_call_end|> <|tool_sep|> <|tool_output_begin|> <|tool_output_end|> "
    "<|tool_outputs_begin|> <|tool_outputs_end|>"
)
SPECIAL = {
    "qwen2.5": OF_CHATML,
    "qwen3": OF_CHATML,
    "qwen3 thinking": OF_CHATML,
    "llama3": "<|eot_id|> <|begin_of_text|> <|end_of_text|> <|eom_id|> <|python_tag|> <|start_header_id|> "
    "<|end_header_id|>",
    "gemma3": "<end_of_turn> <bos> <start_of_turn>",
    "mistral": "</s> <s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] [/TOOL_RESULTS] "
    "[TOOL_CALLS] [CALL_ID] [ARGS] [SYSTEM_PROMPT] [/SYSTEM_PROMPT]",
    "glm": "<|user|> <|observation|> <|assistant|> <|system|> [gMASK] <sop> <|endoftext|>",
    "deepseek": OF_DEEPSEEK,
    "deepseek r1": OF_DEEPSEEK,
    "gpt-oss": "<|return|> <|startoftext|> <|call|> <|start|> <|end|> <|message|> <|channel|> <|constrain|>",
}
"""The first ends a turn."""
ADD: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}},
    },
}
MARKS = [
    f"<{slash}{name}>"
    for name in ("think", "tool_call", "tool_response", "arg_key", "arg_value")
    for slash in ("", "/")
]


def make_tokenizer(family: str) -> Any:
    """Return a tokenizer of bytes and some merges, of which two line breaks are one, with a family's template."""
    tokenizer = Tokenizer(models.BPE())
    breaks = pre_tokenizers.Split(Regex("[\r\n]+"), "isolated")  # as of Qwen and Llama 3
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([breaks, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([*TEMPLATES.values(), *["four\n\n"] * 99] * 4, trainer)
    end, *others = SPECIAL[family].split()
    tokenizer.add_special_tokens([end, *others])
    marks = [mark for mark in MARKS if mark in TEMPLATES[family]]
    tokenizer.add_tokens([AddedToken(mark, normalized=False) for mark in marks])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end, bos_token=others[0])
    fast.chat_template = TEMPLATES[family]
    return fast
