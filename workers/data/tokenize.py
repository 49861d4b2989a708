"""`python -m manta.workers.data.tokenize CONFIG.yaml [--cache FOLDER] [--to PREFIX] [--processes N]`: tokenizes a job's
corpus before the job is started, into the cache that the job will use; with --to also as an indexed dataset for
Megatron-LM."""

from __future__ import annotations

if __name__ == "__main__":  # before anything is loaded, which takes seconds
    from manta.workers.interruption import run_command

    run_command("manta.workers.data.tokenize")

import argparse
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from manta.workers.config import JobSpec
from manta.workers.data.indexed_dataset import IndexedTokens, read_index, write_index
from manta.workers.data.prepare import Corpus, open_corpus, splits_of
from manta.workers.data.sources import check_validation_set
from manta.workers.data.token_cache import Watcher
from manta.workers.errors import DataError, MantaError
from manta.workers.settings import read_token_cache
from manta.workers.spec.problems import SpecError
from manta.workers.spec.reading import load_job_spec
from manta.workers.spec.submitted import with_vocabulary


class ProgressLines(Watcher):
    """Shows progress to the user: on a terminal as one line, otherwise as a line from time to time."""

    def __init__(self, out: TextIO, processes: int | None = None):
        self._out, self.processes = out, processes
        self._line = out.isatty()
        self._open = False
        if self._line:
            self.report_seconds, self.report_growth = 0.2, 0.0

    def report(self, kind: str, message: str, data: dict[str, Any]) -> None:
        """Print it."""
        stays = kind != "data_progress" or not self._line
        before = "\r\x1b[K" if self._open else ""
        self._out.write(f"{before}{message}{chr(10) if stays else ''}")
        self._out.flush()
        self._open = not stays


def tokenize(spec: JobSpec, cache: Path, watcher: Watcher, to: Path | None = None) -> Corpus:
    """Tokenize the corpus of `spec` into `cache`, and with `to` also write a dataset of that name. Raises SpecError,
    DataError."""
    spec = with_vocabulary(spec)
    if spec.data.is_read_in_place and to is None:
        raise DataError("with data.tokenizer bytes this corpus is read as it is: there is nothing to prepare")
    if spec.data.is_read_in_place:
        raise DataError("a corpus that is read as it is has no documents: set data.end_of_document, or a tokenizer")
    if spec.data.source == "chat" and to is not None:
        raise DataError("an indexed dataset of Megatron-LM's does not say which tokens of a conversation are learned")
    corpus = open_corpus(spec, cache, watcher=watcher)
    splits_of(spec, corpus)
    for each in spec.data.validation:
        check_validation_set(spec, each, len(open_corpus(spec, cache, watcher=watcher, data=spec.data.corpus_of(each))))
    if to is not None:
        write_dataset([row for row in corpus.parts if isinstance(row, IndexedTokens)], to)
    return corpus


def write_dataset(rows: Sequence[IndexedTokens], to: Path) -> None:
    """Write `rows`, concatenated, as the indexed dataset `to`. Raises DataError if it already exists or cannot be
    written."""
    begun, named = Path(f"{to}.begun"), f"{to}.bin and {to}.idx"
    if Path(f"{to}.bin").exists() or Path(f"{to}.idx").exists():
        raise DataError(f"{named} are there already: remove them, or choose another name")
    indices = [read_index(row.prefix) for row in rows]
    if len({index.dtype for index in indices}) != 1:
        raise DataError(f"{named} would hold tokens of different types: write one path at a time")
    try:
        to.parent.mkdir(parents=True, exist_ok=True)
        with Path(f"{begun}.bin").open("wb") as file:
            for row in rows:
                with Path(f"{row.prefix}.bin").open("rb") as tokens:
                    shutil.copyfileobj(tokens, file, 2**22)
        before = np.cumsum([0, *(len(index.lengths) for index in indices)])
        documents = [index.documents[1:] + first for index, first in zip(indices, before, strict=False)]
        write_index(
            begun,
            indices[0].dtype,
            np.concatenate([index.lengths for index in indices]),
            np.concatenate([np.zeros(1, np.int64), *documents]),
        )
        for kind in ("bin", "idx"):
            Path(f"{begun}.{kind}").rename(f"{to}.{kind}")
    except OSError as error:
        raise DataError(f"{named} cannot be written ({error.strerror or error})") from error


def main(arguments: list[str] | None = None) -> int:
    """Entry point; returns the exit status. User errors are printed as one sentence on stderr."""
    parser = argparse.ArgumentParser(
        prog="python -m manta.workers.data.tokenize",
        description="Make the tokens of a job's corpus before it is started.",
    )
    parser.add_argument("config", type=Path, help="JobSpec in YAML")
    parser.add_argument("--cache", type=Path, help="keep the tokens in this folder (default: MANTA_TOKEN_CACHE)")
    parser.add_argument(
        "--to", type=Path, metavar="PREFIX", help="also write PREFIX.bin and PREFIX.idx, for Megatron-LM"
    )
    parser.add_argument("--processes", type=int, help="how many tokenize at once (default: one a core)")
    options = parser.parse_args(arguments)
    if options.processes is not None and options.processes < 1:
        parser.error("--processes must be at least 1")
    began = time.monotonic()
    try:
        cache = (options.cache or read_token_cache()).absolute()
        watcher = ProgressLines(sys.stdout, options.processes)
        corpus = tokenize(load_job_spec(options.config), cache, watcher, options.to)
    except SpecError as error:
        print(*error.lines(options.config), sep="\n", file=sys.stderr)
        return 2
    except (MantaError, OSError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    print(f"{len(corpus)} tokens are in {cache} ({time.monotonic() - began:.1f} s)")
    return 0
