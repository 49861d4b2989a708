"""Rows of files: the JSON objects of lines or of an array, which may be compressed with gzip or zstd, and the rows of
parquet files."""

from __future__ import annotations

import contextlib
import gzip
import json
import zlib
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from manta.workers.data.json_array import begins_array, entries
from manta.workers.data.read_errors import read_error
from manta.workers.data.shards import Section
from manta.workers.data.sources import is_compressed
from manta.workers.errors import DataError
from manta.workers.system.regular_files import open_regular

_BLOCK = 2**20
_KINDS = {"str": "a text", "dict": "an object", "list": "a list", "bool": "a boolean", "NoneType": "null"}

_ROWS = 256
_PEEK = 2**12
"""Bytes of a file in which the first character of an array is looked for."""


def objects_of(section: Section, key: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Place of each object of `section`, and the object, which is to have `key`. Blank lines are left out. Raises
    DataError."""
    if section.start == 0 and is_array(section.path):
        for where, entry in entries(_named_damage(_blocks(section), section.path), section.path):
            yield where, _object(entry, key, where)
    else:
        for where, line in _places_of_lines(section):
            yield where, _object(_json(line, where), key, where)


def is_array(path: str) -> bool:
    """Whether a file is one JSON array, instead of an object a line. Raises DataError."""
    try:
        size = min(Path(path).stat().st_size, _PEEK)
        with contextlib.suppress(_Damaged):  # whoever reads it finds out where
            return begins_array(_blocks(Section(path, 0, size, size)))
    except OSError as error:
        raise read_error(path, error) from error
    return False


def kind_of(value: object) -> str:
    """The type of a JSON value, in words."""
    return _KINDS.get(type(value).__name__, "a number")


def _json(line: bytes, where: str) -> Any:
    try:
        return json.loads(line)
    except UnicodeDecodeError as error:
        if line.startswith((BOM_UTF16_LE, BOM_UTF16_BE)):
            raise DataError(f"{where}: UTF-16, and only UTF-8 is read: convert the file") from error
        raise DataError(f"{where}: not UTF-8 ({error.reason} at byte {error.start} of the line)") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not valid JSON ({' '.join(str(error).split())})") from error


def _object(entry: Any, key: str, where: str) -> dict[str, Any]:
    if not isinstance(entry, dict):
        raise DataError(f"{where}: not an object such as {{{json.dumps(key)}: ...}}")
    return entry


def _places_of_lines(section: Section) -> Iterator[tuple[str, bytes]]:
    """Each line that is not blank, and its place. Lines are counted from the start of the file."""
    number = _lines_before(section)
    position = section.start
    for line in _lines_of(section):
        number += 1
        if line.strip():
            # In a compressed file the position is that in the decompressed text.
            yield f"{section.path}, line {number} (byte {position})", line
        position += len(line)


def _lines_before(section: Section) -> int:
    count = 0
    if section.start and not is_compressed(section.path):
        try:
            with open_regular(section.path) as file:
                left = section.start
                while left > 0 and (block := file.read(min(left, _BLOCK))):
                    count += block.count(b"\n")
                    left -= len(block)
        except OSError as error:
            raise read_error(section.path, error) from error
    return count


def _lines_of(section: Section) -> Iterator[bytes]:
    """The lines of `section`, with their ends. Raises DataError, naming the line after which a compressed file is
    truncated or damaged."""
    count, lines = 0, _lines(_blocks(section))
    while True:
        try:
            line = next(lines, None)
        except _Damaged as error:
            raise DataError(f"{section.path} cannot be decompressed after line {count}: {error}") from error
        except OSError as error:
            raise read_error(section.path, error) from error
        if line is None:
            return
        count += 1
        yield line


def _blocks(section: Section) -> Iterator[bytes]:
    """The bytes of `section`; a compressed file is read as a whole. Raises _Damaged, OSError, DataError."""
    with open_regular(section.path) as file:
        name = section.path.lower()
        if name.endswith(".gz"):
            yield from _gzip_blocks(file)
        elif name.endswith(".zst"):
            yield from _zstd_blocks(file)
        else:
            file.seek(section.start)
            yield from _part(file, section)


def _named_damage(blocks: Iterator[bytes], path: str) -> Iterator[bytes]:
    try:
        yield from blocks
    except _Damaged as error:
        raise DataError(f"{path} cannot be decompressed: {error}") from error
    except OSError as error:
        raise read_error(path, error) from error


class _Damaged(Exception):
    """Compressed data that cannot be read further."""


def _part(file: IO[bytes], section: Section) -> Iterator[bytes]:
    left = section.stop - section.start
    while left > 0:
        block = file.read(min(left, _BLOCK))
        if not block:
            raise DataError(f"{section.path} became shorter while it was being tokenized")
        left -= len(block)
        yield block


def _gzip_blocks(file: IO[bytes]) -> Iterator[bytes]:
    try:
        with gzip.GzipFile(fileobj=file) as content:
            while block := content.read1(_BLOCK):
                yield block
    except EOFError as error:
        raise _Damaged("it is cut short") from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise _Damaged(f"it is not valid gzip there: {error}") from error


def _zstd_blocks(file: IO[bytes]) -> Iterator[bytes]:
    zstandard = _zstandard()
    frame, ended = zstandard.ZstdDecompressor().decompressobj(), True
    try:
        while block := file.read(_BLOCK):
            while block:
                if ended:
                    frame, ended = zstandard.ZstdDecompressor().decompressobj(), False
                yield frame.decompress(block)
                ended, block = frame.eof, frame.unused_data if frame.eof else b""
    except zstandard.ZstdError as error:
        raise _Damaged(f"it is not valid zstd there: {error}") from error
    if not ended:
        raise _Damaged("it is cut short")


def _zstandard() -> Any:
    try:
        import zstandard
    except ImportError as error:
        raise DataError("a .zst file needs the library zstandard here: pip install zstandard") from error
    return zstandard


def _lines(blocks: Iterator[bytes]) -> Iterator[bytes]:
    begun: list[bytes] = []
    for block in filter(None, blocks):
        first, *others = _split(block)
        begun.append(first)
        if others or first.endswith(b"\n"):
            yield b"".join(begun)
            begun = []
        if others:
            yield from others[:-1]
            if others[-1].endswith(b"\n"):
                yield others[-1]
            else:
                begun = [others[-1]]
    if begun:
        yield b"".join(begun)


def _split(block: bytes) -> list[bytes]:
    """Split at line feeds only: `splitlines` also splits at carriage returns, which are blanks in JSON."""
    lines = block.split(b"\n")
    return [line + b"\n" for line in lines[:-1]] + [lines[-1]] * bool(lines[-1])


def row_group_count(path: str) -> int:
    """Groups of rows in the file. Raises DataError."""
    return int(_parquet_file(path).num_row_groups)


def texts_of_rows(section: Section, column: str) -> Iterator[tuple[str, str]]:
    """Place and text of each row; null is an empty text. Raises DataError."""
    for where, row in rows_of(section, column):
        text = row[column]
        if not isinstance(text, str | None):
            kind = _parquet_file(section.path).schema_arrow.field(column).type
            raise DataError(f"{where}: column {column!r} holds {kind}, not text")
        yield where, text or ""


def rows_of(section: Section, column: str, more: Sequence[str] = ()) -> Iterator[tuple[str, dict[str, Any]]]:
    """Place of each row, and its values in `column` and in those of `more` that exist; from row group `section.start`
    on. Bytes are decoded, as UTF-8. Of nested values the fields that are null are left out: objects of a column all
    have the same fields. Raises DataError."""
    file = _parquet_file(section.path)
    if column not in file.schema_arrow.names:
        there = ", ".join(map(repr, file.schema_arrow.names[:10])) or "none"
        raise DataError(f"{section.path}: no column {column!r}, only {there}: set data.text_key")
    stop = file.num_row_groups if section.stop < 0 else section.stop
    row = sum(file.metadata.row_group(group).num_rows for group in range(section.start))
    groups = list(range(section.start, stop))
    batches = file.iter_batches(
        _ROWS, row_groups=groups, columns=[column, *(name for name in more if name in file.schema_arrow.names)]
    )
    while True:
        try:
            batch = next(batches, None)
        except (OSError, ValueError) as error:  # Arrow's errors are among these
            raise _parquet_error(section.path, f"cannot be read after row {row}", error) from error
        if batch is None:
            return
        for values in zip(*batch.columns, strict=True):
            row += 1
            where = f"{section.path}, row {row}"
            yield where, {name: _value(value, where) for name, value in zip(batch.schema.names, values, strict=True)}


def _value(value: Any, where: str) -> Any:
    try:
        return _plain(value.as_py())
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: not UTF-8 ({error.reason} at byte {error.start} of the text)") from error


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items() if each is not None}
    return value


def _parquet_file(path: str) -> Any:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise DataError("source parquet needs the library pyarrow here: pip install pyarrow") from error
    try:
        return pyarrow.parquet.ParquetFile(open_regular(path))
    except (OSError, ValueError) as error:
        raise _parquet_error(path, "is not a parquet file that can be read", error) from error


def _parquet_error(path: str, what: str, error: OSError | ValueError) -> DataError:
    message = f"{path} {what}: {_first_line(error)}"
    return read_error(path, error, message) if isinstance(error, OSError) else DataError(message)


def _first_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
