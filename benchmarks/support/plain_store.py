"""Brings the same bytes as a checkpoint's to their place, in a process of its own that knows nothing of the training:
by boto3 with its own settings (but for its patience), or by a copy on disk.

`python -m benchmarks.support.plain_store FOLDER TO`: FOLDER's files to a folder or an s3:// URL. Prints a line when it
begins, and ends once all is there.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

READ_SECONDS = 600
"""For how long an answer of the store is waited for."""


def main(folder: str, to: str) -> None:
    """Bring all files there, one after the other."""
    files = sorted(Path(folder).iterdir())
    bucket, _, prefix = to.removeprefix("s3://").partition("/")
    if to.startswith("s3://"):
        import boto3
        from botocore.config import Config

        client = boto3.client("s3", config=Config(read_timeout=READ_SECONDS))
        print("begins", flush=True)
        for file in files:
            client.upload_file(str(file), bucket, f"{prefix}/{file.name}")
        return
    print("begins", flush=True)
    Path(to).mkdir(parents=True)
    for file in files:
        with file.open("rb") as source, (Path(to) / file.name).open("wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)
            os.fsync(target.fileno())


if __name__ == "__main__":
    main(*sys.argv[1:])
