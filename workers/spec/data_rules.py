"""Rules across the fields of a JobSpec about the corpus, its tokenizer, and conversations. Pure Python.

Each rule is a function of the spec that yields problems, as in `rules.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from manta.workers.config import BYTE_VOCABULARY, CHATML, END_OF_TEXT, NO_TOKEN, DataConfig, JobSpec
from manta.workers.spec.problems import Problem

MAX_BETWEEN_WEIGHTS = 100_000


def _documents_end(spec: JobSpec) -> Iterator[Problem]:
    data = spec.data
    if data.documents == "together":
        return
    has_texts = any(each.source != "chat" for each in data.corpora)  # conversations have their own ends
    if has_texts and data.source == "megatron" and data.tokenizer == "bytes":
        problem = (
            "documents apart needs an end-of-document token: set data.tokenizer to the file of the tokenizer that made "
            "the tokens"
        )
        yield Problem("data.documents", problem, "together")
    elif has_texts and data.end_of_document in ((NO_TOKEN, None) if data.tokenizer == "bytes" else (NO_TOKEN,)):
        problem = "documents apart needs an end-of-document token"
        yield Problem("data.end_of_document", problem, END_OF_TEXT if data.tokenizer == "bytes" else "null")
    if spec.train.compile:
        yield Problem("train.compile", "with documents apart each micro-batch would be recompiled", "false")


def _vocabulary_holds_tokenizer(spec: JobSpec) -> Iterator[Problem]:
    data, size = spec.data, spec.model.vocabulary_size
    if data.source == "megatron" and data.tokenizer == "bytes" and size is None:
        yield Problem(
            "model.vocabulary_size",
            "the vocabulary of source megatron is not known: set its size, or set data.tokenizer to the file "
            "of the tokenizer that made them",
            "50257",
        )
    is_read = spec.model.from_ is not None and data.tokenizer_file is not None  # which of its ids occur is seen then
    if size is not None and data.token_ids is not None and size < data.token_ids and not is_read:
        name = "the tokenizer's" if data.tokenizer_file else f"the {data.tokenizer} tokenizer's"
        yield Problem(
            "model.vocabulary_size",
            f"vocabulary_size ({size}) is smaller than {name} ({data.token_ids})",
            str(data.token_ids),
        )


def _tokenizer_is_whole(spec: JobSpec) -> Iterator[Problem]:
    data = spec.data
    if data.tokenizer == "bpe" and data.source == "megatron":
        yield Problem(
            "data.tokenizer", "source megatron already has tokens, so no tokenizer can be trained on it", "bytes"
        )
    if data.tokenizer == "bytes" and data.source == "megatron":
        for number, each in enumerate(data.validation):
            if data.corpus_of(each).source != "megatron":
                problem = f"the texts of {each.name} need the tokenizer that made the corpus's tokens (data.tokenizer)"
                yield Problem(f"data.validation.{number}.source", problem, "megatron")
    if data.tokenizer == "bytes" and data.tokenizer_vocabulary not in (None, data.token_ids):
        problem = f"the bytes tokenizer has {data.token_ids} ids, not {data.tokenizer_vocabulary}"
        yield Problem("data.tokenizer_vocabulary", problem, "null")
    least = BYTE_VOCABULARY + 1
    if data.tokenizer == "bpe" and (data.tokenizer_vocabulary or least) < least:
        problem = f"bpe needs at least {least} ids: one for each byte, and one for the end of a document"
        yield Problem("data.tokenizer_vocabulary", problem, str(least))
    if data.tokenizer == "bytes" and data.end_of_document not in (None, NO_TOKEN, END_OF_TEXT):
        yield Problem(
            "data.end_of_document",
            f"the bytes tokenizer supports {END_OF_TEXT} (id {BYTE_VOCABULARY}) and none, not {data.end_of_document!r}",
            END_OF_TEXT,
        )
    if data.special_tokens and (data.tokenizer_file is None or data.source in ("chat", "megatron")):
        of = {"chat": "the chat template writes all special tokens", "megatron": "the corpus is already tokenized"}
        problem = of.get(data.source, f"the {data.tokenizer} tokenizer adds no special tokens")
        yield Problem("data.special_tokens", problem, "false")
    if not data.tokenizer.strip() or "\0" in data.tokenizer:
        yield Problem("data.tokenizer", "must be bytes, bpe, or the path of a tokenizer.json", "bytes")


def _paths_match_source(spec: JobSpec) -> Iterator[Problem]:
    yield from _paths_match(spec.data, "data")
    for number, each in enumerate(spec.data.validation):
        yield from _paths_match(spec.data.corpus_of(each), f"data.validation.{number}")


def _paths_match(data: DataConfig, where: str) -> Iterator[Problem]:
    """Checks the paths of a corpus or of a validation set, in the section at `where`."""
    if data.source == "python-stdlib" and data.paths:
        yield Problem(f"{where}.paths", "source python-stdlib reads no paths; source text does", "[]")
    if data.source != "python-stdlib" and not data.paths:
        example = {"text": "corpus.txt", "jsonl": "corpus.jsonl", "parquet": "corpus.parquet", "chat": "chats.jsonl"}
        yield Problem(
            f"{where}.paths",
            f"source {data.source} needs at least one file or directory",
            f"[{example.get(data.source, 'corpus.bin')}]",
        )
    if not all(path.strip() for path in data.paths):
        named = [path for path in data.paths if path.strip()]
        yield Problem(f"{where}.paths", "a path cannot be blank", json.dumps(named or ["/data/corpus.txt"]))
    if any("\0" in path for path in data.paths):
        kept = [path.replace("\0", "") for path in data.paths]
        yield Problem(f"{where}.paths", "a path cannot contain a null byte", json.dumps(kept))
    for url in filter(_URL.match, data.paths):
        mounted = [_URL.sub("/mnt/", each) for each in data.paths]
        yield Problem(f"{where}.paths", _NO_URL.format(url), json.dumps(mounted))


_URL = re.compile(r"^[A-Za-z][A-Za-z0-9+.-]*://")
_NO_URL = "{} is a URL, but files are read from folders: mount the store on the service's machine and on the nodes"


def _tokenizer_is_no_url(spec: JobSpec) -> Iterator[Problem]:
    data = spec.data
    for key, named, otherwise in (("tokenizer", data.tokenizer, "bytes"), ("template", data.template, CHATML)):
        if named is not None and _URL.match(named):
            yield Problem(f"data.{key}", _NO_URL.format(named), otherwise)


def _weights_match_paths(spec: JobSpec) -> Iterator[Problem]:
    weights, paths = spec.data.weights, spec.data.paths
    if weights is None:
        return
    if not weights or len(weights) != len(paths):
        each = [1.0] * len(paths) if paths else None
        problem = f"{len(weights) or 'no'} weights for {len(paths) or 'no'} paths: give one for each path"
        yield Problem("data.weights", problem, json.dumps(each))
    elif max(weights) / min(weights) > MAX_BETWEEN_WEIGHTS:
        yield Problem(
            "data.weights",
            f"the largest weight is more than {MAX_BETWEEN_WEIGHTS} times the smallest: leave that path out",
            "[" + ", ".join(f"{max(weight, max(weights) / MAX_BETWEEN_WEIGHTS):.6f}" for weight in weights) + "]",
        )


DATA_RULES = (
    _documents_end,
    _vocabulary_holds_tokenizer,
    _tokenizer_is_whole,
    _paths_match_source,
    _tokenizer_is_no_url,
    _weights_match_paths,
)


def _only_chat_has_answers(spec: JobSpec) -> Iterator[Problem]:
    data = spec.data
    if _has_conversations(spec):
        return
    if data.template is not None:
        problem = f"source {data.source} does not use a template; only source chat does"
        yield Problem("data.template", problem, "null")
    if data.loss == "answers":
        problem = f"source {data.source} has no answers; only source chat does"
        yield Problem("data.loss", problem, "all")


def _template_is_known(spec: JobSpec) -> Iterator[Problem]:
    data = spec.data
    if _has_conversations(spec) and data.template is None and data.tokenizer_file is None:
        problem = f"conversations need a chat template, and the {data.tokenizer} tokenizer has none"
        yield Problem("data.template", problem, CHATML)
    if data.template is not None and ("\0" in data.template or not data.template.strip()):
        yield Problem("data.template", "a path cannot be blank or contain a null byte", CHATML)


def _has_conversations(spec: JobSpec) -> bool:
    return any(each.source == "chat" for each in spec.data.corpora)


CHAT_RULES = (
    _only_chat_has_answers,
    _template_is_known,
)
