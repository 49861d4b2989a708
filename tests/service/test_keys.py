"""Scopes, secrets, and the keys that a service makes or is given."""

import errno
import os
import re
import stat
from unittest.mock import Mock

import pytest

from manta.service import installation_keys, own_files
from manta.service.identity import PROJECT_PATTERN, Identity, Scope, digest_of, new_browser_token, new_key
from manta.service.installation_keys import GivenKeyUnusable, add_existing_key, ensure_automatic
from manta.service.own_files import HomeUnusable, KeyFileUnsafe, read_key
from manta.service.store import audit, keys


def row_of(store, key):
    return store.query(keys.by_digest, digest_of(key))


@pytest.fixture
def home(tmp_path):
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


def test_automatic_key_is_created_on_the_first_start_readable_by_its_user_only(store, home):
    ensure_automatic(store, home)
    key = read_key(home)
    assert stat.S_IMODE((home / "api.key").stat().st_mode) == 0o600
    row = row_of(store, key)
    assert (row.name, row.scope, row.installation, row.project) == ("automatic", Scope.ADMIN, True, "default")
    assert [path.name for path in home.iterdir()] == ["api.key"]
    (entry,) = store.query(audit.page, None).items
    assert (entry.operation, entry.target, entry.user) == ("create_key", row.id, "the service")


@pytest.mark.parametrize("written", ["manta_from-before\n", "\ufeffmanta_from-before\r\n"], ids=["ours", "edited"])
def test_automatic_key_is_added_to_another_database(store, home, written):
    (home / "api.key").write_text(written)
    (home / "api.key").chmod(0o600)
    ensure_automatic(store, home)
    assert read_key(home) == "manta_from-before" and row_of(store, "manta_from-before").installation


def test_automatic_key_is_kept_on_the_next_start_and_replaced_once_revoked(store, home):
    ensure_automatic(store, home)
    before = read_key(home)
    ensure_automatic(store, home)
    assert read_key(home) == before
    store.write(lambda session: keys.revoke(session, None, keys.by_digest(session, digest_of(before)).id))
    ensure_automatic(store, home)
    assert read_key(home) != before and row_of(store, read_key(home)).revoked_at is None


def test_automatic_key_is_none_without_a_file(home):
    assert read_key(home) is None


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o644])
def test_automatic_key_file_accessible_to_others_is_refused(store, home, mode):
    ensure_automatic(store, home)
    (home / "api.key").chmod(mode)
    for use in (lambda: read_key(home), lambda: ensure_automatic(store, home)):
        with pytest.raises(KeyFileUnsafe, match=r"api\.key can be read or written by others: remove it"):
            use()


def test_automatic_key_file_that_is_foreign_a_link_or_no_text_is_refused(home, monkeypatch):
    path = home / "api.key"
    (home / "other").touch(mode=0o600)
    path.symlink_to(home / "other")
    with pytest.raises(KeyFileUnsafe, match="cannot be read"):
        read_key(home)
    path.unlink()
    for make, why in (
        (lambda: os.mkfifo(path, 0o600), r"cannot be read \(a pipe, not a regular file\): remove it"),
        (path.mkdir, r"cannot be read \(a folder, not a regular file\): remove it"),
        (lambda: (path.touch(0o600), path.write_bytes(b"\xff")), "is not text: remove it"),
    ):
        make()
        with pytest.raises(KeyFileUnsafe, match=why):
            read_key(home)
        path.rmdir() if path.is_dir() else path.unlink()
    path.touch(mode=0o600)
    monkeypatch.setattr(installation_keys.os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(KeyFileUnsafe, match="belongs to another user"):
        read_key(home)


def test_full_disk_leaves_no_key_file_and_names_the_home(store, home, monkeypatch):
    monkeypatch.setattr(own_files.os, "fsync", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(HomeUnusable, match=rf"the home {home} cannot be used .*: No space left on device"):
        ensure_automatic(store, home)
    assert list(home.iterdir()) == []


def test_key_is_good_for_all_projects_and_is_added_once(store):
    drawn = new_key()
    first = store.write(lambda session: add_existing_key(session, drawn, "prometheus", Scope.READ))
    again = store.write(lambda session: add_existing_key(session, drawn, "prometheus", Scope.READ))
    assert first.id == again.id and first.installation and first.scope == Scope.READ
    with store.read() as session:
        assert [line.operation for line in audit.page(session, None).items] == ["create_key"]


@pytest.mark.parametrize(
    "poor",
    ["", "manta_", "manta_" + "a" * 42, "a" * 64, "manta_" + "ä" * 64, new_browser_token()],
    ids=["empty", "nothing drawn", "too short", "no mark", "not ASCII", "of a browser"],
)
def test_weak_or_malformed_given_key_is_refused(store, poor):
    with pytest.raises(GivenKeyUnusable, match="openssl rand"):
        store.write(lambda session: add_existing_key(session, poor, "admin", Scope.ADMIN))


def test_given_key_that_was_revoked_stays_revoked(store):
    drawn = new_key()
    added = store.write(lambda session: add_existing_key(session, drawn, "admin", Scope.ADMIN))
    store.write(lambda session: keys.revoke(session, None, added.id))
    with pytest.raises(GivenKeyUnusable, match="revoked"):
        store.write(lambda session: add_existing_key(session, drawn, "admin", Scope.ADMIN))


def test_given_key_that_is_known_cannot_get_another_scope(store):
    drawn = new_key()
    store.write(lambda session: add_existing_key(session, drawn, "prometheus", Scope.READ))
    with pytest.raises(GivenKeyUnusable, match="known already"):
        store.write(lambda session: add_existing_key(session, drawn, "admin", Scope.ADMIN))


READ, SUBMIT, ADMIN = Scope


@pytest.mark.parametrize(
    ("held", "covered"), [(READ, [READ]), (SUBMIT, [READ, SUBMIT]), (ADMIN, [READ, SUBMIT, ADMIN])]
)
def test_key_scope_covers_lower_scopes(held, covered):
    assert [needed for needed in Scope if held.covers(needed)] == covered


def test_key_secrets_have_256_random_bits_and_a_prefix():
    drawn = {new_key() for _ in range(100)} | {new_browser_token() for _ in range(100)}
    assert len(drawn) == 200
    assert all(re.fullmatch(r"manta_(browser_)?[\w-]{43}", each) for each in drawn)


def test_key_digest_is_sha_256():
    assert digest_of("abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert len(digest_of("\ud800")) == 64, "whatever a header holds"


def test_project_key_is_bound_to_its_project_and_installation_key_to_none():
    assert Identity("key_1", "a", None, "theirs", ADMIN, installation=False).bound == "theirs"
    assert Identity("key_1", "a", None, "theirs", READ, installation=True).bound is None


@pytest.mark.parametrize("name", ["a", "a-b", "0", "x" * 63])
def test_valid_project_names_are_accepted(name):
    assert re.fullmatch(PROJECT_PATTERN, name)


@pytest.mark.parametrize("name", ["", "-a", "a-", "A", "a_b", "a\n", "x" * 64, "ä"])
def test_invalid_project_names_are_refused(name):
    assert not re.fullmatch(PROJECT_PATTERN, name)
