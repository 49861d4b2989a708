"""A proof shows that somebody knows the secret, and is good for what it says only."""

from __future__ import annotations

import dataclasses

import pytest
from rank_threads import SECRET, secret

from manta.workers.comm.secret import PROOF_BYTES, Secret


def test_secret_proof_holds_only_for_its_statement():
    proof = secret(3).proof("address", 1, "host:80")
    assert len(proof) == PROOF_BYTES
    assert secret(3).proves(proof, "address", 1, "host:80")
    for other in [("address", 2, "host:80"), ("address", "1", "host:80"), ("address", 1, "host:8", "0"), ()]:
        assert not secret(3).proves(proof, *other)
    assert not secret(3).proves(proof[:-1], "address", 1, "host:80")
    assert not secret(3).proves(b"", "address", 1, "host:80")


@pytest.mark.parametrize("change", [{"generation": 4}, {"purpose": "another"}, {"value": SECRET[:-1] + "x"}], ids=str)
def test_secret_proof_fails_for_another_generation_purpose_or_secret(change):
    other = dataclasses.replace(secret(3), **change)
    assert not other.proves(secret(3).proof("a"), "a")


def test_secret_is_not_shown_and_not_empty():
    assert SECRET not in repr(secret())
    with pytest.raises(ValueError, match="has 64 characters, not 0"):
        Secret("", 1, "training")
