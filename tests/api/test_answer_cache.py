"""What was made last is kept, up to so many bytes."""

from manta.api.caches import AnswerCache


def test_an_answer_is_kept_until_there_is_another():
    kept: AnswerCache[str, int] = AnswerCache(100)
    assert kept.get("a") is None
    kept.keep("a", 1, 40)
    kept.keep("a", 2, 40)
    assert kept.get("a") == 2 and kept.get("b") is None


def test_what_was_made_first_goes_where_there_is_room_for_no_more():
    kept: AnswerCache[str, str] = AnswerCache(100)
    for name in "abc":
        kept.keep(name, name, 40)
    assert [kept.get(name) for name in "abc"] == [None, "b", "c"]


def test_an_answer_made_anew_is_the_last_one_and_takes_the_room_of_one():
    kept: AnswerCache[str, str] = AnswerCache(100)
    for name in "abaab":
        kept.keep(name, name, 40)
    assert kept.get("a") == "a" and kept.get("b") == "b"
    kept.keep("c", "c", 40)
    assert kept.get("a") is None and kept.get("b") == "b"


def test_an_answer_larger_than_all_room_is_not_kept():
    kept: AnswerCache[str, str] = AnswerCache(100)
    kept.keep("a", "a", 101)
    assert kept.get("a") is None
