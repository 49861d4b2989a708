"""Shards hold every byte of a corpus once, in order, cut where no token can lie."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_files import TEXT, byte_level, split_as_llama_3

from manta.workers.config import DataConfig
from manta.workers.data import shards
from manta.workers.data.shards import pieces_of, shards_of
from manta.workers.data.sources import CorpusFile, corpus_files
from manta.workers.data.tokenizer import FileTokenizer

WIKITEXT = Path(__file__).resolve().parents[3].parent / "shared" / "data" / "wikitext2-valid.txt"


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(shards, "SHARD_BYTES", 500)
    monkeypatch.setattr(shards, "_WINDOW", 64)


def content_of(all_shards):
    parts = []
    for shard in all_shards:
        for section in shard:
            parts.append(Path(section.path).read_bytes()[section.start : section.stop])
    return parts


def test_each_byte_is_in_one_section_and_cuts_follow_a_lines_end(small, tmp_path):
    texts = ["".join(TEXT), "one line\n", "x" * 3000, "\n" * 3000]
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_text(text)
    data = DataConfig(source="text", paths=[str(tmp_path)])
    made = shards_of(corpus_files(data), data, True)
    assert b"".join(content_of(made)) == "".join(texts).encode()
    assert len(made) > 10
    ends = [section.ends for shard in made for section in shard]
    assert ends.count(True) == 4, "each file is one document"
    for shard in made:
        for section in shard:
            assert section.ends or Path(section.path).read_bytes()[: section.stop].endswith(b"\n")


def test_shards_cut_no_line_of_jsonl_and_no_file_that_must_stay_whole(small, tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(f'{{"text": "line {n}"}}\n' for n in range(200)))
    data = DataConfig(source="jsonl", paths=[str(tmp_path)])
    parts = content_of(shards_of(corpus_files(data), data, False))
    assert len(parts) > 5
    assert all(part.startswith(b"{") and part.endswith(b"}\n") for part in parts)
    (tmp_path / "a.txt").write_text("".join(TEXT))
    text = DataConfig(source="text", paths=[str(tmp_path / "a.txt")])
    assert len(content_of(shards_of(corpus_files(text), text, False))) == 1


def test_many_small_files_share_a_shard(tmp_path):
    files = [CorpusFile(f"{n}.txt", 750_000) for n in range(10)]
    made = shards_of(files, DataConfig(source="text", paths=["a"]), False)
    assert [len(shard) for shard in made] == [3, 3, 3, 1]


def test_huge_corpus_has_at_most_the_allowed_number_of_shards(tmp_path):
    files = [CorpusFile(f"{n}.txt", 2**30) for n in range(9000)]
    made = shards_of(files, DataConfig(source="text", paths=["a"]), False)
    assert 3000 <= len(made) <= shards.MAX_SHARDS


def test_split_point_of_a_file_is_found_at_any_position_of_the_search_window(small, tmp_path):
    """The only one of its file; what decides about it may be on either side."""
    data = DataConfig(source="text", paths=[str(tmp_path)])
    for position in range(500, 700):
        (tmp_path / "a.txt").write_bytes(b"x" * position + b"\n" + b"y" * (3000 - position))
        made = shards_of(corpus_files(data), data, True)
        assert [section.stop for shard in made for section in shard] == [position + 1, 3001]


def test_short_rest_of_a_file_joins_the_shard_before_it(small, tmp_path):
    (tmp_path / "a.txt").write_text("a line\n" * 100)
    data = DataConfig(source="text", paths=[str(tmp_path)])
    assert [section.stop for shard in shards_of(corpus_files(data), data, True) for section in shard] == [700]


def test_row_groups_are_shared_out_and_the_last_section_may_have_fewer(small, monkeypatch):
    monkeypatch.setattr("manta.workers.data.rows.row_group_count", lambda path: 5)
    made = shards_of([CorpusFile("a.parquet", 1250)], DataConfig(source="parquet", paths=["a"]), False)
    sections = [(each.start, each.stop, each.bytes) for shard in made for each in shard]
    assert sections == [(0, 2, 500), (2, 4, 500), (4, 5, 250)]


@settings(max_examples=200, deadline=None)
@given(st.text("ab \n\r\t;é日#"), st.integers(1, 10))
def test_pieces_make_up_the_text_and_are_whole_characters(text, size):
    pieces = list(pieces_of(text.encode(), size))
    assert "".join(piece.decode() for piece in pieces) == text


@pytest.fixture(scope="module", params=[byte_level, split_as_llama_3])
def tokenizer(request, tmp_path_factory):
    return FileTokenizer(request.param(tmp_path_factory.mktemp("t") / "t.json"))


@settings(max_examples=500, deadline=None)
@given(st.text(st.sampled_from("ab1 \n\n\n\r\t;'é日#—\u3000\xa0\u2028\x85\u0301"), max_size=30))
def test_byte_level_tokenizer_gives_pieces_the_tokens_of_the_whole_text(tokenizer, text):
    pieces = [piece.decode() for piece in pieces_of(text.encode(), 1)]
    whole, *parts = tokenizer.encode([text, *pieces])
    assert [token for part in parts for token in part] == whole


@pytest.mark.skipif(not WIKITEXT.exists(), reason="the text of WikiText-2 is not on this machine")
def test_real_text_has_the_same_tokens_whole_and_in_pieces(tokenizer):
    text = WIKITEXT.read_text()[:300_000]
    pieces = [piece.decode() for piece in pieces_of(text.encode(), 1000)]
    whole, *parts = tokenizer.encode([text, *pieces])
    assert len(parts) > 100
    assert [token for part in parts for token in part] == whole
