"""The URL of a job database: what is one, and what of it may be shown."""

from pathlib import Path

import pytest

from manta.service.store.location import InvalidDatabaseUrl, file_of, parse_url, shown, sqlite_url, url_in


@pytest.mark.parametrize(
    "text", ["postgresql://me:secret@there/manta", "postgres://me@there/manta", "postgresql+psycopg://there/manta"]
)
def test_postgresql_url_selects_the_psycopg_driver(text):
    url = parse_url(text)
    assert (url.drivername, url.database, file_of(url)) == ("postgresql+psycopg", "manta", None)


def test_sqlite_url_of_a_file_with_special_characters_reads_back_the_same(tmp_path):
    file = tmp_path / "a b?c#d%41@:" / "manta.db"
    assert file_of(parse_url(sqlite_url(file))) == file


def test_database_is_in_the_home_unless_a_url_is_given():
    assert url_in(Path("/home/me"), None) == "sqlite:////home/me/manta.db"
    assert url_in(Path("/home/me"), "postgresql://there/manta") == "postgresql://there/manta"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("secret", "cannot be read"),
        ("postgresql://me:secret@there:port/manta", "cannot be read"),
        ("mysql://me:secret@there/manta", "begins with 'mysql', a kind of database"),
        ("postgresql+asyncpg://me:secret@there/manta", "begins with 'postgresql+asyncpg'"),
        ("postgresql://me:secret@there", "names no database"),
        ("sqlite://", "names no file"),
        ("sqlite:///:memory:", "names no file"),
        ("sqlite:///manta.db", "names a file by a relative path"),
    ],
)
def test_bad_database_url_is_refused_without_showing_its_secrets(text, problem):
    with pytest.raises(InvalidDatabaseUrl) as caught:
        parse_url(text)
    assert f"the database's URL {problem}" in str(caught.value)
    assert "secret" not in str(caught.value)
    assert "secret" not in str(caught.value.__cause__) and caught.value.__suppress_context__ in (True, False)


def test_password_anywhere_in_a_database_url_is_not_shown():
    text = "postgresql://me:secret@there:1/manta?password=secret&sslpassword=secret&host=/run"
    assert shown(parse_url(text)) == "postgresql://me:***@there:1/manta?host=%2Frun"
