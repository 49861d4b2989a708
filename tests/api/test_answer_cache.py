"""What was made last is kept, up to so many bytes."""

from manta.api.caches import AnswerCache


def test_answer_cache_keeps_an_answer_until_it_is_replaced():
    kept: AnswerCache[str, int] = AnswerCache(100)
    assert kept.get("a") is None
    kept.put("a", 1, 40)
    kept.put("a", 2, 40)
    assert kept.get("a") == 2 and kept.get("b") is None


def test_answer_cache_evicts_the_oldest_answer_when_full():
    kept: AnswerCache[str, str] = AnswerCache(100)
    for name in "abc":
        kept.put(name, name, 40)
    assert [kept.get(name) for name in "abc"] == [None, "b", "c"]


def test_answer_cache_replaces_an_answer_in_place_and_keeps_it_as_the_newest():
    kept: AnswerCache[str, str] = AnswerCache(100)
    for name in "abaab":
        kept.put(name, name, 40)
    assert kept.get("a") == "a" and kept.get("b") == "b"
    kept.put("c", "c", 40)
    assert kept.get("a") is None and kept.get("b") == "b"


def test_answer_cache_ignores_an_answer_larger_than_its_room():
    kept: AnswerCache[str, str] = AnswerCache(100)
    kept.put("a", "a", 101)
    assert kept.get("a") is None
