"""What lies where in a checkpoint: ranks' texts are joined as they are, and read where they are asked for."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manta.workers.checkpoint.catalog import Manifest
from manta.workers.checkpoint.contents import Contents, StoredRectangle, StoredTensor, as_text, merged
from manta.workers.protocol.json_codec import MalformedMessage

MANIFEST = Manifest("job", 1, 1, {"a": 1000, "b": 1000}, {})


def rows_of(file: str, *rows: tuple[int, int]) -> list[StoredRectangle]:
    """Whole rows of a matrix of three columns."""
    return [StoredRectangle((first, 0), (count, 3), file, 10 * first, 10 * count) for first, count in rows]


def of_two_ranks() -> bytes:
    one, other = rows_of("a", (0, 2), (5, 1)), rows_of("b", (2, 3))
    parts = [(file, {"it": as_text((6, 3), "float32", those)}) for file, those in (("a", one), ("b", other))]
    whole = merged(parts)
    assert whole.rectangles == 3
    return whole.content


def test_rectangles_of_a_tensor_are_joined_in_the_order_of_their_ranks():
    contents = Contents.from_bytes(of_two_ranks())
    contents.check(MANIFEST)
    assert list(contents.tensors) == ["it"]
    whole = (*rows_of("a", (0, 2), (5, 1)), *rows_of("b", (2, 3)))
    assert contents.tensors["it"] == StoredTensor((6, 3), "float32", whole)
    assert Contents.from_bytes(contents.to_bytes()).tensors["it"] == contents.tensors["it"]


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ("[[0,0,1,3,5]]", "not a list of rectangles"),
        ("[[0,0,1,3,5,6],7]", "not a list of rectangles"),
        ("[[0,0,1,3,5,6]", "not a list of rectangles"),
        ("7", "not a list of rectangles"),
        ("[[0,0,1,3,999,6]]", "goes beyond the end of a"),
        ("[[0,0,7,3,5,6]]", "lies outside of its shape"),
    ],
)
def test_malformed_rows_of_a_tensor_are_reported_when_that_tensor_is_read(rows, problem):
    document = json.loads(of_two_ranks())
    document["tensors"]["bad"] = {"shape": [6, 3], "dtype": "float32", "rows": {"a": rows}}
    contents = Contents.from_bytes(json.dumps(document).encode())
    contents.check(MANIFEST)
    assert len(contents.tensors["it"].rectangles) == 3
    with pytest.raises(MalformedMessage, match=problem):
        contents.tensors["bad"]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"dtype": "float16"}, "for one rank and"),
        ({"shape": (6, 4)}, "for one rank and"),
        ({"rows": "{}"}, "list of num"),
    ],
)
def test_ranks_that_disagree_on_a_tensor_or_send_nonsense_are_refused(change, problem):
    said = as_text((6, 3), "float32", rows_of("a", (0, 2)))
    with pytest.raises(MalformedMessage, match=problem):
        merged([("a", {"it": said}), ("b", {"it": replace(said, **change)})])


@pytest.mark.parametrize("content", [b"[]", b"{}", b'{"tensors": []}', b'{"tensors": {"a": 1}}', b"{"])
def test_malformed_contents_file_is_refused(content):
    with pytest.raises((MalformedMessage, ValueError)):
        Contents.from_bytes(content)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 12)), max_size=20), st.integers(0, 40), st.integers(1, 40))
def test_rectangles_that_hold_given_rows_are_found_as_by_a_full_search(rows, first, count):
    tensor = StoredTensor((50, 3), "float32", tuple(rows_of("a", *rows)))
    end = first + count
    overlapping = [
        each for each in tensor.rectangles if each.offsets[0] < end and each.offsets[0] + each.sizes[0] > first
    ]
    key = lambda each: (each.offsets, each.sizes)  # noqa: E731
    assert sorted(tensor.overlapping(first, end), key=key) == sorted(overlapping, key=key)
