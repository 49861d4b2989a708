"""What a part says, and which parts make up a log."""

import pytest

from manta.service.log_archive.parts import NoPart, PartName, Segment, counting, decode, encode, is_gapless


def names(*parts):
    return [str(PartName(*part)) for part in parts]


def counted(*parts):
    return [(part.first, part.last, part.stamp) for part in counting(names(*parts))]


def test_log_part_name_is_parsed_and_other_names_are_ignored():
    part = PartName(3, 17, 4, True)
    assert PartName.parse(str(part)) == part and str(part) == "000000003-000000017-000004-end.part"
    assert counting([".000000001-000000001-000001.part", "rank-00000.jsonl", "x"]) == []


def test_later_control_plane_wins_between_log_parts_of_one_number():
    parts = (2, 2, 9), (1, 1, 1), (2, 2, 1), (3, 3, 9)
    assert counted(*parts) == counted(*sorted(parts)) == [(1, 1, 1), (2, 2, 9), (3, 3, 9)]


def test_log_part_merged_from_others_replaces_them():
    assert counted((1, 1, 1), (1, 3, 2), (2, 2, 1), (3, 3, 1), (4, 4, 2)) == [(1, 3, 2), (4, 4, 2)]


def test_gap_in_log_part_numbers_is_detected():
    assert is_gapless(counting(names((1, 3, 1), (4, 4, 1)))) and is_gapless([])
    assert not is_gapless(counting(names((1, 1, 1), (3, 3, 1))))
    assert not is_gapless(counting(names((2, 2, 1))))


def test_log_part_keeps_the_bytes_of_each_rank():
    chunks = {12: (Segment(0, 3, (1, 4)), b"ab\n"), 2: (Segment(7, 7, (1, 2)), b""), 0: (Segment(5, 7, (2, 1)), b"c\n")}
    content = encode(chunks)
    assert decode(content) == chunks
    with pytest.raises(NoPart):
        decode(content[:-1])


@pytest.mark.parametrize("content", [b"", b"no JSON\n", b"[]\n", b'{"ranks": {"0": [1]}}\n'])
def test_invalid_log_part_is_refused(content):
    with pytest.raises(NoPart):
        decode(content)
