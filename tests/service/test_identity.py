"""Scopes cover each other in one order; secrets are random and kept as digests only."""

import re

import pytest

from manta.service.keys.identity import PROJECT_PATTERN, Identity, Scope, digest_of, new_browser_token, new_key

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
