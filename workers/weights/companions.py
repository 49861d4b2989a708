"""The files next to exported weights: config.json, generation_config.json and the tokenizer's. Pure Python."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

from manta.workers.config import BYTE_VOCABULARY, END_OF_TEXT, NO_TOKEN, JobSpec
from manta.workers.data.chat_template import ChatTemplate, TemplateFailed
from manta.workers.data.read_errors import weights_error
from manta.workers.data.tokenizer import CHAT_FILE as CHAT
from manta.workers.data.tokenizer import FILE_NAME as TOKENIZER
from manta.workers.data.tokenizer import MAX_BYTES, TEMPLATE, FileTokenizer, content_of, tokenizer_path
from manta.workers.errors import DataError, WeightsError
from manta.workers.storage.files import files_of
from manta.workers.storage.locations import Location
from manta.workers.system.regular_files import MAX_SETTINGS_BYTES, read_regular
from manta.workers.weights.config import CONFIG, TOKENS, Keys, huggingface_config, read_config, shape_of

GENERATION = "generation_config.json"
_SETTINGS = "tokenizer_config.json"
_TOKENIZER_FILES = (
    _SETTINGS, "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "tokenizer.model",
    "chat_template.jinja", "chat_template.json",
)  # fmt: skip


def source_config(spec: JobSpec) -> Keys | None:
    """config.json of the weights that the job began with; None if there are none, or it can no longer be read."""
    if spec.model.from_ is None:
        return None
    try:
        return read_config(Path(spec.model.from_))
    except WeightsError:
        return None


def companion_files(spec: JobSpec, dtype: str, checkpoint: Location) -> dict[str, str]:
    """Names and texts of the JSON files. `dtype`: of the weights, as torch calls it. Raises WeightsError if
    transformers has no model that computes the same."""
    source, tokenizer = source_config(spec), _tokenizer(spec, checkpoint)
    positions, tokens = _of_source(source)
    if source is None and (end := _end_of_documents(spec, tokenizer)) is not None:
        tokens = {"eos_token_id": end[0]}
    config = huggingface_config(spec, dtype, positions) | tokens
    generation = _json({"_from_model_config": True, **tokens})
    if source is not None and spec.model.from_ is not None:
        # The way to draw text from the model is as good a guess as before.
        theirs = Path(spec.model.from_) / GENERATION
        if theirs.is_file():
            generation = _content(theirs, MAX_SETTINGS_BYTES).decode(errors="replace")
    if spec.data.source == "chat" and tokenizer is not None:
        generation = _ending_answers(generation, tokenizer, _kept(checkpoint, CHAT))
    return {CONFIG: _json(config), GENERATION: generation}


def _ending_answers(generation: str, tokenizer: bytes, chat: bytes | None) -> str:
    """The text of generation_config.json, with which generation ends also at the token that the chat template writes
    after an answer, if that is a single one."""
    with contextlib.suppress(DataError, TemplateFailed, ValueError, KeyError, TypeError):
        template = ChatTemplate.of_document(json.loads(chat or b"null"))
        said = template.render([{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}])[0]
        tail, settings = said[said.rindex("2") + 1 :].strip(), json.loads(generation)
        known = settings.get("eos_token_id")
        ends = known if isinstance(known, list) else [] if known is None else [known]
        (end,) = FileTokenizer(TOKENIZER, None, tokenizer, needs_end=False).encode([tail])[0]
        if end not in ends:
            return _json(settings | {"eos_token_id": [*ends, end] if ends else end})
    return generation


def _of_source(source: Keys | None) -> tuple[int | None, dict[str, Any]]:
    """Positions, and ids of special tokens, of the weights that the job began with."""
    if source is None:
        return None, {}
    try:
        positions = shape_of(source).positions
    except WeightsError:
        return None, {}
    return positions, {name: source.values[name] for name in TOKENS if name in source.values}


def add_tokenizer(spec: JobSpec, checkpoint: Location, folder: Path) -> None:
    """Copy the tokenizer that the job was trained with into `folder`: the one of bytes; the one stored with the record
    of its corpus, above the `checkpoint`, like its chat template; or the file that its spec names, with that
    tokenizer's other files. If none is known, as for tokens that others have made, there is none. Raises OSError."""
    named, content = _named(spec), _tokenizer(spec, checkpoint)
    if content is None:
        return
    (folder / TOKENIZER).write_bytes(content)
    if named is not None:
        for file in (named.parent / name for name in _TOKENIZER_FILES):
            if file.is_file():
                (folder / file.name).write_bytes(_content(file, MAX_BYTES))
    kept = _kept(checkpoint, CHAT)
    if kept is not None:  # takes precedence over the settings
        (folder / TEMPLATE).write_text(str(json.loads(kept)["template"]), encoding="utf-8")
    if not (folder / _SETTINGS).exists():
        end = _end_of_documents(spec, content)
        settings = _FAST if end is None else _FAST | {"eos_token": end[1]}
        (folder / _SETTINGS).write_text(_json(settings), encoding="utf-8")


def _named(spec: JobSpec) -> Path | None:
    return None if spec.data.tokenizer_file is None else tokenizer_path(spec.data.tokenizer_file)


def _tokenizer(spec: JobSpec, checkpoint: Location) -> bytes | None:
    """The tokenizer.json, if one is known. Raises OSError."""
    data, named, kept = spec.data, _named(spec), _kept(checkpoint, TOKENIZER)
    if kept is None and data.tokenizer == "bytes" and data.source != "megatron":
        return _json(byte_tokenizer(data.end_of_document not in (None, NO_TOKEN))).encode()
    if kept is None and named is not None and named.is_file():
        return content_of(named)
    return kept


def _end_of_documents(spec: JobSpec, tokenizer: bytes | None) -> tuple[int, str] | None:
    """The token with which the job has learned to end a text, by its id and its text; None if none is known. For
    conversations the template determines what ends them."""
    if tokenizer is None or spec.data.source == "chat":
        return None
    with contextlib.suppress(DataError):
        known = FileTokenizer(TOKENIZER, spec.data.end_of_document, tokenizer, needs_end=False)
        if known.end_of_document is not None:
            return known.end_of_document, known.text_of(known.end_of_document)
    return None


def _kept(checkpoint: Location, name: str) -> bytes | None:
    for folder in (checkpoint.parent, checkpoint.parent.parent):  # of the engine alone; of a job of the service
        with contextlib.suppress(OSError):
            return files_of(folder).read(folder / name)
    return None


def _content(file: Path, max_bytes: int) -> bytes:
    try:
        return read_regular(file, max_bytes)
    except OSError as error:
        raise weights_error(file, error) from error


_FAST = {"tokenizer_class": "PreTrainedTokenizerFast"}


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, indent=2) + "\n"


def byte_tokenizer(has_end: bool = False) -> dict[str, Any]:
    """The tokenizer `bytes` as the document that Hugging Face's library `tokenizers` reads: byte-pair encoding over
    bytes, without any pairs; the id of a token is its byte. `has_end`: include the token that ends documents."""
    words = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    end = {"id": BYTE_VOCABULARY, "content": END_OF_TEXT, **words, "special": True}
    by_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [end] if has_end else [],
        "normalizer": None,
        "pre_tokenizer": by_bytes,
        "post_processor": None,
        "decoder": by_bytes,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {_letter(byte): byte for byte in range(BYTE_VOCABULARY)},
            "merges": [],
        },
    }


def _letter(byte: int) -> str:
    """The character that represents a byte in byte-level encodings (Radford et al. 2019, `bytes_to_unicode` of GPT-2's
    code): the byte's own if it is printable, otherwise the next one from 256 on."""
    return chr(byte) if byte in _PRINTED else chr(256 + sum(1 for other in range(byte) if other not in _PRINTED))


_PRINTED = frozenset([*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)])
