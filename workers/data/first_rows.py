"""Looks at the first lines of each file of a corpus: most mistakes are in all of its lines, and whoever submits the job
is told. No code of the corpus (a chat template) is run."""

from __future__ import annotations

from collections.abc import Sequence

from manta.workers.config import DataConfig
from manta.workers.data.documents import conversations_of, texts_of
from manta.workers.data.read_errors import read_error
from manta.workers.data.shards import Section
from manta.workers.data.sources import CorpusFile, is_compressed, kind_of_file
from manta.workers.system.regular_files import open_regular

SOURCES = ("jsonl", "chat")
"""Sources whose files consist of lines."""
MAX_FILES, MAX_BYTES = 100, 2**16
"""Files that are looked at, and bytes that are read of each."""


def check_first_rows(data: DataConfig, files: Sequence[CorpusFile]) -> None:
    """Raise DataError if one of the first lines of `files`, those of `data`, is not a document. Compressed files and
    parquet are left to the ranks."""
    for file in files[:MAX_FILES] if data.source in SOURCES else ():
        if kind_of_file(file.path, data.source) == "jsonl" and not is_compressed(file.path):
            lines = Section(file.path, 0, _end_of_lines(file), file.size)
            for _ in conversations_of(lines, data) if data.source == "chat" else texts_of(lines, data, False):
                pass


def _end_of_lines(file: CorpusFile) -> int:
    """The byte after the last line that is complete in the first bytes of a file."""
    if file.size <= MAX_BYTES:
        return file.size
    try:
        with open_regular(file.path) as opened:
            return opened.read(MAX_BYTES).rfind(b"\n") + 1
    except OSError as error:
        raise read_error(file.path, error) from error
