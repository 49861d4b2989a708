"""Whose a credential is, on clocks of the test's own."""

import asyncio
from types import SimpleNamespace

import pytest
from sqlalchemy.exc import OperationalError
from starlette.requests import Request

from manta.api.app_state import attach_state
from manta.api.security import access, credentials
from manta.api.security.credentials import CACHE_SECONDS, Credential, Identities, cookie_name, credential_in
from manta.service.identity import Identity, Scope, digest_of
from manta.service.store import keys
from tests.api.support.keys import add_key

KEY = "manta_a-key"


class World:
    """A database with keys, and two clocks."""

    def __init__(self, store):
        self.store, self.unix, self.ticks = store, 1000.0, 0.0
        self.identities = Identities(lambda: store, lambda: self.unix, lambda: self.ticks)

    def who(self, key, is_key=True):
        return asyncio.run(self.identities.of(Credential(digest_of(key), is_key)))

    def revoke(self, key):
        self.store.write(lambda s: keys.revoke(s, None, keys.by_digest(s, digest_of(key)).id))


@pytest.fixture
def world(store):
    return World(store)


def test_key_identifies_its_holder_project_and_scope(world):
    key = add_key(world.store, "submit", "theirs", user="ada", name="laptop")
    who = world.who(key)
    assert who == Identity(who.key_id, "laptop", "ada", "theirs", Scope.SUBMIT, installation=False)
    assert who.bound == "theirs"
    assert world.who(key[:-1]) is None and world.who("") is None


def test_key_expires_at_its_time_despite_the_cache(world):
    key = add_key(world.store, "read", expires_at=2000.0)
    world.unix = 1999.9
    assert world.who(key) is not None
    world.unix = 2000.0
    assert world.who(key) is None


@pytest.mark.parametrize("by", ["this process", "another process"])
def test_revoked_key_is_refused_at_once_here_and_within_a_second_elsewhere(world, by):
    key = add_key(world.store, "read")
    assert world.who(key) is not None
    world.revoke(key)
    if by == "this process":
        world.identities.forget()
    else:
        world.ticks += CACHE_SECONDS * 0.99
        world.unix += 1000.0
        assert world.who(key) is not None, "nobody has asked the database again"
        world.ticks += CACHE_SECONDS * 0.01
    assert world.who(key) is None


def test_session_has_the_rights_of_its_key_and_ends_when_the_key_is_revoked(world):
    key = add_key(world.store, "read", "theirs")
    key_id = world.who(key).key_id

    def begin(session):
        keys.add_link(session, key_id, digest_of("link"))
        return keys.open_link(session, digest_of("link"), digest_of("cookie"))[1].expires_at

    until = world.store.write(begin)
    assert world.who("cookie", is_key=False) == world.who(key)
    assert world.who("cookie") is None and world.who("link", is_key=False) is None and world.who(key, False) is None
    world.unix = until
    assert world.who("cookie", is_key=False) is None
    world.unix = 1000.0
    world.revoke(key)
    world.identities.forget()
    assert world.who("cookie", is_key=False) is None


@pytest.mark.parametrize(
    ("headers", "credential"),
    [
        ({"authorization": f"Bearer {KEY}"}, Credential(digest_of(KEY), True)),
        ({"authorization": f"bearer   {KEY} "}, Credential(digest_of(KEY), True)),
        ({"authorization": f"Basic {KEY}"}, None),
        ({"authorization": KEY}, None),
        ({"authorization": "Bearer "}, None),
        ({}, None),
        ({"cookie": f"a=b; manta_session_8400={KEY}", "host": "127.0.0.1:8400"}, Credential(digest_of(KEY), False)),
        ({"cookie": f"manta_session_8400={KEY}", "host": "127.0.0.1:8401"}, None),
        ({"cookie": "manta_session_8400=", "host": "127.0.0.1:8400"}, None),
        ({"cookie": f"manta_session_default={KEY}", "host": "manta.example.org"}, Credential(digest_of(KEY), False)),
    ],
)
def test_credential_is_the_bearer_key_or_the_cookie_of_this_port(headers, credential):
    assert credential_in(headers) == credential


def test_services_on_one_machine_have_cookies_of_their_own():
    assert cookie_name("127.0.0.1:8400") != cookie_name("127.0.0.1:8401")
    assert cookie_name("a:80") == cookie_name("a:443") == cookie_name("a") == cookie_name("a:nonsense")


def test_credential_cache_is_bounded(world, monkeypatch):
    monkeypatch.setattr(credentials, "_MAX_CACHED", 2)
    made = [add_key(world.store, "read", name=name) for name in "abc"]
    assert [world.who(key).key_name for key in made] == ["a", "b", "c"]
    for key in made:
        world.revoke(key)
    known = [world.who(key) is not None for key in made]
    assert known == [False, False, True], "those before were forgotten, and the database was asked again"


@pytest.mark.parametrize("outcome", ["good", "unknown", "anonymous", "database away"])
def test_stream_stays_authorized_while_its_key_is_valid_or_the_database_away(world, monkeypatch, outcome):
    key = add_key(world.store, "read") if outcome != "unknown" else "manta_unknown"
    credential = None if outcome == "anonymous" else Credential(digest_of(key), True)
    if outcome == "database away":

        def refuse(credential):
            raise OperationalError("SELECT", {}, Exception("the server went away"))

        monkeypatch.setattr(world.identities, "_read", refuse)
    app = SimpleNamespace(state=SimpleNamespace())
    attach_state(app, SimpleNamespace(identities=world.identities))
    scope = {"type": "http", "app": app}
    access.attach(scope, access.RequestOfCaller(None, "127.0.0.1", credential))
    still = asyncio.run(access.is_still_authorized(Request(scope)))
    assert still == (outcome in ("good", "database away"))
