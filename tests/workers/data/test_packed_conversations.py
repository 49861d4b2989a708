"""Every conversation lies whole in one sample, and what is learned of it are its answers, under every layout."""

from __future__ import annotations

import json
import tracemalloc

import numpy as np
import pytest
import torch
from chat_files import CONVERSATIONS, chat_file, said, tokenizer_folder
from engine_specs import axes, spec
from hypothesis import given
from hypothesis import strategies as st
from megatron_files import megatron_dataset
from tokenizer_files import RecordingWatcher

from manta.workers.data import packed_conversations, shards
from manta.workers.data.batches import NO_TARGET, Batches
from manta.workers.data.indexed_dataset import IndexedTokens
from manta.workers.data.packed_conversations import OPEN_SAMPLES, PackedConversations, packed
from manta.workers.data.prepare import open_corpus
from manta.workers.data.tokenize import tokenize
from manta.workers.errors import DataError

CPU, LENGTH = torch.device("cpu"), 256
CHATS = [said(f"{n} is " * (1 + n % 5), f"{n}.", f"and {n * n}?", "yes " * (n % 7)) for n in range(60)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tokenizer_folder(tmp_path_factory.mktemp("tokenizer"), "qwen")


def job(paths, folder, model=None, **sections):
    data = {
        "source": "chat", "paths": [str(path) for path in paths], "tokenizer": str(folder), "validation_fraction": 0.0,
    }  # fmt: skip
    data |= sections.pop("data", {})
    model = {"sequence_length": LENGTH, "vocabulary_size": 512, **(model or {})}
    return spec(data=data, model=model, **sections)


def batches_of(job_, tmp_path, replica=0, watcher=None):
    return Batches(job_, replica, CPU, cache=tmp_path / "cache", watcher=watcher or RecordingWatcher(2))


def conversations_in(folder, chats, length=LENGTH):
    """(tokens, learned) of each as transformers has them, as far as a sample is long; nothing comes before the first
    token."""
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    for chat in chats:
        made = theirs.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True)
        ids, marks = made["input_ids"][:length], made["assistant_masks"][:length]
        yield tuple(ids), (0, *marks[1:])


def read_back(batches, steps):
    """(tokens, learned) of each conversation that the training samples have."""
    pairs = []
    for step in range(1, steps + 1):
        for batch in batches.training(step):
            inputs, targets = batch.inputs_sb.t().tolist(), batch.targets_sb.t().tolist()
            for tokens, following, begins in zip(inputs, targets, batch.documents.starts, strict=True):
                assert begins[-1] < len(tokens), "a conversation has a token here"
                # Learned is a token that is the target of the one before it.
                learned = [0, *(int(target != NO_TARGET) for target in following)]
                assert all(b in (NO_TARGET, a) for a, b in zip(tokens[1:], following, strict=False))
                ends = [*begins[1:], len(tokens)]
                pairs += [(tuple(tokens[a:b]), tuple(learned[a:b])) for a, b in zip(begins, ends, strict=True)]
    return [(tokens, learned) for tokens, learned in pairs if any(tokens)]  # what is behind the last one is no token


def test_an_epoch_has_each_conversation_once_whole_and_with_its_answers(tmp_path, folder, monkeypatch):
    monkeypatch.setattr(shards, "SHARD_BYTES", 1000)
    paths = [chat_file(tmp_path / "a.jsonl", CHATS[:35]), chat_file(tmp_path / "b.jsonl", CHATS[35:])]
    batches = batches_of(job(paths, folder, train={"global_batch_size": 1}), tmp_path)
    (part,) = batches.order.parts
    conversations = read_back(batches, part.windows)
    assert sorted(conversations) == sorted(conversations_in(folder, CHATS))
    assert sorted(read_back(batches, 2 * part.windows)) == sorted(conversations * 2), "and so does the next one"
    lengths = [len(tokens) for tokens, _ in conversations]
    assert sum(lengths) > 0.8 * part.windows * LENGTH, "with little room lost"


def test_first_token_of_each_packed_conversation_is_not_learned(tmp_path, folder):
    """Also where all of them is learned, and attention looks across them."""
    data = {"loss": "all", "documents": "together"}
    (row,) = open_corpus(job([chat_file(tmp_path / "a.jsonl", CHATS)], folder, data=data), tmp_path / "cache").parts
    marks = row.marks(0, len(row))
    assert not marks.learned[list(marks.begins)].any()
    assert marks.learned.sum() == sum(len(tokens) - 1 for tokens, _ in conversations_in(folder, CHATS))


def test_cut_conversation_of_which_only_the_first_token_is_learned_is_left_out(tmp_path):
    """Nothing predicts it."""
    tokens, marks = (
        IndexedTokens(megatron_dataset(tmp_path / name, [[each] for each in rows]))
        for name, rows in {"tokens": [[1, 2, 3, 4, 5], [6, 7]], "marks": [[1, 0, 0, 0, 1], [1, 1]]}.items()
    )
    row = PackedConversations(tokens, marks, 4, 0.0, "chats")
    assert (row.cut, len(row), row.read(0, 4).tolist()) == (1, 4 + 1, [6, 7, 0, 0])


def test_conversation_longer_than_a_sample_is_cut_or_left_out_if_no_answer_remains(tmp_path, folder):
    chats = [said("short", "one"), said("why " * 9, "because " * 90), said("too long " * 90, "never seen"), said("?")]
    watcher = RecordingWatcher()
    job_ = job([chat_file(tmp_path / "a.jsonl", chats)], folder, train={"global_batch_size": 1})
    batches = batches_of(job_, tmp_path, watcher=watcher)
    assert sorted(read_back(batches, batches.order.parts[0].windows)) == sorted(conversations_in(folder, chats[:2]))
    kind, message, data = watcher.said[-1]
    assert kind == "data_prepared"
    assert message.endswith("; left out without an answer: 1; truncated to the sequence length: 2")
    assert (data["documents"], data["left_out"], data["cut"]) == (3, 1, 2)
    assert (data["epoch_tokens"], data["is_validation"]) == (2 * LENGTH, False)


def test_preview_of_a_corpus_has_its_text_as_the_model_reads_it_with_answers_marked(tmp_path, folder):
    chats = [said("Tschüss?", " é yes"), said("more")] * 2
    path, other = (chat_file(tmp_path / name, chats) for name in ("a.jsonl", "b.jsonl"))
    train, watcher = {"validate_every": 1, "global_batch_size": 1, "micro_batch_size": 1}, RecordingWatcher()
    data = {"validation": [{"name": "other", "paths": [str(other)]}]}
    batches_of(job([path], folder, data=data, train=train), tmp_path, watcher=watcher)
    both = [data for kind, _, data in watcher.said if kind == "data_prepared"]
    assert [data["is_validation"] for data in both] == [False, True]
    for data in both:
        assert [text for text, learned in data["preview"] if learned] == ["<think>\n\n</think>\n\n é yes<|im_end|>"] * 2
        assert "".join(text for text, _ in data["preview"]).count("user\nTschüss?<|im_end|>\n<|im_start|>") == 2


def test_packed_conversations_attend_to_each_other_only_if_documents_is_together(tmp_path, folder):
    path = chat_file(tmp_path / "a.jsonl", CHATS)
    together, apart = (
        batches_of(job([path], folder, data={"documents": each}), tmp_path).training(1)
        for each in ("together", "apart")
    )
    assert [each.documents for each in together] == [None] * len(together)
    for one, other in zip(together, apart, strict=True):
        assert torch.equal(one.targets_sb, other.targets_sb)
    assert job([path], folder).data.documents == "apart", "not by default"


@pytest.fixture(scope="module")
def halves(tmp_path_factory):
    """A folder with the conversations in two files, and their tokens."""
    made = tmp_path_factory.mktemp("halves")
    chat_file(made / "a.jsonl", CHATS[:40])
    chat_file(made / "b.jsonl", CHATS[40:])
    return made


@pytest.mark.parametrize("layout", [(1, 1, 1), (1, 2, 2)], ids=str)
def test_last_conversations_of_each_path_are_held_out_and_not_trained_on(halves, folder, layout):
    data = {"validation_fraction": 0.25, "weights": [2, 1]}
    train = {"validate_every": 1, "global_batch_size": 2, "validation_batches": 100}
    job_ = job(sorted(halves.glob("*.jsonl")), folder, data=data, train=train, parallel=axes(layout))
    batches = batches_of(job_, halves)
    (held_out,) = batches.held_out
    seen = {
        tuple(row[:40])
        for number in range(held_out.batches(job_))
        for batch in batches.validation(held_out, number)
        for row in batch.inputs_sb.t().tolist()
    }
    first_words = [tokens for tokens, _ in conversations_in(folder, [*CHATS[30:40], *CHATS[55:]])]
    assert seen
    assert all(any(row[: len(words)] == words[:40][: len(row)] for words in first_words) for row in seen)
    trained = [tokens for tokens, _ in read_back(batches, 60)]
    assert not set(first_words) & set(trained)


def test_job_on_conversations_may_validate_on_texts_and_the_other_way_round(tmp_path, folder):
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": "the quick brown fox " * 40}) + "\n")
    chat_file(tmp_path / "chat.jsonl", CHATS)
    text = {"name": "text", "source": "jsonl", "paths": [str(tmp_path / "text.jsonl")]}
    chats = {"name": "chats", "source": "chat", "paths": [str(tmp_path / "chat.jsonl")]}
    train = {"validate_every": 1, "global_batch_size": 1}
    batches = batches_of(job([tmp_path / "chat.jsonl"], folder, data={"validation": [text]}, train=train), tmp_path)
    (batch,) = batches.validation(batches.held_out[0], 0)
    assert (batch.targets_sb != NO_TARGET).all()
    own = {"source": "jsonl", "paths": text["paths"], "validation": [chats]}
    batches = batches_of(job([tmp_path / "a"], folder, data=own, train=train), tmp_path)
    (batch,) = batches.validation(batches.held_out[0], 0)
    assert 0 < (batch.targets_sb != NO_TARGET).sum() < LENGTH
    assert batch.documents is None, "the job has documents together"


def test_conversations_without_anything_to_learn_or_hold_out_are_refused(tmp_path, folder):
    path = chat_file(tmp_path / "a.jsonl", [said("nobody answers")])
    with pytest.raises(DataError, match=rf"no conversation for training in {path}: none has an answer"):
        batches_of(job([path], folder), tmp_path)
    path = chat_file(tmp_path / "b.jsonl", CHATS[:3])
    job_ = job([path], folder, data={"validation_fraction": 0.1}, train={"validate_every": 1})
    with pytest.raises(DataError, match=rf"no conversation of {path} is held out: raise data\.validation_fraction"):
        batches_of(job_, tmp_path)


def test_each_template_and_loss_rule_has_its_own_cached_tokens(tmp_path, folder):
    path = chat_file(tmp_path / "a.jsonl")
    digests = {
        open_corpus(job([path], folder, data=data), tmp_path / "cache").digest
        for data in ({}, {"template": "chatml"}, {"loss": "all"}, {"loss": "answers"})
    }
    assert len(digests) == 3
    assert len(list((tmp_path / "cache").glob("*/marks.bin"))) == 3


def test_job_records_its_chat_template_and_refuses_a_changed_one(tmp_path):
    folder, record = tokenizer_folder(tmp_path / "t", "qwen"), tmp_path / "job" / "corpus.json"
    job_ = job([chat_file(tmp_path / "a.jsonl")], folder)
    open_corpus(job_, tmp_path / "cache", record, True)
    kept = json.loads((tmp_path / "job" / "chat.json").read_bytes())
    assert kept["template"] == (folder / "chat_template.jinja").read_text()
    assert kept["tokens"]["eos_token"] == "<|im_end|>"
    open_corpus(job_, tmp_path / "cache", record, True)
    (folder / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    with pytest.raises(DataError, match="the chat template is not what it was when the job began"):
        open_corpus(job_, tmp_path / "cache", record, True)


def test_conversations_cannot_be_written_as_a_megatron_dataset(tmp_path, folder):
    with pytest.raises(DataError, match="does not say which tokens of a conversation are learned"):
        tokenize(
            job([chat_file(tmp_path / "a.jsonl")], folder), tmp_path / "cache", RecordingWatcher(), tmp_path / "to"
        )


def test_chat_template_that_exhausts_memory_is_reported_with_corpus_file_and_line(tmp_path, folder):
    (tmp_path / "t.jinja").write_text(
        "{{ messages[0].content * (10 ** 10 if messages[0].content == 'unanswered' else 1) }}"
    )
    job_ = job([chat_file(tmp_path / "a.jsonl")], folder, data={"template": str(tmp_path / "t.jinja"), "loss": "all"})
    with pytest.raises(DataError, match=r"a\.jsonl, line 5 \(byte \d+\): the chat template .* takes too much memory"):
        open_corpus(job_, tmp_path / "cache")


@given(st.lists(st.integers(1, 20), max_size=300))
def test_packing_places_each_conversation_once_and_overfills_no_sample(sizes):
    lengths = np.array(sizes, np.int64)
    samples = packed(range(len(sizes)), lengths, 20)
    assert sorted(number for sample in samples for number in sample) == list(range(len(sizes)))
    assert all(0 < sum(sizes[number] for number in sample) <= 20 for sample in samples)
    if len(samples) <= OPEN_SAMPLES:
        assert len(samples) <= 2 * -(-sum(sizes) // 20), "two that are half empty would have been one"


def test_index_of_packed_conversations_takes_few_bytes_for_each(tmp_path):
    count = 5_000
    of_tokens, of_marks = (
        IndexedTokens(megatron_dataset(tmp_path / name, [[[1, 1]]] * count)) for name in ("tokens", "marks")
    )
    tracemalloc.start()
    row = PackedConversations(of_tokens, of_marks, 8, 0.1, "a corpus")
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(row) == count * 2 + 1
    assert taken < 32 * count


def test_packed_conversations_read_the_same_from_any_start(tmp_path, folder):
    corpus = open_corpus(job([chat_file(tmp_path / "a.jsonl", CONVERSATIONS * 3)], folder), tmp_path / "cache")
    (row,) = corpus.parts
    assert isinstance(row, PackedConversations)
    whole, marks = row.read(0, len(row)), row.marks(0, len(row))
    for start, length in ((0, LENGTH + 1), (LENGTH - 3, 7), (LENGTH, LENGTH + 1), (len(row) - 1, 1), (5, 3 * LENGTH)):
        assert row.read(start, length).tolist() == whole[start : start + length].tolist()
        part = row.marks(start, length)
        assert part.learned.tolist() == marks.learned[start : start + length].tolist()
        inside = [begin - start for begin in marks.begins if start <= begin < start + length]
        assert list(part.begins) == sorted({0, *inside})
    with pytest.raises(IndexError, match="of a row of"):
        row.read(len(row), 1)


def test_packing_closes_the_fullest_open_sample_first(monkeypatch):
    monkeypatch.setattr(packed_conversations, "OPEN_SAMPLES", 2)
    assert packed(range(4), np.array([9, 8, 7, 2]), 10) == [[0], [1, 3], [2]]


def test_held_out_fraction_counts_only_conversations_that_are_used(tmp_path):
    """Two of four have no answer in a sample."""
    rows = {"tokens": [[1] * 5, [2] * 5, [3, 3], [4, 4]], "marks": [[0] * 5, [0] * 5, [0, 1], [0, 1]]}
    of_tokens, of_marks = (
        IndexedTokens(megatron_dataset(tmp_path / name, [[each] for each in each_row]))
        for name, each_row in rows.items()
    )
    row = PackedConversations(of_tokens, of_marks, 4, 0.5, "chats")
    assert row.split(spec()) == (4, 4 + 1)
