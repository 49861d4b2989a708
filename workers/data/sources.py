"""The files of a corpus. Pure Python, so that the control plane can check a job's data before placing it."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from manta.workers.config import DataConfig, JobSpec, ValidationSet
from manta.workers.data.read_errors import read_error
from manta.workers.errors import DataError

TEXT_SUFFIXES = frozenset({".txt", ".md", ".rst", ".py", ".text", ".log", ".csv", ".json", ".jsonl", ".html", ".xml"})
SUFFIXES = {
    "text": TEXT_SUFFIXES,
    "jsonl": frozenset({".jsonl", ".ndjson", ".jsonl.gz", ".jsonl.zst", ".ndjson.gz", ".ndjson.zst"}),
    "parquet": frozenset({".parquet"}),
    "megatron": frozenset({".idx"}),
}
SUFFIXES["chat"] = SUFFIXES["jsonl"] | SUFFIXES["parquet"]
"""File name suffixes by source, for directories."""
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
    return path.lower().endswith((".gz", ".zst"))


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

        check_vocabulary(spec, open_tokenizer(spec.data).vocabulary, spec.data.tokenizer_file)


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
        raise DataError(
            f"{whose} has token ids up to {ids - 1}, but the model knows those below {spec.vocabulary_size}: "
            f"set model.vocabulary_size to at least {ids}"
        )


def prefixes_of(files: Sequence[CorpusFile]) -> list[str]:
    """The indexed datasets among `files`, each by the common prefix of its two files' names."""
    return [file.path.removesuffix(".idx") for file in files if file.path.endswith(".idx")]


def _datasets_at(name: str) -> list[CorpusFile]:
    """Both files of each dataset: `name` is one of them, their prefix, or a directory of them."""
    path = Path(name)
    if path.is_dir():
        indices = [Path(file.path) for file in _files_below(path, SUFFIXES["megatron"], frozenset())]
        if not indices:
            raise DataError(f"no indexed dataset below {path} (looked for .idx)")
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


def _files_at(path: Path, source: str) -> list[CorpusFile]:
    if path.is_dir():
        files = _files_below(path, SUFFIXES[source], frozenset({"__pycache__"}))
        if not files:
            raise DataError(f"no {source} file below {path} (looked for {', '.join(sorted(SUFFIXES[source]))})")
        return files
    if not path.exists():
        raise DataError(f"no such file or directory: {path}")
    if not path.is_file():
        raise DataError(f"not a regular file: {path}")
    file = _readable(path)
    return [file] if file.size else []


def _files_below(
    root: Path, suffixes: frozenset[str], left_out: frozenset[str], whole: bool = True
) -> list[CorpusFile]:
    """Links to folders are not followed: a target below `root` would be read twice, and another target is an error if
    the `whole` is wanted."""
    files = []
    for folder, folders, names in os.walk(root, onerror=_raise_unreadable):
        folders[:] = sorted(name for name in folders if name not in left_out and not name.startswith("."))
        for path in (Path(folder) / name for name in folders):
            if whole and path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(root)):
                raise DataError(f"{path} is a link to a folder elsewhere, which is not followed: name it in data.paths")
        for name in sorted(names):
            path = Path(folder) / name
            if path.suffix and name.lower().endswith(tuple(suffixes)) and path.is_file():
                file = _readable(path)
                if file.size:
                    files.append(file)
    return files


def _readable(path: Path) -> CorpusFile:
    if not os.access(path, os.R_OK):
        path.stat()  # it does not say whether it is for lack of permission
        raise DataError(f"cannot be read: {path} (permission denied)")
    return CorpusFile(str(path), path.stat().st_size)


def _raise_unreadable(error: OSError) -> None:
    raise read_error(error.filename, error) from error
