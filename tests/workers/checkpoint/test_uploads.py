"""Files that a process beside this one uploads out of memory that both see."""

import io
import os
import signal
import subprocess
import threading
import zlib
from unittest.mock import Mock

import fsspec
import pytest
import torch
from s3_server import answer

from manta.workers.checkpoint import uploads as uploads_module
from manta.workers.checkpoint.checksums import BLOCK_BYTES
from manta.workers.checkpoint.uploads import SharedBuffer, Uploads, offset_within
from manta.workers.storage.files import files_of

ELEMENTS = 3 * BLOCK_BYTES // 4 + 5


@pytest.fixture
def buffer():
    buffer = SharedBuffer((ELEMENTS,), torch.float32)
    buffer.tensor.copy_(torch.arange(ELEMENTS))
    yield buffer
    buffer.close()


@pytest.fixture
def uploads(buffer):
    uploads = Uploads(buffer)
    yield uploads
    uploads.close()


def _upload(uploads, file, *contents, wrote=lambda: None):
    sums = {}
    with uploads.create(file, wrote, sums) as stream:
        for content in contents:
            stream.write(content)
    return sums[file.name]


def test_only_data_wholly_inside_shared_memory_is_passed_on_by_its_offset(buffer):
    whole = memoryview(buffer.tensor.numpy()).cast("B")
    assert [buffer.offset_of(whole[first:]) for first in (0, 8)] == [0, 8]
    for start, size in ((8, len(whole)), (-8, len(whole)), (0, len(whole) - 1)):
        assert offset_within(buffer.tensor.data_ptr() + start, size, whole) is None


def test_uploaded_file_has_the_bytes_and_sums_of_what_was_written_from_any_memory(uploads, buffer, bucket):
    file, shared = bucket / "file", memoryview(buffer.tensor.numpy()).cast("B")
    apart = os.urandom(BLOCK_BYTES + 7)
    wrote = []
    sums = _upload(uploads, file, b"head", shared[8:], apart, shared[:8], b"tail", wrote=lambda: wrote.append(1))
    whole = b"".join((b"head", shared[8:], apart, shared[:8], b"tail"))
    assert files_of(file).read(file) == whole
    blocks = [whole[at : at + BLOCK_BYTES] for at in range(0, len(whole), BLOCK_BYTES)]
    assert (sums.size, sums.blocks) == (len(whole), tuple(map(zlib.crc32, blocks)))
    assert len(wrote) >= len(blocks)


def test_tensor_saved_from_shared_memory_is_uploaded_without_a_copy(uploads, buffer, bucket, monkeypatch):
    copied = []

    class Counting(uploads_module._Pieces):
        def write(self, data):
            content = memoryview(data).cast("B")
            if self._buffer.offset_of(content) is None:
                copied.append(len(content))
            return super().write(data)

    monkeypatch.setattr(uploads_module, "_Pieces", Counting)
    file, sums = bucket / "file", {}
    with uploads.create(file, lambda: None, sums) as stream:
        torch.save(buffer.tensor[1000:].detach(), stream)
    assert sums["file"].size > 4 * (ELEMENTS - 1000)
    assert sum(copied) < 4096
    loaded = torch.load(io.BytesIO(files_of(file).read(file)), weights_only=True)
    assert torch.equal(loaded, buffer.tensor[1000:])


def test_upload_that_the_store_refuses_fails_and_the_next_one_succeeds(uploads, wire, wired_bucket):
    wire.meddle = lambda head: answer("403 Forbidden", "AccessDenied") if b"PUT" in head else None
    with pytest.raises(OSError, match="AccessDenied"):
        _upload(uploads, wired_bucket / "file", b"1")
    process = uploads._process
    wire.meddle = lambda head: None
    assert _upload(uploads, wired_bucket / "file", b"2").size == 1
    assert files_of(wired_bucket).read(wired_bucket / "file") == b"2"
    assert uploads._process is process


def test_killed_upload_process_fails_its_file_and_a_new_one_uploads_the_next(uploads, buffer, bucket):
    uploads.start()
    first, shared = uploads._process, memoryview(buffer.tensor.numpy()).cast("B")
    with pytest.raises(OSError, match="exit code -9"), uploads.create(bucket / "file", lambda: None, {}) as stream:
        stream.write(shared)
        os.kill(first.pid, signal.SIGKILL)
        first.wait()
    assert not files_of(bucket).is_there(bucket / "file")
    assert _upload(uploads, bucket / "file", shared).size == len(shared)
    assert uploads._process is not first


def test_upload_whose_writer_fails_leaves_no_file_and_can_be_repeated(uploads, bucket):
    with pytest.raises(KeyError), uploads.create(bucket / "file", lambda: None, {}) as stream:
        stream.write(b"half of it")
        raise KeyError
    assert not files_of(bucket).is_there(bucket / "file")
    assert _upload(uploads, bucket / "file", b"all of it").size == 9
    assert files_of(bucket).read(bucket / "file") == b"all of it"


def test_long_upload_that_its_writer_gives_up_leaves_no_part_in_the_store(uploads, buffer, wire, wired_bucket):
    shared, sent = memoryview(buffer.tensor.numpy()).cast("B"), threading.Event()
    wire.meddle = lambda head: sent.set() if b"partNumber=1" in head else None
    with pytest.raises(KeyError), uploads.create(wired_bucket / "file", lambda: None, {}) as stream:
        stream.write(shared)
        stream.write(shared)  # more than a part
        stream.write(bytes(2**21))  # more than is held back
        assert sent.wait(60)
        raise KeyError
    uploads.close()
    left = fsspec.filesystem("s3", skip_instance_cache=True).call_s3("list_multipart_uploads", Bucket=wired_bucket.key)
    assert left.get("Uploads", []) == []


def test_writer_that_gives_up_a_file_does_not_wait_for_the_upload_process_to_end(uploads, bucket, monkeypatch):
    waits, may_end = threading.Event(), threading.Event()

    class Slow(subprocess.Popen):
        def wait(self, timeout=None):
            waits.set()
            assert may_end.wait(60)
            return super().wait(timeout)

    monkeypatch.setattr(subprocess, "Popen", Slow)
    with pytest.raises(KeyError), uploads.create(bucket / "file", lambda: None, {}):
        raise KeyError
    assert waits.wait(60)
    may_end.set()


def test_reply_to_an_upload_given_up_midway_is_not_taken_for_that_of_the_next(uploads, bucket):
    with pytest.raises(KeyError):
        _upload(uploads, bucket / "file", b"half of it", wrote=Mock(side_effect=KeyError))
    assert _upload(uploads, bucket / "file", b"all of it").size == 9
    assert files_of(bucket).read(bucket / "file") == b"all of it"


def test_writer_of_a_file_that_another_thread_gives_up_gets_an_os_error_however_late(uploads, buffer, bucket):
    shared = memoryview(buffer.tensor.numpy()).cast("B")
    with pytest.raises(OSError, match="the process that uploads has ended"):  # noqa: SIM117
        with uploads.create(bucket / "file", lambda: None, {}) as stream:
            stream.write(shared)
            uploads.abort()
            for ending in uploads._ending:
                ending.join()
            stream.write(shared)
            stream.write(bytes(2**21))
    assert _upload(uploads, bucket / "file", shared).size == len(shared)


def test_upload_process_ends_when_its_input_is_closed(uploads):
    uploads.start()
    process, uploads._process = uploads._process, None
    process.stdin.close()
    assert process.wait(60) == 0
