"""A step's global batch is the same whatever the layout; replicas and micro-batches only cut it."""

from __future__ import annotations

import pytest
import torch
from engine_specs import spec

from workers.data.batches import Batches
from workers.data.skipped_samples import SkippedSamples
from workers.errors import DataError

CPU = torch.device("cpu")


@pytest.fixture
def corpus(tmp_path) -> dict:
    """1000 bytes that say where they are, 100 of them held out."""
    path = tmp_path / "corpus.bin"
    path.write_bytes(bytes(n % 251 for n in range(1000)))
    return {"paths": [str(path)], "validation_fraction": 0.1}


def whole(corpus: dict, data: int, micro: int, step: int, validation: bool = False) -> torch.Tensor:
    """The global batch [B, s + 1] put together from all replicas' micro-batches."""
    job = spec(data=corpus, train={"micro_batch_size": micro}, parallel={"data": data})
    rows = []
    for replica in range(data):
        batches = Batches(job, replica, CPU)
        for part in batches.validation(step) if validation else batches.training(step):
            assert part.inputs_sb.shape == part.targets_sb.shape == (8, micro)
            assert torch.equal(part.inputs_sb[1:], part.targets_sb[:-1]), "targets are the tokens that follow"
            rows.append(torch.cat([part.inputs_sb, part.targets_sb[-1:]]).t())
    return torch.cat(rows)


@pytest.mark.parametrize(("data", "micro"), [(2, 1), (4, 2), (1, 8), (8, 1)])
@pytest.mark.parametrize("step", [1, 2, 40])
def test_batches_do_not_depend_on_the_layout(corpus, data, micro, step):
    assert torch.equal(whole(corpus, data, micro, step), whole(corpus, 1, 1, step))
    assert torch.equal(whole(corpus, data, micro, 0, True), whole(corpus, 1, 1, 0, True))


def test_a_step_continues_where_the_one_before_ended(corpus):
    job = spec(data=corpus)
    order = Batches(job, 0, CPU).order
    for step in (1, 2, 13):
        first = [row[0].item() for row in whole(corpus, 1, 1, step)]
        assert first == [order.start(8 * (step - 1) + i) % 251 for i in range(8)]


def test_training_never_sees_the_held_out_part(corpus):
    batches = Batches(spec(data=corpus), 0, CPU)
    assert (batches.training_tokens, batches.validation_tokens) == (900, 100)
    assert max(batches.order.start(i) for i in range(5000)) + 9 <= 900


def test_validation_reads_the_held_out_part_in_order_and_again_from_its_start(corpus):
    first = whole(corpus, 1, 1, 0, validation=True)
    assert first[:, 0].tolist() == [(900 + 8 * i) % 251 for i in range(8)]
    second = whole(corpus, 1, 1, 1, validation=True)  # 12 windows in all
    assert second[:, 0].tolist() == [(900 + 8 * (i % 12)) % 251 for i in range(8, 16)]


def test_validation_has_at_least_one_batch_and_at_most_those_held_out(corpus):
    for asked, expected in ((8, 1), (1, 1)):
        assert Batches(spec(data=corpus, train={"validation_batches": asked}), 0, CPU).validation_batches() == expected
    for asked, expected in ((8, 6), (4, 4)):
        job = spec(data=corpus, train={"validation_batches": asked, "global_batch_size": 2})
        assert Batches(job, 0, CPU).validation_batches() == expected
    one = Batches(spec(data=corpus, train={"validation_batches": 99, "global_batch_size": 1}), 0, CPU)
    for tokens, windows in ((100, 12), (97, 12), (96, 11)):  # a window needs its last target too
        one.validation_tokens = tokens
        assert one.validation_batches() == windows
    short = spec(data=corpus, train={"validation_batches": 8, "global_batch_size": 16})  # of 12 windows
    assert Batches(short, 0, CPU).validation_batches() == 1


def test_a_step_passes_over_skipped_samples_and_its_dropout_stays_that_of_its_places(corpus):
    job = spec(data=corpus, train={"micro_batch_size": 4, "seed": 7})
    batches = Batches(job, 0, CPU)
    assert batches.order.seed == 7
    batches.skipped = SkippedSamples.of([range(3, 13)])
    used = [0, 1, 2, 13, 14, 15, 16, 17]
    parts = batches.training(1)
    first = [token for part in parts for token in part.inputs_sb[0].tolist()]
    assert first == [batches.order.start(sample) % 251 for sample in used]
    assert batches.samples(1) == [range(3), range(13, 18)]
    assert [part.samples for part in batches.training(2)] == [range(8, 12), range(12, 16)]


def test_stages_between_the_ends_read_no_text(corpus):
    job = spec(data=corpus, train={"micro_batch_size": 4}, parallel={"data": 2})
    (part,) = Batches(job, 1, CPU, reads_tokens=False).training(2)
    assert (part.samples, part.inputs_sb, part.targets_sb) == (range(12, 16), None, None)


def test_one_rank_makes_the_record_of_the_corpus_and_all_hold_to_it(corpus, tmp_path):
    record = tmp_path / "record.json"
    Batches(spec(data=corpus), 0, CPU, record=record)
    assert not record.exists(), "another rank makes it"
    Batches(spec(data=corpus), 0, CPU, record=record, records=True)
    (tmp_path / "corpus.bin").write_bytes(bytes(999))
    with pytest.raises(DataError, match="has 999 bytes, and had 1000"):
        Batches(spec(data=corpus), 0, CPU, record=record)
