"""Documents in the rows of parquet files."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from workers.data.shards import Section
from workers.errors import DataError

_ROWS = 256


def row_group_count(path: str) -> int:
    """Groups of rows in the file. Raises DataError."""
    return int(_opened(path).num_row_groups)


def rows_of(section: Section, column: str) -> Iterator[tuple[str, str]]:
    """Place and text of each row; the groups are those from `section.start` on. Raises DataError."""
    file = _opened(section.path)
    if column not in file.schema_arrow.names:
        there = ", ".join(map(repr, file.schema_arrow.names[:10])) or "none"
        raise DataError(f"{section.path}: no column {column!r}, only {there}: set data.text_key")
    stop = file.num_row_groups if section.stop < 0 else section.stop
    row = sum(file.metadata.row_group(group).num_rows for group in range(section.start))
    groups = list(range(section.start, stop))
    batches = file.iter_batches(_ROWS, row_groups=groups, columns=[column])
    while True:
        try:
            batch = next(batches, None)
        except (OSError, ValueError) as error:  # what Arrow raises is one of these
            raise DataError(f"{section.path} cannot be read after row {row}: {_first_line(error)}") from error
        if batch is None:
            return
        for value in batch.column(0):
            row += 1
            yield f"{section.path}, row {row}", _text(value, f"{section.path}, row {row}", column)


def _text(value: Any, where: str, column: str) -> str:
    try:
        text = value.as_py()
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: not UTF-8 ({error.reason} at byte {error.start} of the text)") from error
    if not isinstance(text, str):
        kind = "null" if text is None else str(value.type)
        raise DataError(f"{where}: column {column!r} holds no text but {kind}")
    return text


def _opened(path: str) -> Any:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise DataError("source parquet needs the library pyarrow here: pip install pyarrow") from error
    try:
        return pyarrow.parquet.ParquetFile(path)
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is no parquet file that can be read: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
