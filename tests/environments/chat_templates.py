"""Tokenizers of the forms that families of models have: special tokens, and what their templates write and refuse.

The templates are short, and write what the models' own do for the conversations of the tests.
"""

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
"""Of Qwen2.5: append-only."""
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
    "{% for tool in tools %}{{ tool | tojson(indent=4) }}{% endfor %}{% endif %}<|eot_id|>"
    "{% for message in messages %}"
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
GEMMA3 = (
    "{{ bos_token }}{% for message in messages %}{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% set role = 'model' if message.role == 'assistant' else message.role %}"
    "{{ '<start_of_turn>' + role + '\n' + message.content | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
"""No tools, and nobody speaks twice."""
MISTRAL = (
    "{{ bos_token }}{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "{% for message in messages %}{% if message.role == 'user' %}[INST]{{ message.content }}[/INST]"
    "{% elif message.role == 'tool' %}{% if message.tool_call_id | length != 9 %}"
    "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}"
    '[TOOL_RESULTS]{"content": {{ message.content | tojson }}, "call_id": "{{ message.tool_call_id }}"}[/TOOL_RESULTS]'
    "{% elif message.tool_calls %}[TOOL_CALLS][{% for call in message.tool_calls %}"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}, "id": "{{ call.id }}"}'
    "{% if not loop.last %}, {% endif %}{% endfor %}]{{ eos_token }}"
    "{% else %}{{ message.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
"""No generation prompt; ids of calls are text."""
GLM = (
    "[gMASK]<sop>{% if tools %}<|system|>\n{{ tools | tojson }}{% endif %}{% for message in messages %}"
    "{% if message.role == 'user' %}{{ '<|user|>\n' + message.content }}"
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
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'user' %}<｜User｜>{{ message.content }}"  # noqa: RUF001
    "{% elif message.role == 'tool' %}"
    "{% if messages[loop.index0 - 1].role != 'tool' %}<｜tool▁outputs▁begin｜>{% endif %}"  # noqa: RUF001
    "<｜tool▁output▁begin｜>{{ message.content }}<｜tool▁output▁end｜>"  # noqa: RUF001
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<｜tool▁outputs▁end｜>{% endif %}"  # noqa: RUF001
    "{% elif message.tool_calls and message.content is none %}<｜Assistant｜><｜tool▁calls▁begin｜>"  # noqa: RUF001
    "{% for call in message.tool_calls %}<｜tool▁call▁begin｜>function<｜tool▁sep｜>"  # noqa: RUF001
    "{{ call.function.name + '\n```json\n' + call.function.arguments + '\n```' }}<｜tool▁call▁end｜>{% endfor %}"  # noqa: RUF001
    "<｜tool▁calls▁end｜><｜end▁of▁sentence｜>"  # noqa: RUF001
    "{% else %}<｜Assistant｜>{{ message.content }}<｜end▁of▁sentence｜>{% endif %}{% endfor %}"  # noqa: RUF001
    "{% if add_generation_prompt and messages[-1].role != 'tool' %}<｜Assistant｜>{% endif %}"  # noqa: RUF001
)
"""Calls only with the content null, and their arguments as text."""

TEMPLATES = {
    "qwen2.5": CHATML,
    "qwen3": QWEN3,
    "qwen3 thinking": QWEN3_THINKING,
    "llama3": LLAMA3,
    "gemma3": GEMMA3,
    "mistral": MISTRAL,
    "glm": GLM,
    "deepseek": DEEPSEEK,
}
SPECIAL = {
    "qwen2.5": "<|im_end|> <|im_start|> <|endoftext|>",
    "qwen3": "<|im_end|> <|im_start|> <|endoftext|>",
    "qwen3 thinking": "<|im_end|> <|im_start|> <|endoftext|>",
    "llama3": "<|eot_id|> <|begin_of_text|> <|end_of_text|> <|eom_id|> <|python_tag|> <|start_header_id|> "
    "<|end_header_id|>",
    "gemma3": "<end_of_turn> <bos> <start_of_turn>",
    "mistral": "</s> <s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] [/TOOL_RESULTS] "
    "[TOOL_CALLS] [ARGS]",
    "glm": "<|user|> <|observation|> <|assistant|> <|system|> [gMASK] <sop> <|endoftext|>",
    "deepseek": "<｜end▁of▁sentence｜> <｜begin▁of▁sentence｜> <｜User｜> <｜Assistant｜> "  # noqa: RUF001
    + " ".join(f"<｜tool▁{part}｜>" for part in ["calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep"])  # noqa: RUF001
    + " "
    + " ".join(f"<｜tool▁{part}｜>" for part in ["outputs▁begin", "outputs▁end", "output▁begin", "output▁end"]),  # noqa: RUF001
}
"""The first ends a turn."""
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
