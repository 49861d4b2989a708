"""Whatever becomes of the way to the store, or of the store, in the middle of a save: a checkpoint in it is whole, or
it is none; and the next save is whole."""

import random

import pytest
import torch
from checkpoint_files import made
from s3_server import S3Server, Wire, answer, reached_at

from manta.workers.checkpoint.catalog import Condition, Manifest, inspect, seal, verify
from manta.workers.checkpoint.checksums import UnreadableCheckpoint
from manta.workers.checkpoint.transfer import copy
from manta.workers.checkpoint.uploads import SharedBuffer, Uploads
from manta.workers.storage import object_files
from manta.workers.storage.files import files_of
from manta.workers.storage.locations import ObjectPath

PART = 5 * 1024 * 1024
SEEDS = [pytest.param(seed, marks=() if seed < 2 else pytest.mark.soak) for seed in range(50)]
REFUSALS = (answer("503 Slow Down"), answer("500 Internal Server Error", "InternalError"), "cut")


class Trouble:
    """Drawn from a seed: each request is refused or cut with some chance, the wire may be slow, and after some request
    the server is killed."""

    def __init__(self, seed: int, server: S3Server, wire: Wire):
        draw = random.Random(seed)
        self._draw, self._server, self._wire = draw, server, wire
        self._chance = draw.choice((0.0, 0.1, 0.3, 0.8))
        self._killed_after = draw.choice((None, None, draw.randrange(1, 12)))
        self._requests = 0
        wire.pace = draw.choice((None, 60e6))
        wire.meddle = self._meddle

    def _meddle(self, head: bytes):
        self._requests += 1
        if self._requests == self._killed_after:
            self._server.process.kill()
            self._server.process.wait()
        return self._draw.choice(REFUSALS) if self._draw.random() < self._chance else None


class Saved:
    """A checkpoint of one file that the process beside a trainer uploads; in parts of the size that users have."""

    def __init__(self) -> None:
        self._room = SharedBuffer((3 * object_files.PART_BYTES,), torch.uint8)
        self._room.tensor.copy_(torch.arange(len(self._room.tensor)) % 251)
        self._uploads = Uploads(self._room)

    def save(self, target: ObjectPath) -> None:
        """Upload it. Raises OSError."""
        sums = {}
        with self._uploads.create(target / "data", lambda: None, sums) as stream:
            stream.write(memoryview(self._room.tensor.numpy()))
        blocks = {"data": list(sums["data"].blocks)}
        seal(target, Manifest("j", 1, 10, {"data": sums["data"].size}, {}, blocks=blocks))

    def close(self) -> None:
        """End the process."""
        self._uploads.close()
        self._room.close()


@pytest.fixture
def save(seed, tmp_path, monkeypatch):
    """Saves a checkpoint at a place: for half of the seeds as a trainer does, else as a copy of another."""
    if seed % 2:
        saved = Saved()
        yield saved.save
        saved.close()
    else:
        monkeypatch.setattr(object_files, "PART_BYTES", PART)
        source = made(tmp_path / "source")
        yield lambda target: copy(source, target)


@pytest.mark.parametrize("seed", SEEDS)
def test_save_reported_as_done_despite_store_faults_is_whole_and_a_failed_one_can_be_repeated(seed, save):
    server = S3Server()
    server.make_bucket("bucket")
    wire, target = Wire(server), ObjectPath("s3", "bucket/job/step-00000010-generation-1")
    try:
        with reached_at(wire.url):
            trouble = Trouble(seed, server, wire)
            try:
                save(target)
                ended = True
            except OSError:
                ended = False
            wire.meddle, wire.pace = lambda head: None, None
            if server.process.poll() is None or trouble._killed_after is None:
                condition, _, _ = inspect(target)
                assert condition is Condition.COMPLETE or not ended
                if condition is Condition.COMPLETE:
                    verify(target)
                else:
                    files_of(target).remove_folder(target)
                    save(target)
                    verify(target)
            else:  # the server has lost what it had: nobody can say anything
                with pytest.raises(UnreadableCheckpoint):
                    verify(target)
    finally:
        wire.close()
        server.close()
