"""Records the weights and the adapter that a job began with, so that a start which is repeated, before there is a
checkpoint or a snapshot to continue from, never begins with others. Pure Python.

A digest covers the names, the sizes and the headers of the files of tensors, and samples of the bytes of each tensor:
all values of weights that were trained on, merged or cast differ, and reading all bytes would take as long as loading
them. config.json is not part of it: the job's spec has what it said when the job was submitted.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

from manta.workers.config import JobSpec
from manta.workers.data.read_errors import weights_error
from manta.workers.data.unchanged_file import digest_of
from manta.workers.errors import WeightsError
from manta.workers.storage.files import files_of
from manta.workers.storage.locations import Location
from manta.workers.system.daemon_threads import answered_within
from manta.workers.system.regular_files import open_regular
from manta.workers.weights.folder import ADAPTER, header_of, samples_of, weight_files

FILE_NAME = "weights.json"
ANSWER_SECONDS = 5.0
"""Seconds after which the record's place counts as not answering; nothing is checked then."""
SAMPLES = 8
"""Number of samples of each tensor."""


def check_unchanged(spec: JobSpec, record: Location) -> None:
    """Compare the folders that the job begins with with the `record` of its first start, which is made if there is
    none; one that cannot be read or written now does not prevent training. Raises WeightsError if they have changed."""
    digests = {key: (folder, _digest(files)) for key, folder, files in _folders(spec)}
    if not digests:
        return

    def read_or_write() -> dict[str, str]:
        with contextlib.suppress(FileNotFoundError):
            known: dict[str, str] = json.loads(files_of(record).read(record))
            return known
        now = {key: digest for key, (_, digest) in digests.items()}
        files_of(record).make_folder(record.parent)
        files_of(record).write_atomically(record, json.dumps(now).encode())
        return now

    before: dict[str, str] = {}
    with contextlib.suppress(OSError, ValueError):
        before = answered_within(ANSWER_SECONDS, "record of weights", read_or_write)
    for key, (folder, digest) in digests.items():
        if before.get(key, digest) != digest:
            raise WeightsError(
                f"{key}: {folder} is not what it was when the job began: its digest is {digest} and was {before[key]}; "
                "put it back as it was, or submit a new job"
            )


def _folders(spec: JobSpec) -> Iterator[tuple[str, Path, list[Path]]]:
    """The key of each folder, the folder and its files of tensors."""
    if spec.model.from_ is not None:
        folder = Path(spec.model.from_)
        yield "model.from", folder, weight_files(folder)
    if spec.train.lora is not None and spec.train.lora.from_ is not None:
        folder = Path(spec.train.lora.from_)
        yield "train.lora.from", folder, [folder / ADAPTER]


def _digest(files: list[Path]) -> str:
    total = hashlib.sha256()
    for path in files:
        try:
            with open_regular(path) as file:
                size = file.seek(0, 2)
                total.update(f"{path.name} {size} {digest_of(file.fileno(), size)}\n".encode())
        except OSError as error:
            raise weights_error(path, error) from error
        for tensor in header_of(path):
            total.update(f"{tensor.name} {tensor.dtype} {tensor.shape} {tensor.first}\n".encode())
            total.update(b"".join(samples_of(tensor, SAMPLES)))
    return total.hexdigest()
