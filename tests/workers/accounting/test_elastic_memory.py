"""What elastic sums take beside the gradients is told as large as it is in an engine."""

import pytest
import torch
from engine_specs import spec
from rank_programs import micro_batches

from manta.workers.accounting.device_bytes import arriving_bytes, bytes_of_stage, halves_bytes
from manta.workers.accounting.step_peak import StepPeak
from manta.workers.comm.comm import Comm
from manta.workers.comm.grid import RankGrid
from manta.workers.engine import Engine
from manta.workers.parallel.data.elastic_sums import LeafSum

CASES = {
    "a table on both ends": ({}, {"pipeline": 2, "data": 2}, 8, 1),
    "replicas with one node each": ({}, {"data": 4}, 16, 3),
    "shares that are not aligned": ({}, {"data": 3}, 16, 4),
    "copies of keys and values": ({"kv_heads": 1, "family": "llama"}, {"tensor": 4, "data": 2}, 8, 1),
    "small buckets": ({}, {"data": 2, "bucket_megabytes": 0.2}, 8, 1),
}


def job(model, parallel, batch, **train):
    shape = {"hidden_size": 128, "vocabulary_size": 4096, "sequence_length": 64} | model
    return spec(model=shape, parallel=parallel, train={"global_batch_size": batch, "micro_batch_size": 2, **train})


@pytest.mark.parametrize("name", CASES)
def test_elastic_receive_buffer_has_the_size_of_the_largest_bucket(name):
    model, parallel, batch, nodes = CASES[name]
    elastic = job(model, parallel, batch, deterministic="elastic")
    grid = RankGrid(elastic.layout)
    for stage in range(elastic.layout.pipeline):
        engine = Engine(elastic, Comm(grid, stage * elastic.layout.tensor, torch.device("cpu")))
        part = max((end - start) // elastic.layout.data for start, end in engine.flat.buckets)
        assert arriving_bytes(elastic, stage, gpu=False) == pytest.approx(4 * part * nodes, rel=0.03)
        predicted = bytes_of_stage(StepPeak(elastic), stage, elastic.micro_batches)
        assert predicted.activations + predicted.workspace >= arriving_bytes(elastic, stage, gpu=True)


def test_elastic_receive_buffer_is_absent_without_elastic_sums_or_other_replicas():
    assert arriving_bytes(job({}, {"data": 2}, 8), 0, gpu=True) == 0
    assert arriving_bytes(job({}, {}, 8, deterministic="elastic"), 0, gpu=True) == 0


HALVES = {
    "zb-v": ({"schedule": "zb-v", "virtual_stages": 2}, {}),
    "two chunks": ({"schedule": "interleaved", "virtual_stages": 2}, {}),
    "gpipe": ({"schedule": "gpipe"}, {}),
    "zb-h1": ({"schedule": "zb-h1"}, {}),
    "zb-h1, a few logits": ({"schedule": "zb-h1"}, {"head_tokens": 16}),
    "frozen": ({"schedule": "zb-v", "virtual_stages": 2}, {"frozen": ["embedding"]}),
}


@pytest.mark.parametrize("name", HALVES)
def test_accounted_gradient_halves_of_tied_embeddings_match_the_engine(monkeypatch, name):
    parallel, train = HALVES[name]
    elastic = job({}, parallel, 10, deterministic="elastic", **train)
    engine = Engine(elastic, Comm(RankGrid(elastic.layout), 0, torch.device("cpu")))
    most, second_use = 0, LeafSum._second_use

    def counted(self, micro_batch):
        nonlocal most
        result = second_use(self, micro_batch)
        most = max(most, sum(part.nbytes for parts in self._halves.values() for part in parts))
        return result

    monkeypatch.setattr(LeafSum, "_second_use", counted)
    batch = micro_batches(elastic, 0, torch.randint(256, (10, 65)))
    engine.reduction.begin(len(batch), 10)
    engine.pipeline.train(batch, 1.0)
    assert halves_bytes(elastic, 0, len(batch)) == most
    assert (most > 0) == (name in ("zb-v", "two chunks", "zb-h1, a few logits"))


def test_ranks_with_one_end_of_the_model_make_no_halves():
    elastic = job({}, {"pipeline": 2}, 8, deterministic="elastic")
    assert halves_bytes(elastic, 0, 4) == halves_bytes(elastic, 1, 4) == 0
