"""What elastic sums bring from other replicas is told as large as the buckets of an engine make it."""

import pytest
import torch
from engine_specs import spec

from workers.accounting.device_bytes import bytes_of_stage
from workers.accounting.elastic_exchange import arriving_bytes
from workers.accounting.step_peak import StepPeak
from workers.comm.comm import Comm
from workers.comm.grid import RankGrid
from workers.engine import Engine

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
def test_it_is_what_the_largest_bucket_takes(name):
    model, parallel, batch, nodes = CASES[name]
    elastic = job(model, parallel, batch, deterministic="elastic")
    grid = RankGrid(elastic.layout)
    for stage in range(elastic.layout.pipeline):
        engine = Engine(elastic, Comm(grid, stage * elastic.layout.tensor, torch.device("cpu")))
        part = max((end - start) // elastic.layout.data for start, end in engine.flat.buckets)
        assert arriving_bytes(elastic, stage, gpu=False) == pytest.approx(4 * part * nodes, rel=0.03)
        told = bytes_of_stage(StepPeak(elastic), stage, elastic.micro_batches)
        assert told.activations + told.workspace >= arriving_bytes(elastic, stage, gpu=True)


def test_nothing_comes_where_gradients_are_reduced_or_nobody_else_has_any():
    assert arriving_bytes(job({}, {"data": 2}, 8), 0, gpu=True) == 0
    assert arriving_bytes(job({}, {}, 8, deterministic="elastic"), 0, gpu=True) == 0
