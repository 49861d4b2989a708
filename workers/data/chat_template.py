"""Chat templates: Jinja text that turns a conversation into the text that a model reads. Templates come with weights
and are written by others, so they run in Jinja's sandbox, with limits on processor time and on the address space of
the process.

A template gets what templates for Hugging Face's `transformers` rely on: messages, tools, documents,
add_generation_prompt, the special tokens by name, raise_exception, strftime_now, tojson, loop controls,
`{% generation %}`. Its output depends on the conversation only: strftime_now always uses the same date.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import re
import resource
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import FrameType
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from manta.workers.config import CHATML, DataConfig
from manta.workers.data.read_errors import is_there, read_error
from manta.workers.data.tokenizer import SETTINGS, SPECIAL_TOKENS, TEMPLATE, tokenizer_path
from manta.workers.errors import DataError
from manta.workers.system.regular_files import MAX_SETTINGS_BYTES, read_regular

MAX_BYTES = 2**20
"""Maximum size of a template."""
START, STOP = "\ufdd0", "\ufdd1"
"""Marks of the bounds of a generation block during rendering: noncharacters of Unicode."""
DATE = datetime.datetime(2024, 7, 26)
"""The date that strftime_now uses: the one that Llama 3's template has if there is no clock."""
_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_CHATML = (
    "{%- for message in messages %}"
    "{%- if message.tool_calls %}{{ raise_exception('chatml has no calls of tools') }}{% endif %}"
    "{{- '<|im_start|>' + message.role + '\\n' }}"
    "{%- if message.role == 'assistant' %}"
    "{%- generation %}{{- message.content + '<|im_end|>' }}{%- endgeneration %}"
    "{%- else %}{{- message.content + '<|im_end|>' }}{%- endif %}"
    "{{- '\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"
)
"""ChatML."""
_ERRORS = (
    jinja2.TemplateError, ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, SyntaxError,
    TypeError, ValueError,
)  # fmt: skip
"""Errors that a template may raise: all those of Python's expressions."""

Span = tuple[int, int]
"""First character, and one past the last."""

SECONDS = 10.0
"""Processor time, so that a busy machine makes no difference."""
LAST_SECONDS = 20.0
"""Processor time after which the process is killed: a single long operation cannot be interrupted otherwise."""
MAX_CHARACTERS = 2**26
"""Maximum length of the output."""
MEMORY_BYTES = 2**31
"""Maximum memory in addition to what is used before."""


class TemplateFailed(Exception):
    """A template could not render a conversation; says why."""


@dataclass(frozen=True)
class ChatTemplate:
    """A template, and its variables in addition to the conversation."""

    source: str
    tokens: tuple[tuple[str, str], ...] = ()
    """Special tokens by their names in templates, such as bos_token."""
    name: str = CHATML
    """Where it comes from, for messages."""

    @property
    def digest(self) -> str:
        """SHA-256 of everything that its output depends on."""
        return hashlib.sha256(json.dumps([self.source, sorted(self.tokens)]).encode()).hexdigest()

    @property
    def marks_answers(self) -> bool:
        """Whether the template itself marks what the model has to write, by generation blocks."""
        return self._compiled[1]

    def check(self) -> None:
        """Raise DataError if it is not a template."""
        _ = self._compiled

    @cached_property
    def names(self) -> frozenset[str]:
        """All words of the template. A variable or a field that is not among them does not influence its output."""
        return frozenset(re.findall(r"\w+", self.source))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Any = None,
        add_generation_prompt: bool = False,
        documents: Any = None,
    ) -> tuple[str, list[Span]]:
        """The conversation's text, and its generation blocks. For a process's main thread. Raises TemplateFailed."""
        values = {"messages": list(messages), "tools": tools, "documents": documents, **dict(self.tokens)}
        pieces, size = [], 0
        try:
            with bounded():
                for piece in self._compiled[0].generate(**values, add_generation_prompt=add_generation_prompt):
                    pieces.append(piece)
                    size += len(piece)
                    if size > MAX_CHARACTERS:
                        raise TooMuch(f"it writes more than {MAX_CHARACTERS} characters")
        except TooMuch as error:
            raise TemplateFailed(str(error)) from error
        except MemoryError as error:
            raise TemplateFailed("it takes too much memory") from error
        except _ERRORS as error:
            raise TemplateFailed(_one_line(error)) from error
        return _without_bounds("".join(pieces))

    def as_document(self) -> dict[str, Any]:
        """The template as a JSON object."""
        return {"template": self.source, "tokens": dict(self.tokens), "name": self.name}

    @classmethod
    def of_document(cls, document: Mapping[str, Any]) -> ChatTemplate:
        """The template from `as_document`. Raises KeyError, TypeError, ValueError for anything else."""
        tokens = tuple((str(name), str(text)) for name, text in dict(document["tokens"]).items())
        return cls(str(document["template"]), tokens, str(document["name"]))

    @cached_property
    def _compiled(self) -> tuple[jinja2.Template, bool]:
        environment = _environment()
        try:
            template = environment.from_string(self.source)
        except _ERRORS as error:
            line = getattr(error, "lineno", None)
            where = f"{self.name}, line {line}" if line else self.name
            raise DataError(f"{where}: not a chat template in Jinja ({_one_line(error)})") from error
        return template, environment.extensions[_GenerationBlocks.identifier].is_used  # type: ignore[attr-defined]


def open_template(data: DataConfig) -> ChatTemplate:
    """The template for a job's conversations: the one that it names, or the one next to the tokenizer's file. Raises
    DataError if there is none, or it is not a template."""
    folder = None if data.tokenizer_file is None else tokenizer_path(data.tokenizer_file).parent
    tokens = () if folder is None else _special_tokens(folder)
    if data.template == CHATML:
        template = ChatTemplate(_CHATML, tokens)
    elif data.template is not None:
        template = ChatTemplate(_text(Path(data.template)), tokens, data.template)
    elif folder is None:
        raise DataError(f"the {data.tokenizer} tokenizer has no chat template: set data.template to a file or {CHATML}")
    else:
        template = _next_to_tokenizer(folder, tokens)
    template.check()
    return template


def _next_to_tokenizer(folder: Path, tokens: tuple[tuple[str, str], ...]) -> ChatTemplate:
    """Searched like in `transformers`: a separate file takes precedence over tokenizer_config.json."""
    if is_there(folder / TEMPLATE):
        return ChatTemplate(_text(folder / TEMPLATE), tokens, str(folder / TEMPLATE))
    setting = _json(folder / SETTINGS).get("chat_template")
    name = f"chat_template in {folder / SETTINGS}"
    if isinstance(setting, list):  # several by name
        named = {each.get("name"): each.get("template") for each in setting if isinstance(each, dict)}
        if "default" not in named:
            there = ", ".join(map(repr, named)) or "none"
            raise DataError(f"{name} has no template called 'default', only {there}: set data.template to a file")
        setting = named["default"]
    if isinstance(setting, str):
        return ChatTemplate(setting, tokens, name)
    raise DataError(
        f"{folder} has no chat template (looked for {TEMPLATE}, and chat_template in {SETTINGS}): set data.template to "
        f"a template's file, or to {CHATML}"
    )


def _special_tokens(folder: Path) -> tuple[tuple[str, str], ...]:
    special: dict[str, str] = {}
    for content in (_json(folder / SPECIAL_TOKENS), _json(folder / SETTINGS)):  # the latter takes precedence
        for name in _TOKENS:
            setting = content.get(name)
            text = setting.get("content") if isinstance(setting, dict) else setting
            if isinstance(text, str):
                special[name] = text
    return tuple(sorted(special.items()))


def _json(path: Path) -> dict[str, Any]:
    """The object in a file; empty if there is no file."""
    if not is_there(path):
        return {}
    try:
        content = json.loads(read_regular(path, MAX_SETTINGS_BYTES))
    except OSError as error:
        raise read_error(path, error) from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not valid JSON ({_one_line(error)})") from error
    if not isinstance(content, dict):
        raise DataError(f"{path} is not an object")
    return content


def _text(path: Path) -> str:
    try:
        content = read_regular(path, MAX_BYTES)
    except OSError as error:
        raise read_error(path, error, f"the chat template cannot be read: {path} ({error.strerror})") from error
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 ({error.reason} at byte {error.start})") from error


def _without_bounds(text: str) -> tuple[str, list[Span]]:
    """The text between the marks of generation blocks, and where these were; of nested ones the outer."""
    if START not in text:
        return text, []
    spans: list[Span] = []
    kept, size, depth, begun = [], 0, 0, 0
    for part in re.split(f"([{START}{STOP}])", text):
        if part == START:
            depth, begun = depth + 1, size if depth == 0 else begun
        elif part == STOP:
            depth -= 1
            if depth == 0:
                spans.append((begun, size))
        else:
            kept.append(part)
            size += len(part)
    return "".join(kept), [span for span in spans if span[0] < span[1]]


def _environment() -> ImmutableSandboxedEnvironment:
    # Nothing is computed while a template is compiled, since that is not limited: neither by the optimizer nor, because
    # `finalize` needs the context, for constant output.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, "jinja2.ext.loopcontrols"],
        optimized=False, finalize=_as_it_is,
    )  # fmt: skip
    environment.filters["tojson"] = _tojson
    environment.globals.update(raise_exception=_raise_exception, strftime_now=DATE.strftime)
    return environment


@jinja2.pass_context
def _as_it_is(context: Context, value: Any) -> Any:
    return value


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Plain JSON: Jinja's own filter escapes characters for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: object) -> None:
    raise jinja2.TemplateError(str(message))


class _GenerationBlocks(Extension):
    """`{% generation %}`: bounds around what the model has to write."""

    tags = {"generation"}  # noqa: RUF012 (as Jinja declares it)

    def __init__(self, environment: jinja2.Environment):
        super().__init__(environment)
        self.is_used = False
        """Whether the template has such a block."""

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The block's content between its marks, in a scope of its own."""
        self.is_used = True
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        first, last = (nodes.Output([nodes.TemplateData(bound)], lineno=line) for bound in (START, STOP))
        return [first, nodes.Scope(body, lineno=line), last]


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


class TooMuch(Exception):
    """A limit was reached; says which."""


@contextmanager
def bounded() -> Iterator[None]:
    """Limits for code of others, which may never end, or use any amount of memory; for the main thread of a process
    that does nothing else meanwhile. Within the block, raise TooMuch after SECONDS of processor time, or MemoryError
    beyond MEMORY_BYTES; kill the process, with SIGVTALRM, after LAST_SECONDS."""
    handler = signal.signal(signal.SIGPROF, _too_long)
    deadly = signal.signal(signal.SIGVTALRM, signal.SIG_DFL)
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (_lower(_address_space() + MEMORY_BYTES, *before), before[1]))
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    signal.setitimer(signal.ITIMER_VIRTUAL, LAST_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        resource.setrlimit(resource.RLIMIT_AS, before)
        signal.signal(signal.SIGPROF, handler)
        signal.signal(signal.SIGVTALRM, deadly)


def _too_long(number: int, frame: FrameType | None) -> None:
    raise TooMuch(f"it is not done after {SECONDS:.0f} seconds of computing")


def _address_space() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()


def _lower(*limits: int) -> int:
    return min(limit for limit in limits if limit != resource.RLIM_INFINITY)
