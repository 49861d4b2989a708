"""Pauses between tries grow to the longest one, and stay there."""

from itertools import islice

from manta.service.backoff import backoff, backoff_after


def test_backoff_depends_on_the_number_of_tries():
    pauses = list(islice(backoff(0.25, 10.0), 9))
    assert pauses == [0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0, 10.0]
    assert [backoff_after(tries, 0.25, 10.0) for tries in range(9)] == pauses


def test_backoff_is_capped_after_thousands_of_tries():
    assert backoff_after(100_000, 0.25, 60.0) == 60.0
