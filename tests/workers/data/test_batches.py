"""A step's global batch is the same whatever the layout; replicas and micro-batches only cut it."""

from __future__ import annotations

import pytest
import torch
from engine_specs import spec

from workers.data.batches import Batches

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
    job = spec(data=corpus, train={"validation_batches": 8, "global_batch_size": 2})
    assert Batches(job, 0, CPU).validation_batches() == 6
