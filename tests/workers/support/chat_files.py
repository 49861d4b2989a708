"""Conversations, and chat templates in the manner of those that models come with, beside a small tokenizer."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizer_files import byte_level

TOKENS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>",
    "<|eot_id|>", "<s>", "</s>", "[INST]", "[/INST]",
)  # fmt: skip
LLAMA_3 = """{{- bos_token }}
{%- for message in messages %}
    {{- '<|start_header_id|>' ~ message.role ~ '<|end_header_id|>\\n\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}
        {{- message.content | trim ~ '<|eot_id|>' }}
        {%- endgeneration %}
    {%- else %}
        {{- message.content | trim ~ '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
QWEN = """{%- if tools %}
    {{- '<|im_start|>system\\nTools: ' ~ (tools | tojson) ~ '<|im_end|>\\n' }}
{%- elif messages[0].role != 'system' %}
    {{- '<|im_start|>system\\nBe helpful.<|im_end|>\\n' }}
{%- endif %}
{%- set last = namespace(question=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{% set last.question = loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}
        {%- if loop.index0 > last.question %}
            {{- '<think>\\n\\n</think>\\n\\n' }}
        {%- endif %}
        {{- message.content + '<|im_end|>' }}
        {%- endgeneration %}
        {{- '\\n' }}
    {%- else %}
        {{- message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
"""Reasoning, which is empty here, stands before answers to the last question alone."""
MISTRAL = """{{ bos_token }}
{%- if messages[0].role == 'system' %}
    {%- set system, rest = messages[0].content ~ '\\n\\n', messages[1:] %}
{%- else %}
    {%- set system, rest = '', messages %}
{%- endif %}
{%- for message in rest %}
    {%- if (message.role == 'user') != loop.index0 is even %}
        {{- raise_exception('roles must alternate user/assistant') }}
    {%- endif %}
    {%- if message.role == 'user' %}
        {{- '[INST] ' ~ (system if loop.first else '') ~ message.content ~ ' [/INST]' }}
    {%- elif message.role == 'assistant' %}
        {%- generation %}{{ ' ' ~ message.content ~ eos_token }}{% endgeneration %}
    {%- endif %}
{%- endfor %}
"""
TEMPLATES = {"llama 3": LLAMA_3, "qwen": QWEN, "mistral": MISTRAL}
BOUNDS = {
    "llama 3": {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
    "qwen": {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
    "mistral": {"bos_token": "<s>", "eos_token": "</s>"},
}


def plain(template: str) -> str:
    """`template` without its generation blocks, which writes the same."""
    return re.sub(r"\{%(-?) (?:end)?generation (-?)%\}", r"{%\1 if true \2%}{% endif \2%}", template)


def said(*texts: str, system: str | None = None) -> list[dict[str, Any]]:
    """A conversation in which user and assistant speak in turn."""
    first = [] if system is None else [{"role": "system", "content": system}]
    return first + [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]


CONVERSATIONS = [
    said("What is 3 squared?", "9"),
    said("Größe?", "klein: 🙂", "and 日本語?\n", "\n  number 12 follows.\n\nso on 🙂"),
    said("hello", "The number 4 is 16 when squared", "more", "étude №5", "and", "", system="You count."),
    said("n " * 40, "follows; " * 9),
    said("unanswered", "yes", "and then?"),
]


def tokenizer_folder(folder: Path, kind: str = "qwen", template: str | None = None, in_settings: bool = False) -> Path:
    """A tokenizer with the template of `kind` (or another) beside it, as `save_pretrained` leaves it."""
    folder.mkdir(parents=True, exist_ok=True)
    byte_level(folder / "tokenizer.json", 420, TOKENS)
    template = TEMPLATES[kind] if template is None else template
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **BOUNDS[kind]}
    if in_settings:
        settings["chat_template"] = template
    else:
        (folder / "chat_template.jinja").write_text(template)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def chat_file(path: Path, conversations: Sequence[Any] = CONVERSATIONS, key: str = "messages") -> Path:
    """JSONL of conversations."""
    path.write_text("".join(json.dumps({key: each}) + "\n" for each in conversations))
    return path
