"""Which files a corpus is made of. Pure Python, so that the control plane checks a job's data before placing it."""

from __future__ import annotations

import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from workers.config import DataConfig, JobSpec, ValidationSet
from workers.errors import DataError

TEXT_SUFFIXES = frozenset({".txt", ".md", ".rst", ".py", ".text", ".log", ".csv", ".json", ".jsonl", ".html", ".xml"})
# Parts of the standard library's folder that are not the library itself, and its tests, which are as large again.
STDLIB_LEFT_OUT = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib", "lib2to3"})


@dataclass(frozen=True)
class CorpusFile:
    """One file of a corpus."""

    path: str
    """Absolute path."""
    size: int
    """Bytes."""
    head: str | None = None
    """SHA-256 of its beginning (`corpus_record.head_digest`), where it has to be the same."""


def corpus_files(data: DataConfig) -> list[CorpusFile]:
    """The files of the corpus in order, empty ones left out.

    Raises DataError, naming the path, when one is missing or unreadable, or when there is no text at all.
    """
    try:
        return _corpus_files(data)
    except OSError as error:  # a name that is too long, a folder that may not be entered, a link in a circle
        raise DataError(f"cannot be read: {error.filename or ', '.join(data.paths)} ({error.strerror})") from error


def _corpus_files(data: DataConfig) -> list[CorpusFile]:
    if data.source == "python-stdlib":
        root = Path(sysconfig.get_path("stdlib"))
        files = _files_below(root, frozenset({".py"}), STDLIB_LEFT_OUT)
        origin = f"the standard library's folder {root}"
    else:
        files = [file for path in data.paths for file in _files_at(Path(path))]
        origin = ", ".join(data.paths)
    if not files:
        raise DataError(f"the corpus is empty: no text in {origin}")
    return files


def split_corpus(spec: JobSpec, total_bytes: int) -> tuple[int, int]:
    """Tokens of the training and of the validation part: the last `validation_fraction` is held out.

    Raises DataError when either is too short for one sequence and its targets.
    """
    needed = spec.model.sequence_length + 1
    validation = int(total_bytes * spec.data.validation_fraction)
    training = total_bytes - validation
    if training < needed:
        raise DataError(
            f"the corpus has {training} tokens for training, but one sequence with its targets needs {needed}: "
            f"use more text than {', '.join(spec.data.paths) or spec.data.source} or a shorter model.sequence_length"
        )
    if spec.train.validate_every and spec.data.validation_fraction and validation < needed:
        off = "data.validation_fraction: 0" if spec.data.validation else "train.validate_every: 0"
        raise DataError(
            f"the held-out part of the corpus has {validation} tokens, but one sequence with its targets needs "
            f"{needed}: raise data.validation_fraction or turn validation off ({off})"
        )
    return training, validation


def check_validation_set(spec: JobSpec, validation: ValidationSet, tokens: int) -> None:
    """Raise DataError when the set has not enough `tokens` for one sequence and its targets."""
    needed = spec.model.sequence_length + 1
    if tokens < needed:
        where = ", ".join(validation.paths) or validation.source
        raise DataError(
            f"validation set {validation.name} has {tokens} tokens, but one sequence with its targets needs {needed}: "
            f"use more text than {where} or a shorter model.sequence_length"
        )


def check_data(spec: JobSpec) -> None:
    """Raise DataError when the spec's corpus cannot be trained on, or a validation set not be used."""
    split_corpus(spec, sum(file.size for file in corpus_files(spec.data)))
    for each in spec.data.validation:
        check_validation_set(spec, each, sum(file.size for file in corpus_files(spec.data.corpus_of(each))))


def _files_at(path: Path) -> list[CorpusFile]:
    if path.is_dir():
        files = _files_below(path, TEXT_SUFFIXES, frozenset({"__pycache__"}))
        if not files:
            raise DataError(f"no text file below {path} (looked for {', '.join(sorted(TEXT_SUFFIXES))})")
        return files
    if not path.exists():
        raise DataError(f"no such file or directory: {path}")
    if not path.is_file():
        raise DataError(f"not a regular file: {path}")
    file = _readable(path)
    return [file] if file.size else []


def _files_below(root: Path, suffixes: frozenset[str], left_out: frozenset[str]) -> list[CorpusFile]:
    files = []
    for folder, folders, names in os.walk(root, onerror=_raise_unreadable):
        folders[:] = sorted(name for name in folders if name not in left_out and not name.startswith("."))
        for name in sorted(names):
            path = Path(folder) / name
            if path.suffix.lower() in suffixes and path.is_file():
                file = _readable(path)
                if file.size:
                    files.append(file)
    return files


def _readable(path: Path) -> CorpusFile:
    if not os.access(path, os.R_OK):
        raise DataError(f"cannot be read: {path} (permission denied)")
    return CorpusFile(str(path), path.stat().st_size)


def _raise_unreadable(error: OSError) -> None:
    raise DataError(f"cannot be read: {error.filename} ({error.strerror})") from error
