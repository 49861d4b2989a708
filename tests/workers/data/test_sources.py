"""Which files make a corpus, and one clear sentence with the path when none can."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from engine_specs import spec

from manta.workers.config import DataConfig
from manta.workers.data.sources import check_data, corpus_files, split_tokens
from manta.workers.errors import DataError


def test_validation_sets_are_checked_with_the_corpus(tmp_path):
    (tmp_path / "corpus.txt").write_text("words " * 100)
    (tmp_path / "short.txt").write_text("words")
    sets = [{"name": "short", "paths": [str(tmp_path / "short.txt")]}]
    data = {"paths": [str(tmp_path / "corpus.txt")], "validation": sets}
    with pytest.raises(DataError, match="validation set short has 5 tokens"):
        check_data(spec(data=data, train={"validate_every": 1}))


def text(*paths: Path) -> DataConfig:
    """A corpus of these paths."""
    return DataConfig(source="text", paths=tuple(str(path) for path in paths))


@pytest.fixture
def folder(tmp_path) -> Path:
    """A folder with text and other things."""
    for name in ("b.txt", "a.md", "sub/c.py", "sub/UPPER.TXT", "sub/__pycache__/d.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"text of {name}")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    (tmp_path / "empty.txt").touch()
    (tmp_path / ".txt").write_text("hidden")
    (tmp_path / "._a.md").write_bytes(b"\x00\x05\x16\x07 as a Mac leaves it")
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden" / "d.txt").write_text("hidden")
    (tmp_path / "link.txt").symlink_to(tmp_path / "nowhere")
    return tmp_path


def test_a_directory_stands_for_its_text_files_sorted(folder):
    names = [str(Path(file.path).relative_to(folder)) for file in corpus_files(text(folder))]
    assert names == ["a.md", "b.txt", "sub/UPPER.TXT", "sub/c.py"]


def test_link_to_a_folder_is_refused_unless_the_corpus_has_that_folder_anyway(tmp_path):
    for name in ("corpus/v2/a.txt", "elsewhere/b.txt"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("text")
    (tmp_path / "corpus" / "latest").symlink_to("v2")
    (tmp_path / "corpus" / "v2" / "back").symlink_to(tmp_path / "corpus")
    (tmp_path / "linked").symlink_to(tmp_path / "corpus")
    assert len(corpus_files(text(tmp_path / "linked"))) == 1
    (tmp_path / "corpus" / "more").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DataError, match=r"linked/more is a link to a folder elsewhere, .*: name it in data\.paths"):
        corpus_files(text(tmp_path / "linked"))
    (tmp_path / "corpus" / "more").rename(tmp_path / "corpus" / ".more")
    assert len(corpus_files(text(tmp_path / "linked", tmp_path / "corpus" / ".more"))) == 2


def test_order_of_corpus_files_does_not_depend_on_the_file_system(tmp_path, monkeypatch):
    names = ["a/2.txt", "a/b/1.txt", "c/1.txt", "d/1.txt"]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("text")
    walk = os.walk

    def backwards(*arguments, **options):
        for folder, folders, files in walk(*arguments, **options):
            folders.sort(reverse=True)
            yield folder, folders, sorted(files, reverse=True)

    monkeypatch.setattr(os, "walk", backwards)
    assert [str(Path(file.path).relative_to(tmp_path)) for file in corpus_files(text(tmp_path))] == names


def test_corpus_files_named_in_the_spec_keep_their_order_and_may_have_any_suffix(folder):
    files = corpus_files(text(folder / "picture.png", folder / "a.md"))
    assert [(Path(file.path).name, file.size) for file in files] == [("picture.png", 4), ("a.md", 12)]


def test_the_standard_library_is_found_without_its_tests_and_packages():
    files = [Path(file.path) for file in corpus_files(DataConfig(source="python-stdlib"))]
    assert {"os.py", "ast.py"} <= {path.name for path in files}
    assert all(path.suffix == ".py" for path in files)
    assert not any({"site-packages", "test", "__pycache__"} & set(path.parts) for path in files)


def names_of(source: str, folder: Path) -> list[str]:
    files = corpus_files(DataConfig(source=source, paths=(str(folder),)))
    return [str(Path(file.path).relative_to(folder)) for file in files]


@pytest.mark.parametrize("source", ["jsonl", "chat"])
def test_json_counts_in_a_folder_without_files_of_lines(tmp_path, source):
    described = ("a.json.gz", "b.json", "c/d.JSON.zst", "c/.e.json")
    for name in described:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("[]")
    assert names_of(source, tmp_path) == ["a.json.gz", "b.json", "c/d.JSON.zst"]
    (tmp_path / "c/f.ndjson").write_text("{}")
    assert names_of(source, tmp_path) == ["c/f.ndjson"]


@pytest.mark.parametrize(
    ("source", "name", "compression"),
    [
        ("jsonl", "a.jsonl.bz2", "bzip2"), ("jsonl", "a.ndjson.XZ", "xz"), ("chat", "a.json.lz4", "lz4"),
        ("chat", "a.parquet.zip", "zip"), ("parquet", "a.parquet.gz", "gzip"), ("text", "a.txt.gz", "gzip"),
        ("text", "a.md.zst", "zstd"),
    ],
)  # fmt: skip
def test_file_compressed_in_a_way_that_is_not_read_is_refused_by_name(tmp_path, source, name, compression):
    path = tmp_path / name
    path.write_bytes(b"BZh9")
    with pytest.raises(DataError, match=rf"{path} is compressed \({compression}\) in a way that is not read here: "):
        corpus_files(DataConfig(source=source, paths=(str(path),)))


def test_compressed_file_is_left_out_of_a_folder_only_if_it_is_there_decompressed(tmp_path):
    for name in ("a.jsonl", "a.jsonl.xz", "notes.txt.xz"):
        (tmp_path / name).write_text("{}")
    assert names_of("jsonl", tmp_path) == ["a.jsonl"]
    (tmp_path / "b.jsonl.xz").write_text("{}")
    with pytest.raises(DataError, match=rf"{tmp_path / 'b.jsonl.xz'} is compressed \(xz\)"):
        names_of("jsonl", tmp_path)


POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 123456789\n"


@pytest.mark.parametrize(
    ("source", "name"),
    [("text", "a.txt"), ("jsonl", "a.jsonl"), ("chat", "a.parquet"), ("parquet", "a.parquet"), ("megatron", "a.bin")],
)
def test_pointer_of_git_lfs_is_refused_by_name_in_every_source(tmp_path, source, name):
    (tmp_path / name).write_text(POINTER)
    (tmp_path / "a.idx").write_bytes(b"MMIDIDX")
    for path in (tmp_path / name, tmp_path):
        with pytest.raises(DataError, match=rf"{tmp_path / name} \(a pointer of Git LFS, whose content is not here: "):
            corpus_files(DataConfig(source=source, paths=(str(path),)))


def test_megatron_prefix_counts_beside_a_folder_of_its_name_unless_both_have_datasets(tmp_path):
    (tmp_path / "wiki").mkdir()
    with pytest.raises(DataError, match=r"no indexed dataset below .*wiki \(looked for \.idx\)"):
        names_of("megatron", tmp_path / "wiki")
    for kind in ("bin", "idx"):
        (tmp_path / f"wiki.{kind}").write_text("tokens")
    corpus = DataConfig(source="megatron", paths=(str(tmp_path / "wiki"),))
    assert [Path(file.path).name for file in corpus_files(corpus)] == ["wiki.bin", "wiki.idx"]
    (tmp_path / "wiki" / "a.idx").write_text("index")
    with pytest.raises(DataError, match=r"wiki is a folder of indexed datasets, and .*wiki\.idx is beside it: name"):
        corpus_files(corpus)


@pytest.mark.parametrize(
    ("name", "why"),
    [("*.jsonl", "patterns are not expanded"), ("~/a.txt", "~ is not expanded"), ("$HOME/a", "variables are not")],
)
def test_path_that_a_shell_would_expand_is_said_to_be_taken_literally(tmp_path, name, why):
    with pytest.raises(DataError, match=re.escape(f"no such file or directory: {tmp_path / name} ({why}")):
        corpus_files(text(tmp_path / name))


@pytest.mark.parametrize("name", ["data-00000-of-00001.arrow", "train/dataset_info.json"])
def test_folder_of_arrow_files_is_refused_with_what_to_write(tmp_path, name):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("{}")
    (tmp_path / "state.json").write_text("{}")
    with pytest.raises(DataError, match=f"{tmp_path} holds Arrow files, which are not read: .* to_parquet or"):
        corpus_files(DataConfig(source="jsonl", paths=(str(tmp_path),)))


@pytest.mark.parametrize("missing", ["gone.txt", "gone/below.txt"])
def test_missing_corpus_path_is_named(tmp_path, missing):
    with pytest.raises(DataError, match=f"no such file or directory: {tmp_path / missing}"):
        corpus_files(text(tmp_path / missing))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_unreadable_corpus_file_or_folder_is_named(folder):
    (folder / "a.md").chmod(0)
    for path in (folder / "a.md", folder):
        with pytest.raises(DataError, match=f"cannot be read: {folder / 'a.md'}"):
            corpus_files(text(path))
    (folder / "sub").chmod(0)
    (folder / "a.md").chmod(0o600)
    with pytest.raises(DataError, match=f"cannot be read: {folder / 'sub'}"):
        corpus_files(text(folder))
    (folder / "sub").chmod(0o700)


def test_unlistable_corpus_subfolder_is_refused_by_name_and_not_left_out(folder, monkeypatch):
    look = os.scandir

    def scandir(path):
        if Path(path).name == "sub":
            raise PermissionError(13, "Permission denied", str(path))
        return look(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(DataError, match=f"cannot be read: {folder / 'sub'} .Permission denied"):
        corpus_files(text(folder))


def test_corpus_path_with_too_long_a_name_is_a_data_error(folder):
    with pytest.raises(DataError, match=r"cannot be read: .*xxx \(File name too long\)"):
        corpus_files(text(folder / ("x" * 300)))


def test_corpus_of_one_empty_file_is_refused(folder):
    with pytest.raises(DataError, match=f"the corpus is empty: no text in {folder / 'empty.txt'}"):
        corpus_files(text(folder / "empty.txt"))


def test_corpus_directory_without_text_files_is_refused_by_name(tmp_path):
    with pytest.raises(DataError, match=f"no text file below {tmp_path}"):
        corpus_files(text(tmp_path))


def test_pipe_as_a_corpus_path_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match=f"not a regular file: {tmp_path / 'pipe'}"):
        corpus_files(text(tmp_path / "pipe"))


def test_validation_fraction_holds_out_the_last_tokens_of_the_corpus():
    job = spec(data={"validation_fraction": 0.1})
    assert split_tokens(job, job.data, 1000) == (900, 100)


def test_corpus_too_short_for_a_sequence_is_refused_with_the_length_it_needs(tmp_path):
    short = tmp_path / "short.txt"
    short.write_text("12345678")
    job = spec(data={"paths": [str(short)], "validation_fraction": 0.0})
    with pytest.raises(DataError, match=f"has 8 tokens for training, .* needs 9: use more text than {short}"):
        check_data(job)
    short.write_text("123456789")
    check_data(job)
    short.write_text("1234567890")  # of which two are held out
    with pytest.raises(DataError, match="has 8 tokens for training"):
        check_data(spec(data={"paths": [str(short)], "validation_fraction": 0.2}))


def test_too_short_held_out_part_is_refused_only_if_the_job_validates(tmp_path):
    file = tmp_path / "some.txt"
    file.write_text("x" * 100)
    data = {"paths": [str(file)], "validation_fraction": 0.05}
    check_data(spec(data=data))
    with pytest.raises(DataError, match=r"held-out part of the corpus has 5 tokens.* needs 9: raise data.validation"):
        check_data(spec(data=data, train={"validate_every": 1}))
