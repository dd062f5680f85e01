"""Chat templates in a few lines each that do what those of well-known families do with calls, reasoning and white
space.
"""

from __future__ import annotations

from tests.unit.data.helpers import NATIVE

CHATML = NATIVE
"""Knows roles and content only."""

LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<|im_start|>' + m['role'] + '\n\n' + m['content'] | trim + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n\n' }}{% endif %}"
)
"""Trims, and knows content only."""

QWEN3 = (
    "{% if tools %}{{ '<|im_start|>system\n' }}{% for t in tools %}{{ t | tojson + '\n' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endif %}{% for m in messages %}{% if m.role == 'tool' %}"
    "{{ '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' }}"
    "{% elif m.role == 'assistant' %}{% set content = m.content %}{% set thought = '' %}"
    "{% if m.reasoning_content is string %}{% set thought = m.reasoning_content %}"
    "{% elif '</think>' in content %}"
    "{% set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{{ '<|im_start|>assistant\n' }}"
    "{% if loop.last and thought %}{{ '<think>\n' + thought.strip('\n') + '\n</think>\n\n' }}{% endif %}"
    "{{ content.lstrip('\n') if thought else content }}"
    "{% for c in m.tool_calls or [] %}{% set f = c.function %}"
    """{{ '<tool_call>\n{"name": "' + f.name + '", "arguments": ' }}"""
    "{{ f.arguments if f.arguments is string else f.arguments | tojson }}{{ '}\n</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Reasoning of the last turn only, from a key or out of the content; calls as JSON."""

CODER = QWEN3.replace(
    "{{ f.arguments if f.arguments is string else f.arguments | tojson }}{{ '}\n</tool_call>' }}",
    "{% for k, v in f.arguments | items %}{{ '<parameter=' + k + '>\n' }}"
    "{{ v if v is string else v | tojson }}{{ '\n</parameter>' }}{% endfor %}{{ '}\n</tool_call>' }}",
)
"""Arguments one by one, text unescaped, as Qwen3-Coder writes them."""

HERMES = QWEN3.replace(
    """{{ '<tool_call>\n{"name": "' + f.name + '", "arguments": ' }}"""
    "{{ f.arguments if f.arguments is string else f.arguments | tojson }}{{ '}\n</tool_call>' }}",
    "{{ '<tool_call>\n' + c.function | tojson(ensure_ascii=True) + '\n</tool_call>' }}",
).replace("m.content + '\n</tool_response>", "m.content | tojson + '\n</tool_response>")
"""Whole calls as ASCII JSON, tool results as a JSON string."""

MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}"
    "{% if tools and loop.first %}{{ '[TOOLS]' + tools | map(attribute='function') | list | tojson + '[/TOOLS]' }}"
    "{% endif %}{{ '[INST]' + m.content + '[/INST]' }}"
    "{% elif m.role == 'tool' %}{{ '[RESULT]{\"content\": ' + m.content | tojson }}"
    "{{ ', \"call_id\": \"' + m.tool_call_id + '\"}[/RESULT]' }}"
    "{% elif m.tool_calls %}{{ '[CALLS][' }}{% for c in m.tool_calls %}"
    "{% if c.id | length != 9 %}{{ raise_exception('call ids must have 9 characters') }}{% endif %}"
    "{{ (c.function | tojson)[:-1] + ', \"id\": \"' + c.id + '\"}' }}{% endfor %}{{ ']<|im_end|>' }}"
    "{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{% endfor %}"
)
"""Wants ids of nine characters; drops content beside calls, reasoning and system texts."""

DEEPSEEK = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}{{ '<A>' }}"
    "{% for c in m.tool_calls or [] %}{{ '<call>' + c.function.name + '\n```json\n' + c.function.arguments + '\n```' }}"
    "{% endfor %}{{ m.content.split('</think>')[-1] + '<|im_end|>' }}"
    "{% elif m.role == 'tool' %}{{ '<out>' + m.content + '</out>' }}{% else %}{{ '<U>' + m.content }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<A>' }}{% endif %}"
)
"""Joins arguments as text; drops every thought."""

HARMONY = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% if m.thinking and (loop.last or m.tool_calls) %}"
    "{{ '<|im_start|>assistant<|channel|>analysis' + m.thinking + '<|im_end|>' }}{% endif %}"
    "{% if m.tool_calls %}{% set f = m.tool_calls[0].function %}"
    "{{ '<|im_start|>assistant to=functions.' + f.name + f.arguments | tojson + '<|im_end|>' }}"
    "{% else %}{{ '<|im_start|>assistant<|channel|>final' + m.content + '<|im_end|>' }}{% endif %}"
    "{% elif m.role == 'tool' %}{{ '<|im_start|>functions' + m.content | tojson + '<|im_end|>' }}"
    "{% else %}{{ '<|im_start|>' + m.role + m.content + '<|im_end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant' }}{% endif %}"
)
"""One call per message, no content beside it; reasoning under another name."""
