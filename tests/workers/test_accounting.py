"""Parameters and FLOPs by arithmetic equal what torch counts on a real model."""

from __future__ import annotations

import itertools

import pytest
import torch
from engine_specs import spec
from plain_gpt import PlainGPT
from torch.utils.flop_counter import FlopCounterMode

from workers.accounting import core_attention_forward, parameter_count, step_flops

SHAPES = list(itertools.product([True, False], [True, False], [None, 72], [None, 300]))


def job(tied: bool = True, bias: bool = True, ffn: int | None = None, vocabulary: int | None = None, **parallel):
    """A small model; batch of 6."""
    model = {"tie_embeddings": tied, "bias": bias, "ffn_hidden_size": ffn, "vocabulary_size": vocabulary}
    train = {"global_batch_size": 6}
    return spec(model={key: value for key, value in model.items() if value is not None}, train=train, parallel=parallel)


@pytest.mark.parametrize(("tied", "bias", "ffn", "vocabulary"), SHAPES)
def test_parameters_are_those_of_a_plain_model(tied, bias, ffn, vocabulary):
    found = job(tied, bias, ffn, vocabulary)
    assert parameter_count(found) == sum(parameter.numel() for parameter in PlainGPT(found).parameters())


@pytest.mark.parametrize(("tied", "bias", "ffn", "vocabulary"), SHAPES)
def test_flops_are_those_that_torch_counts_with_attention_in_full(tied, bias, ffn, vocabulary):
    """The plain model's attention is written out, so torch counts all s^2 pairs of it."""
    found = job(tied, bias, ffn, vocabulary)
    windows = torch.zeros(6, 9, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        PlainGPT(found).loss(windows).backward()
    assert step_flops(found).model_full == counter.get_total_flops()


def test_flops_are_those_of_the_papers_formula():
    """72 B L s h^2 (1 + s / 6h + v / 12hL), arXiv:2205.05198, eq. 7."""
    B, L, s, h, v = 6, 4, 8, 32, 256
    expected = 72 * B * L * s * h**2 * (1 + s / (6 * h) + v / (12 * h * L))
    assert step_flops(job()).model_full == pytest.approx(expected, rel=1e-12)


def test_causal_counts_half_of_the_attention_and_hardware_adds_its_recomputation():
    plain, selective = step_flops(job()), step_flops(job(recompute="selective"))
    attention = 6 * 4 * core_attention_forward(job().model)
    assert core_attention_forward(job().model) == 4 * 8**2 * 32
    assert plain.model_full - plain.model_causal == 3 * attention / 2
    assert plain.hardware_full == plain.model_full == selective.model_full
    assert selective.hardware_full - selective.model_full == attention


def test_flops_do_not_depend_on_the_layout():
    assert step_flops(job(tensor=2, pipeline=2, data=2)) == step_flops(job())
