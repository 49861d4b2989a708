"""Bytes for people."""

import pytest

from manta.service.words import byte_count


@pytest.mark.parametrize(("count", "text"), [
    (0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1.5 * 2**30, "1.5 GiB"), (5 * 2**40, "5.0 TiB"),
    (5000 * 2**40, "5000.0 TiB"),
])  # fmt: skip
def test_byte_counts_are_written_in_the_largest_full_unit(count, text):
    assert byte_count(count) == text
