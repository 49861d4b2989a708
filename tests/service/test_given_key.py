"""Keys that were drawn outside, with other secrets."""

import pytest

from manta.service.keys.identity import Scope, new_browser_token, new_key
from manta.service.keys.installation_keys import GivenKeyUnusable, add_existing_key
from manta.service.store import audit, keys


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
