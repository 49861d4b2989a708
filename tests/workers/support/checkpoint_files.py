"""Checkpoints whose content is made up."""

from manta.workers.checkpoint.catalog import Manifest, checkpoint_path, seal
from manta.workers.checkpoint.checksums import BLOCK_BYTES, SummedFiles
from manta.workers.storage.files import files_of

CONTENT = bytes(range(256)) * 30_000
"""More than one block."""


def saved(folder, step, generation=1, whole=True):
    """A checkpoint of one short file; one that is not whole has no manifest."""
    path = checkpoint_path(folder, step, generation)
    path.mkdir(parents=True)
    (path / "data").write_bytes(b"12345")
    if whole:
        seal(path, Manifest("j", generation, step, {"data": 5}, {}))
    return path


def made(folder, step=10, block_bytes=BLOCK_BYTES):
    """A whole checkpoint of two files."""
    path = checkpoint_path(folder, step, 1)
    files, contents = SummedFiles(block_bytes=block_bytes), {"data": CONTENT, "empty": b""}
    files_of(path).make_folder(path)
    for name, content in contents.items():
        with files.create(path / name) as stream:
            stream.write(content)
    blocks = {name: list(sums.blocks) for name, sums in files.sums.items()}
    sizes = {name: len(content) for name, content in contents.items()}
    seal(path, Manifest("j", 1, step, sizes, {}, blocks=blocks, block_bytes=block_bytes))
    return path
