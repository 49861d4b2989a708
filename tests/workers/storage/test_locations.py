"""Names of durable files, on disk and in object stores."""

from pathlib import Path

import pytest

from manta.workers.storage.locations import InvalidLocation, ObjectPath, parse_location


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
