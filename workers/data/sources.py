"""The files of a corpus. Pure Python, so that the control plane can check a job's data before placing it."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from manta.workers.config import DataConfig, JobSpec, ValidationSet
from manta.workers.data.read_errors import read_error
from manta.workers.errors import DataError
from manta.workers.system.regular_files import POINTER_BYTES, refuse_pointer

if TYPE_CHECKING:
    from manta.workers.data.tokenizer import Tokenizer

TEXT_SUFFIXES = frozenset({".txt", ".md", ".rst", ".py", ".text", ".log", ".csv", ".json", ".jsonl", ".html", ".xml"})
SUFFIXES = {
    "text": TEXT_SUFFIXES,
    "jsonl": frozenset({".jsonl", ".ndjson", ".jsonl.gz", ".jsonl.zst", ".ndjson.gz", ".ndjson.zst"}),
    "parquet": frozenset({".parquet"}),
    "megatron": frozenset({".idx"}),
}
SUFFIXES["chat"] = SUFFIXES["jsonl"] | SUFFIXES["parquet"]
"""File name suffixes by source, for directories."""
_JSON = frozenset({".json", ".json.gz", ".json.zst"})
OTHERWISE = {"jsonl": _JSON, "chat": _JSON}
"""Suffixes by source that count in a directory without a file of SUFFIXES: beside one, .json is often a description."""
COMPRESSED = {".gz": "gzip", ".zst": "zstd"}
"""Compression of the files of lines that are read, by suffix."""
_NOT_READ = {
    ".bz2": "bzip2", ".xz": "xz", ".lzma": "lzma", ".lz4": "lz4", ".br": "brotli", ".zip": "zip", ".7z": "7-Zip",
    ".tar": "tar", ".tgz": "tar", ".rar": "RAR",
}  # fmt: skip
"""Compression and archives that are not read."""
# Parts of the standard library's folder that do not belong to it, and its tests, which are as large as the rest.
STDLIB_EXCLUDED = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib", "lib2to3"})


@dataclass(frozen=True)
class CorpusFile:
    """One file of a corpus."""

    path: str
    """Absolute path."""
    size: int
    """Bytes."""
    digest: str | None = None
    """Digest of samples of the file's content (`unchanged_file.digest_of`), if it must not have changed."""


def corpus_files(data: DataConfig) -> list[CorpusFile]:
    """The files of the corpus in order, empty ones left out.

    Raises DataError, naming the path, when one is missing or unreadable, or when there is no text at all;
    DataUnreadable when its disk or mount does not work.
    """
    try:
        return _corpus_files(data)
    except OSError as error:  # a name that is too long, a folder without permission, a circular link
        raise read_error(error.filename or ", ".join(data.paths), error) from error


def parts_of(data: DataConfig) -> list[DataConfig]:
    """The parts of the corpus whose samples are blended: each path if there are weights, otherwise the whole corpus."""
    if data.weights is None:
        return [data]
    return [data.model_copy(update={"paths": (path,), "weights": None}) for path in data.paths]


def kind_of_file(path: str, source: str) -> str:
    """The source whose files have the same format: those of conversations are jsonl or parquet."""
    if source != "chat":
        return source
    return "parquet" if path.lower().endswith(".parquet") else "jsonl"


def is_compressed(path: str) -> bool:
    """Whether a file of lines is read through gzip or zstd."""
    return path.lower().endswith(tuple(COMPRESSED))


def describe_corpus(data: DataConfig) -> str:
    """The source of the corpus, for messages."""
    return ", ".join(data.paths) or f"the standard library's folder {sysconfig.get_path('stdlib')}"


def _corpus_files(data: DataConfig) -> list[CorpusFile]:
    if data.source == "python-stdlib":
        files = _files_below(Path(sysconfig.get_path("stdlib")), frozenset({".py"}), STDLIB_EXCLUDED, whole=False)
    elif data.source == "megatron":
        files = [file for path in data.paths for file in _datasets_at(path)]
    else:
        files = [file for path in data.paths for file in _files_at(Path(path), data.source)]
    if not files:
        what = "text" if data.source in ("python-stdlib", "text") else "document"
        raise DataError(f"the corpus is empty: no {what} in {describe_corpus(data)}")
    return files


def split_tokens(spec: JobSpec, data: DataConfig, tokens: int) -> tuple[int, int]:
    """Tokens of the training and of the validation part of `data`, the spec's corpus or a part of it: the last
    `validation_fraction` is held out.

    Raises DataError when either is too short for one sequence and its targets.
    """
    needed = spec.model.sequence_length + 1
    validation = int(tokens * data.validation_fraction)
    training = tokens - validation
    if training < needed:
        raise DataError(
            f"the corpus has {training} tokens for training, but one sequence with its targets needs {needed}: "
            f"use more text than {', '.join(data.paths) or data.source} or a shorter model.sequence_length"
        )
    if spec.train.validate_every and data.validation_fraction and validation < needed:
        of = f" {', '.join(data.paths)}" if spec.data.weights is not None else ""
        off = "data.validation_fraction: 0" if spec.data.validation else "train.validate_every: 0"
        raise DataError(
            f"the held-out part of the corpus{of} has {validation} tokens, but one sequence with its targets needs "
            f"{needed}: raise data.validation_fraction or turn validation off ({off})"
        )
    return training, validation


def check_validation_set(spec: JobSpec, validation: ValidationSet, tokens: int) -> None:
    """Raise DataError if the set has too few `tokens` for one sequence and its targets."""
    needed = spec.model.sequence_length + 1
    if tokens < needed:
        where = ", ".join(validation.paths) or validation.source
        raise DataError(
            f"validation set {validation.name} has {tokens} tokens, but one sequence with its targets needs {needed}: "
            f"use more text than {where} or a shorter model.sequence_length"
        )


def check_data(spec: JobSpec) -> None:
    """Raise DataError if the spec's corpus cannot be trained on, or a validation set cannot be used, as far as that is
    known before they are tokenized."""
    for part in parts_of(spec.data):
        tokens = _known_tokens(part)
        if tokens is not None:
            split_tokens(spec, part, tokens)
    for each in spec.data.validation:
        tokens = _known_tokens(spec.data.corpus_of(each))
        if tokens is not None:
            check_validation_set(spec, each, tokens)
    for data in spec.data.corpora:
        if data.source == "chat":
            from manta.workers.data.chat_template import open_template

            open_template(data)
    if spec.data.tokenizer_file is not None:
        from manta.workers.data.tokenizer import open_tokenizer

        check_tokenizer(spec, open_tokenizer(spec.data), spec.data.tokenizer_file)


def _known_tokens(data: DataConfig) -> int | None:
    """Number of tokens of a corpus; None if it must be tokenized first. Raises DataError if its files are
    unsuitable."""
    files = corpus_files(data)
    if data.is_read_in_place:
        return sum(file.size for file in files)
    if data.source != "megatron":
        return None
    from manta.workers.data.indexed_dataset import tokens_in

    return sum(tokens_in(prefix) for prefix in prefixes_of(files))


def check_vocabulary(spec: JobSpec, ids: int, whose: str) -> None:
    """Raise DataError if the token ids of `whose`, which are below `ids`, exceed those that the model knows."""
    if ids > spec.vocabulary_size:
        what_to_do = f"set model.vocabulary_size to at least {ids}"
        if spec.model.from_ is not None:
            what_to_do = (
                f"use the tokenizer of the weights in {spec.model.from_}, or add rows to these first (transformers' "
                "resize_token_embeddings)"
            )
        raise DataError(
            f"{whose} has token ids up to {ids - 1}, but the model knows those below {spec.vocabulary_size}: "
            f"{what_to_do}"
        )


def check_tokenizer(spec: JobSpec, tokenizer: Tokenizer, whose: str) -> None:
    """Raise DataError unless the model knows the ids of `tokenizer`. The tokenizer of weights may have added tokens
    beyond those, often one for padding, as long as no text has one of them, which is seen once it is tokenized."""
    from manta.workers.data.tokenizer import FileTokenizer

    ids = tokenizer.vocabulary
    if spec.model.from_ is not None and isinstance(tokenizer, FileTokenizer):
        ids = tokenizer.vocabulary_of_texts
    check_vocabulary(spec, ids, whose)


def prefixes_of(files: Sequence[CorpusFile]) -> list[str]:
    """The indexed datasets among `files`, each by the common prefix of its two files' names."""
    return [file.path.removesuffix(".idx") for file in files if file.path.endswith(".idx")]


def _datasets_at(name: str) -> list[CorpusFile]:
    """Both files of each dataset: `name` is one of them, their prefix, or a directory of them."""
    path = Path(name)
    beside = Path(f"{path}.idx")
    if path.is_dir():
        indices = [Path(file.path) for file in _files_below(path, SUFFIXES["megatron"], frozenset())]
        if indices and beside.is_file():
            raise DataError(f"{path} is a folder of indexed datasets, and {beside} is beside it: name the .idx files")
        if not indices and not beside.is_file():
            raise DataError(f"no indexed dataset below {path} (looked for .idx)")
        indices = indices or [beside]
    else:
        prefix = name.removesuffix(".idx") if name.endswith(".idx") else name.removesuffix(".bin")
        indices = [Path(f"{prefix}.idx")]
    files = []
    for index in indices:
        for file in (index.with_suffix(".bin"), index):
            if not file.is_file():
                raise DataError(f"no such file: {file} (an indexed dataset is a .bin and its .idx)")
            files.append(_readable(file))
    return files


_TAKEN_LITERALLY = (
    ("*", " (patterns are not expanded: name the folder)"),
    ("/~", " (~ is not expanded: write the whole path)"),
    ("$", " (variables are not expanded: write the whole path)"),
)


def _files_at(path: Path, source: str) -> list[CorpusFile]:
    if path.is_dir():
        if source != "text" and any(any(path.glob(name)) for name in ("*.arrow", "*/dataset_info.json")):
            raise DataError(
                f"{path} holds Arrow files, which are not read: write the data set with to_parquet or to_json"
            )
        left_out, otherwise = frozenset({"__pycache__"}), OTHERWISE.get(source, frozenset())
        files = _files_below(path, SUFFIXES[source], left_out) or _files_below(path, otherwise, left_out)
        if not files:
            wanted = ", ".join(sorted(SUFFIXES[source] | otherwise))
            raise DataError(f"no {source} file below {path} (looked for {wanted})")
        return files
    if not path.exists():
        literally = next((why for mark, why in _TAKEN_LITERALLY if mark in str(path)), "")
        raise DataError(f"no such file or directory: {path}{literally}")
    if not path.is_file():
        raise DataError(f"not a regular file: {path}")
    _refuse_compressed(path, _NOT_READ if source in OTHERWISE else _NOT_READ | COMPRESSED)
    file = _readable(path)
    return [file] if file.size else []


def _files_below(
    root: Path, suffixes: frozenset[str], left_out: frozenset[str], whole: bool = True
) -> list[CorpusFile]:
    """Hidden files and folders are left out. Links to folders are not followed: a target below `root` would be read
    twice. If the `whole` is wanted, a link to another target is an error, and so is a file that only its compression
    keeps from being read."""
    files = []
    for folder, folders, names in os.walk(root, onerror=_raise_unreadable):
        folders[:] = sorted(name for name in folders if name not in left_out and not name.startswith("."))
        for path in (Path(folder) / name for name in folders):
            if whole and path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(root)):
                raise DataError(f"{path} is a link to a folder elsewhere, which is not followed: name it in data.paths")
        for name in sorted(name for name in names if not name.startswith(".")):
            path = Path(folder) / name
            if whole and path.stem.lower().endswith(tuple(suffixes)) and path.stem not in names:
                _refuse_compressed(path, _NOT_READ)
            if path.suffix and name.lower().endswith(tuple(suffixes)) and path.is_file():
                file = _readable(path)
                if file.size:
                    files.append(file)
    return files


def _readable(path: Path) -> CorpusFile:
    if not os.access(path, os.R_OK):
        path.stat()  # it does not say whether it is for lack of permission
        raise DataError(f"cannot be read: {path} (permission denied)")
    size = path.stat().st_size
    if size <= POINTER_BYTES:
        refuse_pointer(path)
    return CorpusFile(str(path), size)


def _refuse_compressed(path: Path, not_read: Mapping[str, str]) -> None:
    compression = not_read.get(path.suffix.lower())
    if compression is not None:
        lines = "" if path.suffix.lower() in COMPRESSED else ", or, if it has lines of JSON, compress it as .gz or .zst"
        raise DataError(f"{path} is compressed ({compression}) in a way that is not read here: decompress it{lines}")


def _raise_unreadable(error: OSError) -> None:
    raise read_error(error.filename, error) from error
