"""Documents that share a sample are apart on every stage, and nothing is predicted across them."""

from __future__ import annotations

import json

import pytest
import torch
from engine_specs import axes, spec

from manta.workers.data.batches import NO_TARGET, Batches, Documents
from manta.workers.errors import DataError

CPU, END = torch.device("cpu"), 256
TEXTS = ["abc", "d", "", "efghijklmnopqrstuvwxyz" * 3, "0123456789" * 4]


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": each}) + "\n" for each in TEXTS * 5))
    return {
        "source": "jsonl", "paths": [str(path)], "end_of_document": "<|endoftext|>", "documents": "apart",
        "validation_fraction": 0.1,
    }  # fmt: skip


def batches_of(corpus, tmp_path, reads_tokens=True, **sections):
    return Batches(spec(data=corpus, **sections), 0, CPU, reads_tokens, cache=tmp_path / "cache")


def test_documents_lie_between_the_tokens_that_end_them():
    documents = Documents.of(torch.tensor([[1, END, END, 4, 5], [1, 2, 3, 4, END]]).numpy(), END)
    assert documents == Documents(((0, 2, 3), (0,)), 5)
    assert documents.lengths == [2, 1, 2, 5]
    assert documents.first_tokens().tolist() == [[0, 0, 2, 3, 3], [0] * 5]


def test_no_token_is_trained_to_predict_the_next_documents_first_token(corpus, tmp_path):
    ends = 0
    for step in (1, 2, 3):
        for batch in batches_of(corpus, tmp_path).training(step):
            inputs, targets = batch.inputs_sb, batch.targets_sb
            assert ((targets == NO_TARGET) == (inputs == END)).all()
            assert (targets[:-1][inputs[:-1] != END] == inputs[1:][inputs[:-1] != END]).all()
            assert batch.documents == Documents.of(inputs.t().numpy(), END)
            ends += int((inputs == END).sum())
    assert ends > 3


def test_stages_that_read_no_tokens_know_the_same_document_boundaries(corpus, tmp_path):
    whole, middle = (batches_of(corpus, tmp_path, reads).training(2) for reads in (True, False))
    assert [each.documents for each in middle] == [each.documents for each in whole]


def test_separating_documents_without_an_end_token_is_refused_before_training(corpus, tmp_path):
    job = spec(data=corpus)
    job = job.model_copy(update={"data": job.data.model_copy(update={"end_of_document": "none"})})
    with pytest.raises(DataError, match=r"data\.documents: apart needs to know the token that ends documents"):
        Batches(job, 0, CPU, cache=tmp_path / "cache")


@pytest.mark.parametrize("layout", [(1, 1, 1), (1, 2, 2)], ids=str)
def test_validation_keeps_documents_apart(corpus, tmp_path, layout):
    batches = batches_of(corpus, tmp_path, train={"validate_every": 1}, parallel=axes(layout))
    (held_out,) = batches.held_out
    assert all(each.documents is not None for each in batches.validation(held_out, 0))
