"""Corpora that have to be tokenized, through the real service: who makes the tokens, where they are, what stays."""

import json
import os
import signal

import pytest
from tokenizer_files import TEXT, byte_level

from manta.api.client import ApiError
from tests.e2e.manta import STEPS
from tests.e2e.test_jobs import open_to_others


@pytest.fixture
def documents(tmp_path):
    """Two files of documents, and a tokenizer."""
    byte_level(tmp_path / "tokenizer.json")
    for name, texts in (("a.jsonl", TEXT[:200]), ("b.jsonl", TEXT[200:])):
        (tmp_path / name).write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return tmp_path


def data_of(documents, **data):
    paths = [str(documents / name) for name in ("a.jsonl", "b.jsonl")]
    return {"source": "jsonl", "paths": paths, "tokenizer": str(documents / "tokenizer.json"), **data}


def test_a_job_trains_on_tokens_that_one_rank_of_its_node_makes(manta, documents):
    data = data_of(documents, weights=[1, 2])
    document = manta.spec(steps=12, layout=(2, 2, 2), train={"validate_every": 12}, data=data)
    first = manta.submit(document)
    done = manta.until_state(first, "SUCCEEDED")
    assert done.spec["data"]["tokenizer_vocabulary"] == 400
    (prepared,) = [event for event in manta.events(first, "data_prepared") if event.data["made"]]
    assert (prepared.data["documents"], prepared.data["files"]) == (300, 2)
    assert prepared.data["tokens"] > 1000
    assert prepared.data["seconds"] > 0
    cache = manta.paths.token_cache
    assert len(list(cache.glob("*/tokens.bin"))) == 2
    assert open_to_others(manta.home / "cache") == []
    job_folder = manta.paths.job_folder(first)
    assert (job_folder / "tokenizer.json").read_bytes() == (documents / "tokenizer.json").read_bytes()

    alone = manta.submit(manta.spec(steps=12, layout=(1, 1, 1), train={"validate_every": 12}, data=data))
    manta.until_state(alone, "SUCCEEDED")
    (event,) = manta.events(alone, "data_prepared")
    assert not event.data["made"], "they were made before"
    for (_, loss, norm), (_, other, other_norm) in zip(manta.curve(first), manta.curve(alone), strict=True):
        assert other == pytest.approx(loss, rel=2e-6)
        assert other_norm == pytest.approx(norm, rel=2e-5)


def test_a_rank_that_dies_finds_the_tokens_again(manta, documents):
    data = data_of(documents, tokenizer="bpe", tokenizer_vocabulary=300)
    job = manta.submit_held(manta.spec(layout=(1, 1, 2), data=data), 1, 5)
    ranks = manta.client.ranks(job).items
    os.kill(ranks[1].pid, signal.SIGKILL)
    ended = manta.until_state(job, "SUCCEEDED")
    assert ended.restarts == 1
    assert [step for step, _, _ in manta.curve(job)] == list(range(1, STEPS + 1))
    assert len(manta.events(job, "tokenizer_trained")) == 1
    assert len([event for event in manta.events(job, "data_prepared") if event.data["made"]]) == 1


def packed(manta, documents, replicas):
    """Documents of a blend, apart from each other, whose bits do not depend on the number of replicas."""
    data = {**data_of(documents, weights=[1, 2]), "documents": "apart"}
    train = {"deterministic": "elastic", "micro_batch_size": 2}
    elastic = {"min_data": 1, "max_data": 3}
    return manta.submit(manta.spec(100_000, (1, 1, replicas), train=train, elastic=elastic, data=data))


def test_a_kill_a_resize_and_a_pause_in_the_middle_of_a_packed_blend_change_no_bit(manta, documents):
    job = packed(manta, documents, 2)
    manta.leave_room(job)  # each step that is made meanwhile is made twice, below
    manta.until_step(job, 5)
    os.kill(manta.client.ranks(job).items[1].pid, signal.SIGKILL)
    manta.until("the recovery", lambda: manta.events(job, "recovered"))
    manta.client.resize(job, 3)
    manta.until("three replicas", lambda: manta.client.job(job).parallel["data"] == 3)
    manta.client.pause(job)
    manta.until_state(job, "PAUSED")
    manta.client.resume(job)
    manta.until_step(job, manta.client.job(job).step + 5)
    manta.cancel(job)
    curve = manta.curve(job)
    clean = packed(manta, documents, 1)
    manta.until_step(clean, len(curve))
    manta.cancel(clean)
    assert [step for step, _, _ in curve] == list(range(1, len(curve) + 1))
    assert curve == manta.curve(clean)[: len(curve)]


def test_a_broken_document_ends_the_job_with_its_place(manta, documents):
    with (documents / "b.jsonl").open("a") as file:  # behind the first lines, which are read at submission
        file.write(100 * (json.dumps({"text": "word " * 200}) + "\n") + '{"text": "cut')
    job = manta.submit(manta.spec(steps=12, layout=(1, 1, 2), data=data_of(documents)))
    failed = manta.until_state(job, "FAILED")
    assert failed.step == 0
    assert f"{documents / 'b.jsonl'}, line 201 (byte " in failed.message
    assert "not valid JSON" in failed.message
    assert manta.leftovers(job) == []


def test_submission_with_an_invalid_tokenizer_file_is_refused(manta, documents):
    (documents / "tokenizer.json").write_text("{}")
    with pytest.raises(ApiError) as refused:
        manta.submit(manta.spec(data=data_of(documents)))
    (entry,) = refused.value.problem.errors
    assert (refused.value.problem.status, entry.path) == (422, "data.tokenizer")
    assert "is not a tokenizer.json" in entry.rule
