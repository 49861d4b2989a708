"""The size of a tokenizer's vocabulary is read once and then stands in the spec."""

from __future__ import annotations

import errno

import pytest
from engine_specs import spec
from storage_away import away
from tokenizer_files import byte_level

from manta.workers.spec.problems import SpecError
from manta.workers.spec.reading import parse_job_spec
from manta.workers.spec.submitted import with_vocabulary


def job(file, model=None, **data):
    return spec(data={"tokenizer": str(file), **data}, model=model or {})


def test_vocabulary_size_is_read_from_the_tokenizers_file_and_kept_in_the_spec(tmp_path):
    file = byte_level(tmp_path / "t.json")
    plain = job(file)
    with pytest.raises(ValueError, match=r"not known before the tokenizer's file is read"):
        plain.vocabulary_size  # noqa: B018
    resolved = with_vocabulary(plain)
    assert resolved.vocabulary_size == resolved.data.tokenizer_vocabulary == 400
    file.unlink()
    again = parse_job_spec(resolved.model_dump(mode="json"))
    assert again.vocabulary_size == 400
    assert with_vocabulary(again) == again, "where it runs the file is looked at again"


def test_vocabulary_size_of_bytes_and_bpe_needs_no_file():
    assert with_vocabulary(spec()).vocabulary_size == 256
    assert spec(data={"tokenizer": "bpe"}).vocabulary_size == 8192
    assert spec(data={"tokenizer": "bpe", "tokenizer_vocabulary": 600}).vocabulary_size == 600
    assert spec(data={"end_of_document": "<|endoftext|>"}).vocabulary_size == 257


def test_vocabulary_of_a_model_may_be_larger_than_the_tokenizers_but_not_smaller(tmp_path):
    file = byte_level(tmp_path / "t.json")
    assert with_vocabulary(job(file, {"vocabulary_size": 512})).vocabulary_size == 512
    with pytest.raises(SpecError, match=r"vocabulary_size .300. is smaller than the tokenizer's .400."):
        with_vocabulary(job(file, {"vocabulary_size": 300}))


def test_vocabulary_size_other_than_the_tokenizer_files_is_refused(tmp_path):
    file = byte_level(tmp_path / "t.json")
    with pytest.raises(SpecError, match=r"tokenizer_vocabulary is 500, but .* has 400 token ids"):
        with_vocabulary(job(file, tokenizer_vocabulary=500))


def test_a_file_that_cannot_be_read_is_a_problem_of_the_spec(tmp_path):
    with pytest.raises(
        SpecError, match=r"data.tokenizer: no tokenizer can be read from .*: name bytes, bpe, a tokenizer.json or"
    ):
        with_vocabulary(job(tmp_path / "gone.json"))
    (tmp_path / "none.json").write_text("{}")
    with pytest.raises(SpecError, match=r"none.json is not a tokenizer.json"):
        with_vocabulary(job(tmp_path / "none.json", tokenizer_vocabulary=400))
    byte_level(tmp_path / "t.json", special=["<pad>"])
    with pytest.raises(SpecError, match=r"no special token that is known to end a document"):
        with_vocabulary(job(tmp_path / "t.json"))


def test_tokenizer_file_on_a_broken_mount_is_refused_as_unreadable_for_now(tmp_path):
    file = byte_level(tmp_path / "t.json")
    with away(tmp_path), pytest.raises(SpecError) as caught:
        with_vocabulary(job(file))
    (problem,) = caught.value.problems
    assert problem.rule.startswith(f"{file} cannot be read on ") and problem.rule.endswith(
        "; submit the job again then"
    )
    known = job(file, tokenizer_vocabulary=400)
    with away(tmp_path):
        assert with_vocabulary(known) == known, "it is read where the job runs"


@pytest.mark.parametrize("number", [errno.EACCES, errno.ENOENT, errno.ENOTDIR])
def test_tokenizer_file_missing_here_is_accepted_if_the_vocabulary_size_is_known(tmp_path, number):
    file = byte_level(tmp_path / "t.json")
    known = job(file, tokenizer_vocabulary=400)
    with away(tmp_path, number):
        assert with_vocabulary(known) == known
        with pytest.raises(SpecError, match=r"data.tokenizer: no tokenizer can be read from"):
            with_vocabulary(job(file))


@pytest.mark.parametrize("name", ["x" * 300 + ".json", "x" * 300])
def test_a_name_that_no_file_can_have_is_a_problem_of_the_spec(tmp_path, name):
    with pytest.raises(SpecError, match=r"data.tokenizer: no tokenizer can be read from .*File name too long"):
        with_vocabulary(job(tmp_path / name, tokenizer_vocabulary=400))
