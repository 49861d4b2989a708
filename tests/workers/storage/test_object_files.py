"""What a store that misbehaves costs: another try, or an error that says so; never a file that is not whole, and never
one that is taken for absent."""

import itertools
from unittest.mock import Mock

import fsspec
import pytest
from s3_server import MIN_PART, answer, reached_at

from manta.workers.storage import object_files
from manta.workers.storage.files import files_of
from manta.workers.storage.locations import ObjectPath

PART = MIN_PART
CONTENT = bytes(bytearray(itertools.islice(itertools.cycle(range(251)), 3 * PART + 1000)))


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr(object_files, "PART_BYTES", PART)


def _upload(file, content=CONTENT):
    with files_of(file).writer(file) as opened:
        for at in range(0, len(content), PART // 5):
            opened.write(content[at : at + PART // 5])


def _uploads_left(bucket):
    store = fsspec.filesystem("s3", skip_instance_cache=True)
    return store.call_s3("list_multipart_uploads", Bucket=bucket.key).get("Uploads", [])


def _once_each(said, *lines):
    """Answers the first request that begins with each of these lines with what is `said`."""
    left = list(lines)

    def meddle(head):
        for line in left:
            if line in head.split(b"\r\n", 1)[0]:
                left.remove(line)
                return said
        return None

    return meddle


def test_long_object_is_uploaded_in_parts_and_appears_only_when_whole(bucket):
    file = bucket / "long"
    with files_of(file).writer(file) as opened:
        opened.write(CONTENT)
        assert not files_of(file).is_there(file)
    assert files_of(file).read(file) == CONTENT
    assert _uploads_left(bucket) == []


@pytest.mark.parametrize("said", [answer("503 Slow Down"), answer("500 Internal Server Error", "InternalError"), "cut"])
def test_object_store_requests_that_fail_once_are_repeated(wire, wired_bucket, said):
    file = wired_bucket / "file"
    wire.meddle = _once_each(said, b"partNumber=1", b"partNumber=3", b"?uploads", b"?uploadId=")
    _upload(file)
    wire.meddle = _once_each(said, b"GET", b"HEAD")
    with files_of(file).reader(file) as opened:
        opened.expect([(0, 1000), (PART, 1000)])
        buffer = memoryview(bytearray(1000))
        for at in (0, PART, 7):
            assert opened.read_into(buffer, at) == 1000 and buffer == CONTENT[at : at + 1000]
    assert files_of(file).read(file) == CONTENT


def test_upload_of_a_large_file_switches_to_larger_parts(bucket, monkeypatch):
    monkeypatch.setattr(object_files, "SMALL_PARTS", 3)
    monkeypatch.setattr(object_files, "LARGE", 2)
    file, whole, sent = bucket / "file", CONTENT[: 3 * PART] * 3 + b"end", []
    send = object_files.S3Upload._send_part
    noted = lambda upload, number, body: sent.append((number, len(body))) or send(upload, number, body)  # noqa: E731
    monkeypatch.setattr(object_files.S3Upload, "_send_part", noted)
    _upload(file, whole)
    assert sorted(sent) == [*((n, PART) for n in (1, 2, 3)), *((n, 2 * PART) for n in (4, 5, 6)), (7, 3)]
    assert files_of(file).read(file) == whole


def test_object_exists_even_if_the_answer_of_its_upload_was_lost(wire, wired_bucket):
    """The store does not know the upload any more when it is asked again."""
    file = wired_bucket / "file"
    wire.meddle = _once_each("answer lost", f"POST /{file.key}?uploadId=".encode())
    _upload(file)
    assert sum("?uploadId=" in line and line.startswith("POST") for line in wire.requests) > 1
    assert files_of(file).read(file) == CONTENT


def test_failed_upload_leaves_the_former_object(wire, wired_bucket):
    file = wired_bucket / "file"
    _upload(file)
    wire.meddle = lambda head: "cut" if b"POST" in head and b"?uploadId=" in head else None
    with pytest.raises(OSError):
        _upload(file, bytes(len(CONTENT)))
    assert files_of(file).read(file) == CONTENT


def test_failed_part_upload_leaves_nothing_behind(wire, wired_bucket):
    file = wired_bucket / "file"
    wire.meddle = lambda head: answer("503 Slow Down") if b"partNumber=2" in head else None
    with pytest.raises(OSError, match=r"SlowDown|reduce your request rate"):
        _upload(file)
    wire.meddle = lambda head: None
    assert not files_of(file).is_there(file)
    assert _uploads_left(wired_bucket) == []


def test_aborted_upload_leaves_no_object_and_no_parts(bucket):
    file = bucket / "file"
    with pytest.raises(KeyError), files_of(file).writer(file) as opened:
        opened.write(CONTENT)
        raise KeyError
    assert not files_of(file).is_there(file)
    assert _uploads_left(bucket) == []


def test_missing_bucket_is_an_error_other_than_file_not_found(bucket):
    files, place = files_of(bucket), ObjectPath("s3", "no-such-bucket/folder")
    for ask in (files.names, files.read, files.is_there, files.check_folder, files.bytes_in):
        with pytest.raises(OSError, match="no-such-bucket") as caught:
            ask(place)
        assert not isinstance(caught.value, FileNotFoundError)


@pytest.mark.parametrize("status", ["403 Forbidden", "503 Slow Down"])
def test_refusing_or_overloaded_store_is_not_taken_for_a_missing_object(wire, wired_bucket, status):
    files_of(wired_bucket).write_atomically(wired_bucket / "file", b"1")
    wire.meddle = lambda head: answer(status, "AccessDenied" if "403" in status else "SlowDown")
    with pytest.raises(OSError) as caught:
        files_of(wired_bucket).read(wired_bucket / "file")
    assert not isinstance(caught.value, FileNotFoundError)


def test_unreachable_store_is_named(bucket):
    with reached_at("http://127.0.0.1:9"), pytest.raises(OSError, match=r"127\.0\.0\.1:9") as caught:
        files_of(bucket).read(bucket / "file")
    assert not isinstance(caught.value, FileNotFoundError)


def test_missing_store_package_is_named_with_its_installation(monkeypatch):
    object_files._object_files.cache_clear()
    monkeypatch.setattr(fsspec, "filesystem", Mock(side_effect=ImportError))
    with pytest.raises(object_files.StoreNotInstalled, match=r"^s3:// needs the package s3fs, .*'manta-train\[s3\]'$"):
        files_of(ObjectPath("s3", "bucket"))


def test_upload_has_a_bounded_number_of_parts_in_flight(wire, wired_bucket):
    wire.pace, most = 1e6, []
    upload = object_files.S3Upload
    file = wired_bucket / "file"
    with files_of(file).writer(file) as opened:
        assert isinstance(opened, upload)
        for _ in range(8):
            opened.write(CONTENT[:PART])
            most.append(len(opened._under_way))
    assert max(most) == object_files.PARTS_AT_ONCE
    assert files_of(file).bytes_in(file) == 8 * PART
