"""Documents in the rows of parquet files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from workers.data.read_errors import read_error
from workers.data.shards import Section
from workers.errors import DataError
from workers.system.regular_files import open_regular

_ROWS = 256


def row_group_count(path: str) -> int:
    """Groups of rows in the file. Raises DataError."""
    return int(_opened(path).num_row_groups)


def texts_of_rows(section: Section, column: str) -> Iterator[tuple[str, str]]:
    """Place and text of each row. Raises DataError."""
    for where, row in rows_of(section, column):
        text = row[column]
        if not isinstance(text, str):
            kind = "null" if text is None else _opened(section.path).schema_arrow.field(column).type
            raise DataError(f"{where}: column {column!r} holds {kind}, not text")
        yield where, text


def rows_of(section: Section, column: str, more: Sequence[str] = ()) -> Iterator[tuple[str, dict[str, Any]]]:
    """Place of each row, and its values in `column` and in those of `more` that exist; from row group `section.start`
    on. Raises DataError."""
    file = _opened(section.path)
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
            raise _error(section.path, f"cannot be read after row {row}", error) from error
        if batch is None:
            return
        for values in zip(*batch.columns, strict=True):
            row += 1
            where = f"{section.path}, row {row}"
            yield where, {name: _value(each, where) for name, each in zip(batch.schema.names, values, strict=True)}


def _value(value: Any, where: str) -> Any:
    try:
        return value.as_py()
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: not UTF-8 ({error.reason} at byte {error.start} of the text)") from error


def _opened(path: str) -> Any:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise DataError("source parquet needs the library pyarrow here: pip install pyarrow") from error
    try:
        return pyarrow.parquet.ParquetFile(open_regular(path))
    except (OSError, ValueError) as error:
        raise _error(path, "is not a parquet file that can be read", error) from error


def _error(path: str, what: str, error: OSError | ValueError) -> DataError:
    message = f"{path} {what}: {_first_line(error)}"
    return read_error(path, error, message) if isinstance(error, OSError) else DataError(message)


def _first_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
