"""Tokenizers, corpora that are tokenized, and what the documentation says of both."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from chat_files import chat_file, said
from documented import ROOT, blocks_of, run_blocks
from engine_specs import document
from tokenizer_files import TEXT, RecordingWatcher, byte_level, plain_tokens, sentence_piece_like, split_as_llama_3
from tokenizers import AddedToken, Tokenizer, models

from manta.workers.config import DataConfig
from manta.workers.data import tokenize
from manta.workers.data import trained_tokenizer as module
from manta.workers.data.conversations import conversation_in
from manta.workers.data.corpus_record import with_digests
from manta.workers.data.indexed_dataset import IndexedTokens, read_index
from manta.workers.data.prepare import open_corpus
from manta.workers.data.shards import pieces_of
from manta.workers.data.sources import CorpusFile, corpus_files
from manta.workers.data.token_cache import Watcher
from manta.workers.data.tokenizer import ByteTokenizer, FileTokenizer, open_tokenizer
from manta.workers.errors import DataError, DataNotStored
from manta.workers.spec.reading import load_job_spec, parse_job_spec
from manta.workers.spec.submitted import with_vocabulary


def test_file_tokenizer_makes_the_same_tokens_as_the_library(file):
    ids = [token for each in FileTokenizer(file).encode(TEXT) for token in each]
    assert ids == plain_tokens(file, TEXT, None)


def test_neither_truncation_nor_padding_nor_added_tokens_change_a_text(file, tmp_path):
    other = Tokenizer.from_file(str(file))
    other.enable_truncation(4)
    other.enable_padding(length=600)
    other.save(str(tmp_path / "short.json"))
    assert FileTokenizer(tmp_path / "short.json").encode(TEXT[:3]) == FileTokenizer(file).encode(TEXT[:3])


def by_words(path: Path, vocabulary: dict[str, int], *added: AddedToken) -> Path:
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="a"))
    tokenizer.add_tokens(list(added))
    tokenizer.save(str(path))
    return path


def test_vocabulary_counts_unused_ids_below_the_highest(tmp_path):
    path = by_words(tmp_path / "t.json", {"a": 0, "b": 7})
    assert FileTokenizer(path, "none").vocabulary == 8


def test_ordinary_word_named_like_an_end_token_ends_no_documents_unless_chosen(tmp_path):
    path = by_words(tmp_path / "t.json", {"a": 0}, AddedToken("</s>", special=False))
    with pytest.raises(DataError, match="no special token that is known to end a document: set"):
        FileTokenizer(path)
    assert FileTokenizer(path, "</s>").end_of_document == 1


@pytest.mark.parametrize("end", ["<|endoftext|>", "</s>", "<eos>", "[SEP]"])
def test_the_end_of_a_document_is_found_among_the_special_tokens(tmp_path, end):
    path = byte_level(tmp_path / "tokenizer.json", special=["<pad>", end])
    assert FileTokenizer(path).end_of_document == 1
    assert FileTokenizer(path, "<pad>").end_of_document == 0
    assert FileTokenizer(path, "none").end_of_document is None


def test_tokenizer_without_a_known_or_the_named_end_token_is_refused(tmp_path):
    path = byte_level(tmp_path / "tokenizer.json", special=["<pad>"])
    with pytest.raises(DataError, match=r"no special token that is known to end a document .its special tokens: <pad>"):
        FileTokenizer(path)
    with pytest.raises(DataError, match=r"has no token '<end>': set data.end_of_document"):
        FileTokenizer(path, "<end>")


def test_tokenizer_vocabulary_reaches_to_the_highest_token_id(file, tmp_path):
    assert FileTokenizer(file).vocabulary == 400
    other = Tokenizer.from_file(str(file))
    other.add_special_tokens([AddedToken("<more>", special=True)])
    document = json.loads(other.to_str())
    document["added_tokens"][-1]["id"] = 999  # ids with a gap between them
    (tmp_path / "gap.json").write_text(json.dumps(document))
    assert FileTokenizer(tmp_path / "gap.json").vocabulary in (401, 1000)
    ids = FileTokenizer(tmp_path / "gap.json").encode(["<more>"])[0]
    assert FileTokenizer(tmp_path / "gap.json").vocabulary == ids[0] + 1


def test_texts_are_cut_only_for_tokenizers_that_make_the_same_of_the_pieces(file, tmp_path):
    assert FileTokenizer(file).cuts_are_exact
    assert FileTokenizer(split_as_llama_3(tmp_path / "3.json")).cuts_are_exact
    assert not FileTokenizer(sentence_piece_like(tmp_path / "t.json")).cuts_are_exact


@pytest.mark.parametrize(
    ("added", "exact"),
    [
        (AddedToken("text\nnext", normalized=False), False),
        (AddedToken("\n </x>", normalized=False), False),
        (AddedToken("<x>", lstrip=True, normalized=False), False),
        (AddedToken("\n\n", normalized=False), True),
        (AddedToken("<x>", rstrip=True, normalized=False), True),
        (AddedToken("<x>", special=True), True),
    ],
    ids=str,
)
def test_text_with_an_added_token_has_the_librarys_tokens_however_it_is_cut(file, tmp_path, added, exact):
    other = Tokenizer.from_file(str(file))
    other.add_tokens([added])
    other.save(str(tmp_path / "t.json"))
    tokenizer = FileTokenizer(tmp_path / "t.json")
    assert tokenizer.cuts_are_exact == exact and tokenizer.has_tokens_across_cuts != exact
    text = "".join(f"some {added.content}{n}\n{added.content}\nb{added.content} words\n" for n in range(99))
    pieces = [each.decode() for each in pieces_of(text.encode(), 1)]
    joined = [token for each in tokenizer.encode(pieces) for token in each]
    assert (joined == other.encode(text, add_special_tokens=False).ids) == exact


def test_tokenizer_that_adds_no_special_tokens_is_refused_where_they_are_asked_for(file):
    with pytest.raises(DataError, match=rf"{file} adds no special tokens to a text: leave data.special_tokens out"):
        open_tokenizer(DataConfig(source="text", paths=["a"], tokenizer=str(file), special_tokens=True))


def test_pointer_of_git_lfs_in_place_of_a_tokenizer_is_named(tmp_path):
    (tmp_path / "t.json").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(DataError, match=r"t\.json \(a pointer of Git LFS, whose content is not here: git lfs pull"):
        FileTokenizer(tmp_path / "t.json")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is not a tokenizer.json that the library tokenizers"),
        (b"{}", "is not a tokenizer.json that the library tokenizers"),
        (b"\xff\xfe", "is not a tokenizer.json that the library tokenizers"),
        (b'{"model": {"type": "BPE", "vocab": 3, "merges": []}}', "is not a tokenizer.json"),
    ],
)
def test_file_that_is_not_a_tokenizer_is_refused_by_name(tmp_path, content, said):
    (tmp_path / "bad.json").write_bytes(content)
    with pytest.raises(DataError, match=rf"{tmp_path / 'bad.json'} {said}"):
        FileTokenizer(tmp_path / "bad.json")


@pytest.mark.parametrize("name", ["tokenizer.model", "vocab.json"])
def test_tokenizer_in_another_form_is_named_with_what_converts_it(tmp_path, name):
    (tmp_path / name).write_bytes(b"\n\x0b<unk>")
    with pytest.raises(DataError, match=rf"{tmp_path} has {name}, which is not read, .*AutoTokenizer.*save_pretrained"):
        open_tokenizer(DataConfig(source="text", paths=["a"], tokenizer=str(tmp_path)))
    with pytest.raises(DataError, match=rf"{name} is not a tokenizer.json .*AutoTokenizer.*save_pretrained"):
        FileTokenizer(tmp_path / name)


def test_tokenizer_with_dropout_is_refused_since_its_tokens_are_random(tmp_path, file):
    content = json.loads(Path(file).read_text())
    content["model"]["dropout"] = 0.1
    (tmp_path / "d.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match=r"d\.json: model\.dropout is 0\.1, .*: set it to null"):
        FileTokenizer(tmp_path / "d.json")


def test_tokenizer_that_was_never_trained_is_refused(tmp_path):
    from tokenizers import models

    Tokenizer(models.BPE()).save(str(tmp_path / "t.json"))
    with pytest.raises(DataError, match=r"has no tokens: it is a tokenizer that was never trained"):
        FileTokenizer(tmp_path / "t.json")


def test_missing_tokenizer_file_is_named(tmp_path):
    with pytest.raises(DataError, match=rf"no tokenizer can be read from {tmp_path / 'gone.json'} .No such file"):
        FileTokenizer(tmp_path / "gone.json")


def test_different_tokenizer_files_have_different_digests(file, tmp_path):
    other = byte_level(tmp_path / "other.json", 300)
    assert FileTokenizer(file).digest != FileTokenizer(other).digest


def test_tokenizer_folder_opens_the_same_tokenizer_as_its_file(file):
    data = DataConfig(source="text", paths=["a"], tokenizer=str(file.parent))
    assert open_tokenizer(data).digest == FileTokenizer(file).digest


def test_byte_tokenizer_may_have_an_end_of_document_token():
    plain, ended = (
        open_tokenizer(DataConfig(source="jsonl", paths=["a"], end_of_document=end)) for end in (None, "<|endoftext|>")
    )
    assert (plain.vocabulary, plain.end_of_document) == (256, None)
    assert (ended.vocabulary, ended.end_of_document) == (257, 256)
    assert [list(each) for each in ByteTokenizer().encode(["é"])] == [[0xC3, 0xA9]]


@pytest.fixture
def corpus(tmp_path) -> Path:
    path = tmp_path / "a.txt"
    path.write_text("".join(TEXT))
    return path


def trained(root, path, size=500, watcher=None, source="text", **data):
    config = DataConfig(source=source, paths=[str(path)], tokenizer="bpe", tokenizer_vocabulary=size, **data)
    file = module.trained_tokenizer(root, with_digests(corpus_files(config)), config, watcher or RecordingWatcher())
    return file, open_tokenizer(config, file)


def test_tokenizer_is_trained_once_and_decodes_every_text_back(tmp_path, corpus):
    watcher = RecordingWatcher()
    file, tokenizer = trained(tmp_path / "cache", corpus, watcher=watcher)
    assert watcher.kinds == ["tokenizer_training", "tokenizer_trained"]
    assert watcher.lives > 0
    assert (tokenizer.vocabulary, tokenizer.end_of_document) == (500, 0)
    plain = Tokenizer.from_file(str(file))
    strange = "".join(TEXT) + "\x00\u2603 \U0001f600 never seen\r\n\t"
    assert plain.decode(tokenizer.encode([strange])[0]) == strange
    assert len(tokenizer.encode(["".join(TEXT)])[0]) < len("".join(TEXT)) / 2
    again = RecordingWatcher()
    assert trained(tmp_path / "cache", corpus, watcher=again)[0] == file
    assert again.said == []


def test_tokenizer_is_trained_on_conversations_as_the_template_writes_them(tmp_path):
    chats = chat_file(tmp_path / "chats.jsonl", [said(f"what is {n}?", "a number") for n in range(50)])
    _, tokenizer = trained(tmp_path / "cache", chats, 300, source="chat", template="chatml")
    (ids,) = tokenizer.encode(["<|im_start|>assistant\na number<|im_end|>"])
    assert len(ids) < 20, "41 bytes"


def test_trained_tokenizer_does_not_depend_on_cores_or_hash_seed(tmp_path, corpus, monkeypatch):
    first, _ = trained(tmp_path / "one", corpus)
    monkeypatch.setenv("RAYON_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    second, _ = trained(tmp_path / "two", corpus)
    assert first.read_bytes() == second.read_bytes()


def test_tokenizer_of_a_tiny_corpus_has_fewer_tokens_than_asked_for(tmp_path):
    (tmp_path / "a.txt").write_text("ab")
    _, tokenizer = trained(tmp_path / "cache", tmp_path / "a.txt", 5000)
    assert 257 <= tokenizer.vocabulary <= 258


def test_trained_tokenizer_has_the_size_and_end_token_of_the_job(tmp_path, corpus):
    first, _ = trained(tmp_path / "cache", corpus, 300)
    second, tokenizer = trained(tmp_path / "cache", corpus, 301, end_of_document="<end>")
    assert first != second
    assert json.loads(second.read_text())["added_tokens"][0]["content"] == "<end>"
    assert tokenizer.end_of_document == 0
    assert trained(tmp_path / "cache", corpus, 300, end_of_document="none")[1].end_of_document is None


def test_tokenizer_is_trained_on_a_share_of_each_shard_of_a_large_corpus(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "TRAINING_BYTES", 2000)
    for name in "abcd":
        (tmp_path / f"{name}.txt").write_text("".join(f"{name} line {n}\n" for n in range(1000)))
    monkeypatch.setattr("manta.workers.data.shards.SHARD_BYTES", 100)
    monkeypatch.setattr("manta.workers.data.documents.CHUNK_BYTES", 100)
    config = DataConfig(source="text", paths=[str(tmp_path)], tokenizer="bpe")
    files = [CorpusFile(str(path), path.stat().st_size) for path in sorted(tmp_path.glob("*.txt"))]
    texts = "".join(module._training_texts([[section] for section in sections_of(files)], config))
    assert {line[0] for line in texts.splitlines()} == set("abcd")
    assert 2000 <= len(texts) <= 4000


def sections_of(files):
    from manta.workers.data.shards import Section

    return [Section(file.path, 0, file.size, file.size) for file in files]


def test_training_a_tokenizer_on_a_bad_corpus_names_file_and_byte(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"good \xff")
    with pytest.raises(DataError, match=r"a.txt, byte 5: not UTF-8"):
        trained(tmp_path / "cache", tmp_path / "a.txt")


def test_tokenizer_training_process_that_fails_is_reported_with_its_cause(tmp_path, corpus, monkeypatch):
    order = {
        "data": DataConfig(source="text", paths=[str(corpus)], tokenizer="bpe").model_dump(mode="json"),
        "files": [str(corpus)], "sizes": [corpus.stat().st_size], "path": str(tmp_path / "none" / "tokenizer.json"),
    }  # fmt: skip
    with pytest.raises(DataNotStored, match=r"the tokenizer cannot be kept: .*/none/.* \(No such file or directory\)"):
        module._run(order, RecordingWatcher())
    monkeypatch.setattr(module.sys, "executable", "/bin/false")
    with pytest.raises(DataError, match="the process that trains the tokenizer ended with exit code 1"):
        module._run(order | {"files": ["a long name"] * 100_000}, RecordingWatcher())


@pytest.fixture
def config(tmp_path) -> Path:
    """A job with its corpus and its tokenizer beside it."""
    byte_level(tmp_path / "tokenizer.json")
    for name, texts in (("a.jsonl", TEXT[:50]), ("b.jsonl", TEXT[50:80])):
        (tmp_path / name).write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return job_file(tmp_path)


def job_file(folder, **data) -> Path:
    path = folder / "job.yaml"
    data = {"source": "jsonl", "paths": ["a.jsonl", "b.jsonl"], "tokenizer": "tokenizer.json", **data}
    path.write_text(yaml.safe_dump(document(data=data)))
    return path


def run(config, tmp_path, *options):
    return tokenize.main([str(config), "--cache", str(tmp_path / "cache"), "--processes", "1", *options])


def test_job_finds_the_tokens_that_the_command_made(config, tmp_path, capsys):
    assert run(config, tmp_path) == 0
    lines = capsys.readouterr().out.splitlines()
    count = len(plain_tokens(tmp_path / "tokenizer.json", TEXT[:80]))
    assert lines[0].startswith("tokenizing 2 files (")
    assert lines[-1].startswith(f"{count} tokens are in {tmp_path / 'cache'} (")

    class NothingToDo(Watcher):
        def report(self, kind, message, data):
            pytest.fail(message)

    corpus = open_corpus(with_vocabulary(load_job_spec(config)), tmp_path / "cache", watcher=NothingToDo())
    assert len(corpus) == count


@pytest.mark.parametrize("weights", [None, [1, 3]])
def test_a_copy_for_megatron_has_all_documents(config, tmp_path, weights):
    config = job_file(tmp_path, weights=weights)
    assert run(config, tmp_path, "--to", str(tmp_path / "out" / "corpus")) == 0
    row, index = IndexedTokens(tmp_path / "out" / "corpus"), read_index(tmp_path / "out" / "corpus")
    assert row.read(0, len(row)).tolist() == plain_tokens(tmp_path / "tokenizer.json", TEXT[:80])
    assert index.documents.tolist() == list(range(81))
    assert index.lengths.tolist() == [len(plain_tokens(tmp_path / "tokenizer.json", [text])) for text in TEXT[:80]]
    megatron = job_file(tmp_path, source="megatron", paths=["out/corpus"])
    again = open_corpus(with_vocabulary(load_job_spec(megatron)), tmp_path / "cache")
    assert again.read(0, len(again)).tolist() == row.read(0, len(row)).tolist()


def test_existing_megatron_dataset_is_not_overwritten(config, tmp_path, capsys):
    (tmp_path / "out.idx").write_text("precious")
    assert run(config, tmp_path, "--to", str(tmp_path / "out")) == 1
    assert "out.bin and " in capsys.readouterr().err
    assert (tmp_path / "out.idx").read_text() == "precious"


@pytest.mark.parametrize(
    ("data", "status", "said"),
    [
        ({"tokenizer": "bytes", "source": "text"}, 1, "with data.tokenizer bytes this corpus is read as it is"),
        ({"tokenizer": "gone.json"}, 2, "data.tokenizer: no tokenizer can be read from "),
        ({"paths": ["gone.jsonl"]}, 1, "DataError: no such file or directory: "),
        ({"text_key": "body"}, 1, "line 1 (byte 0): no key 'body', only 'text': set data.text_key"),
    ],
)
def test_tokenize_command_reports_a_bad_job_in_one_sentence(config, tmp_path, capsys, data, status, said):
    assert run(job_file(tmp_path, **data), tmp_path) == status
    err = capsys.readouterr().err
    assert said in err
    assert len(err.splitlines()) == 1


def test_progress_on_a_terminal_overwrites_one_line():
    class Terminal:
        text = ""

        def isatty(self):
            return True

        def write(self, text):
            self.text += text

        def flush(self):
            pass

    out = Terminal()
    watcher = tokenize.ProgressLines(out)
    watcher.report("data_preparing", "begins", {})
    watcher.report("data_progress", "10%", {})
    watcher.report("data_progress", "20%", {})
    watcher.report("data_prepared", "done", {})
    assert out.text == "begins\n10%\r\x1b[K20%\r\x1b[Kdone\n"


CHAT = blocks_of("fine_tuning.md", "Try it without a GPU")
JOBS = [*blocks_of("fine_tuning.md"), *blocks_of("getting_started.md")]
MEGATRON = blocks_of("data.md", "To and from Megatron-LM")


@pytest.mark.parametrize("path", sorted(ROOT.glob("examples/*.yaml")), ids=lambda path: path.stem)
def test_example_jobs_are_valid_specs(path):
    assert load_job_spec(path).name == path.stem


@pytest.mark.parametrize("block", [text for kind, text in [*JOBS, *MEGATRON] if kind == "yaml"])
def test_jobs_in_the_pages_are_valid_specs(block):
    job = yaml.safe_load(block)
    # Of weights the shape is in their folder.
    shape = {"layers": 4, "hidden_size": 64, "heads": 4, "vocabulary_size": 320, **job.pop("model")}
    shape.pop("from", None)
    if job.get("parallel") == "auto":
        job["parallel"] = {}
    assert parse_job_spec({**document(), **job, "model": shape}).name == job["name"]


def test_conversation_shown_in_the_page_is_valid():
    ((_, row),) = [block for block in blocks_of("data.md", "Conversations") if block[0] == "json"]
    assert [each["role"] for each in conversation_in(json.loads(row), "messages", "the page").messages] == [
        "user", "assistant",
    ]  # fmt: skip


@pytest.mark.soak
def test_a_model_is_fine_tuned_on_conversations_as_the_page_says(tmp_path):
    transformers = pytest.importorskip("transformers")
    _, trained, used = run_blocks(CHAT, tmp_path)
    losses = [float(each) for each in re.findall(r"\| loss (\S+)", trained)]
    assert losses[-1] < 0.5 * losses[0]
    assert re.search(r"^conversations +20$", used, re.M)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "exported")
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": "a"}], tokenize=False, add_generation_prompt=True
    )
    assert asked == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.soak
def test_tokens_are_converted_for_megatron_and_read_back_as_the_page_says(tmp_path):
    assert "step 20/20" in run_blocks(MEGATRON, tmp_path)[-1]
