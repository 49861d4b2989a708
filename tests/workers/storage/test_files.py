"""Folders and object stores, by their addresses."""

import time
from pathlib import Path

import pytest

from manta.workers.storage.files import files_of
from manta.workers.storage.locations import InvalidLocation, ObjectPath, parse_location

CONTENT = bytes(range(256)) * 40


@pytest.fixture(params=["local", "s3"])
def folder(request, tmp_path):
    place = tmp_path if request.param == "local" else request.getfixturevalue("bucket")
    return place / "some" / "folder"


def _write(file, content=CONTENT):
    files = files_of(file)
    files.make_folder(file.parent)
    with files.writer(file) as opened:
        assert opened.write(content[:100]) == len(content[:100])
        assert opened.write(memoryview(content)[100:]) == len(content[100:])


def test_written_file_is_read_back_whole_and_in_pieces(folder):
    files, file = files_of(folder), folder / "a"
    _write(file)
    assert files.read(file) == CONTENT
    with files.reader(file) as opened:
        assert opened.size == len(CONTENT)
        opened.expect([(0, 10), (500, 10), (9000, 10)])
        buffer = memoryview(bytearray(10))
        for at in (500, 9000, 0, 77):
            assert opened.read_into(buffer, at) == 10 and buffer == CONTENT[at : at + 10]
        assert opened.read_into(buffer, len(CONTENT) - 4) == 4 and buffer[:4] == CONTENT[-4:]


def test_empty_file_exists_in_every_store(folder):
    _write(folder / "empty", b"")
    assert files_of(folder).read(folder / "empty") == b""
    assert list(files_of(folder).sizes(folder, ["empty"])) == [("empty", 0)]


def test_stored_names_are_files_and_folders_directly_inside(folder):
    files = files_of(folder)
    for name in ("b", "a"):
        _write(folder / name)
    _write(folder / "deeper" / "c")
    assert sorted(files.names(folder)) == ["a", "b", "deeper"]
    assert sorted(files.names(folder.parent)) == ["folder"]
    assert files.bytes_in(folder) == files.bytes_in(folder.parent) == 3 * len(CONTENT)


def test_missing_file_or_folder_is_not_found(folder):
    files = files_of(folder)
    for look in (files.names, files.check_folder, files.read):
        with pytest.raises(FileNotFoundError):
            look(folder)
    with pytest.raises(FileNotFoundError), files.reader(folder / "a"):
        pass
    assert not files.is_there(folder)
    assert files.bytes_in(folder) == 0
    files.remove(folder / "a")
    files.remove_folder(folder)


def test_sizes_of_files_name_a_missing_one(folder):
    _write(folder / "a")
    (first, size), (second, error) = files_of(folder).sizes(folder, ["a", "b"])
    assert (first, size, second) == ("a", len(CONTENT), "b") and isinstance(error, FileNotFoundError)


def test_write_whole_replaces_an_existing_file(folder):
    files = files_of(folder)
    files.make_folder(folder)
    for content in (b"one", b"two, longer", b""):
        files.write_atomically(folder / "manifest", content)
        assert files.read(folder / "manifest") == content
    assert files.names(folder) == ["manifest"]


def test_removing_a_file_or_folder_leaves_its_neighbours(folder):
    files = files_of(folder)
    for name in ("a", "ab"):
        _write(folder / name / "file")
    files.remove(folder / "a" / "file")
    files.remove_folder(folder / "a")
    assert files.names(folder) == ["ab"] and files.is_there(folder)
    files.remove_folder(folder)
    assert not files.is_there(folder)


def test_newest_time_is_that_of_the_last_file_at_any_depth(folder):
    files, before = files_of(folder), time.time() - 60
    assert files.newest(folder) is None
    _write(folder / "below" / "a")
    assert before < files.newest(folder) < time.time() + 60
    assert files.newest(folder / "b") is None


def test_place_without_a_url_scheme_is_a_path():
    assert parse_location("a/b") == Path("a/b") and parse_location("/a:b//c") == Path("/a:b/c")
    assert parse_location(Path("/x")) == Path("/x")
    assert parse_location("file:///a/b") == Path("/a/b")


@pytest.mark.parametrize("text", ["s3://bucket/some/prefix", "S3://bucket/some/prefix/"])
def test_store_url_is_taken_apart_like_a_path(text):
    place = parse_location(text)
    assert place == ObjectPath("s3", "bucket/some/prefix")
    assert str(place) == "s3://bucket/some/prefix" and parse_location(str(place)) == parse_location(place) == place
    assert (place.name, place.bucket) == ("prefix", "bucket")
    assert str(place / "file") == "s3://bucket/some/prefix/file" and (place / "file").parent == place
    assert str(place.parent.parent) == str(place.parent.parent.parent) == "s3://bucket"


@pytest.mark.parametrize("text", ["s3://", "s3:///prefix//", "s3://bucket//prefix", "s3://bucket/../other", "s3://./b"])
def test_url_without_a_bucket_or_with_steps_upwards_names_nothing(text):
    with pytest.raises(InvalidLocation, match=r"names no bucket and prefix, such as s3://bucket/prefix$"):
        parse_location(text)


def test_unsupported_store_is_refused_by_name():
    with pytest.raises(
        InvalidLocation, match=r"^gs://b/p is in no store that Manta knows: use a folder, or .* with s3://$"
    ):
        parse_location("gs://b/p")


@pytest.mark.parametrize("text", ["s3:bucket/p", "s3:/bucket/p", "S3:/"])
def test_incomplete_store_url_is_refused(text):
    with pytest.raises(InvalidLocation, match=r"is no URL: it begins with s3://, such as s3://bucket/prefix$"):
        parse_location(text)


def test_link_that_leads_nowhere_is_there(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "a mount that is away")
    assert files_of(tmp_path).is_there(tmp_path / "link")
