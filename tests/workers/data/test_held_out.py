"""How much of a held-out text is read, and in which order."""

from __future__ import annotations

import pytest
from engine_specs import spec

from manta.workers.data.batches import BlendedHeldOut, HeldOut, validation_sets
from manta.workers.data.prepare import ByteCorpus
from manta.workers.errors import DataError


def held_out(tokens: int, most: int) -> HeldOut:
    """A text that begins at token 900."""
    return HeldOut(None, ByteCorpus([]), 900, tokens, most)


def test_validation_has_at_least_one_batch_and_at_most_the_whole_text():
    for asked, size, expected in ((8, 8, 1), (1, 8, 1), (8, 2, 6), (4, 2, 4), (8, 16, 1)):  # of 12 windows
        job = spec(train={"global_batch_size": size})
        assert held_out(100, asked).batches(job) == expected
    one = spec(train={"global_batch_size": 1})
    for tokens, windows in ((100, 12), (97, 12), (96, 11)):  # a window needs its last target too
        assert held_out(tokens, 99).batches(one) == windows


def test_held_out_windows_lie_end_to_end_and_wrap_around_at_the_end():
    assert [held_out(33, 1).start(sample, 8) for sample in range(6)] == [900, 908, 916, 924, 900, 908]


def test_held_out_parts_of_a_blend_each_wrap_around_at_their_own_end():
    class InTurn:
        def locate(self, sample: int) -> tuple[int, int]:
            return sample % 2, sample // 2

    blended = BlendedHeldOut(None, ByteCorpus([]), 900, 50, 1, ((900, 33), (2000, 24)), InTurn())
    starts = [blended.start(sample, 8) for sample in range(12)]
    assert starts[::2] == [900, 908, 916, 924, 900, 908]
    assert starts[1::2] == [2000, 2008] * 3, "a third window has no target for its last token"


def test_validation_set_may_have_its_own_number_of_batches(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"x" * 1000)
    sets = [{"name": name, "paths": [str(tmp_path / "a.txt")]} for name in ("as_all", "own")]
    job = spec(data={"validation": [sets[0], sets[1] | {"batches": 3}]}, train={"validate_every": 1})
    assert [each.max_batches for each in validation_sets(job, None, False)] == [job.train.validation_batches, 3]


def test_too_short_or_missing_validation_set_is_refused_with_its_path(tmp_path):
    (tmp_path / "short.txt").write_bytes(b"12345678")
    named = {"name": "tiny", "paths": [str(tmp_path / "short.txt")]}
    job = spec(data={"validation": [named]}, train={"validate_every": 1})
    with pytest.raises(DataError, match=r"validation set tiny has 8 tokens, but one sequence .* needs 9: .*short\.txt"):
        validation_sets(job, None, False)
    job = spec(data={"validation": [named | {"paths": [str(tmp_path / "gone")]}]}, train={"validate_every": 1})
    with pytest.raises(DataError, match=r"no such file or directory: .*gone"):
        validation_sets(job, None, False)
