"""Folders of weights: read, written and streamed, with the files beside them."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import numpy
import pytest
import torch
from engine_specs import document, spec
from safetensors.numpy import load_file as load_arrays
from safetensors.torch import load_file, save_file
from storage_away import away
from their_models import saved
from tokenizers import Tokenizer, models
from torch import nn

from manta.workers.checkpoint.catalog import Manifest
from manta.workers.checkpoint.contents import Contents, StoredRectangle, StoredTensor
from manta.workers.config import DataConfig, JobSpec
from manta.workers.data.roots import DataRoots
from manta.workers.data.tokenizer import MAX_BYTES
from manta.workers.errors import CheckpointError, DataError, WeightsError, WeightsUnreadable
from manta.workers.parallel.tensor.shards import NamedShard, ParameterShard
from manta.workers.spec.problems import SpecError
from manta.workers.spec.reading import parse_job_spec
from manta.workers.spec.submitted import with_shape_of_weights
from manta.workers.storage.locations import parse_location
from manta.workers.weights import folder
from manta.workers.weights.companions import add_tokenizer, byte_tokenizer, companion_files
from manta.workers.weights.config import read_config
from manta.workers.weights.export import new_folder
from manta.workers.weights.folder import (
    INDEX,
    ONE_FILE,
    NewFiles,
    check_weights,
    plan_files,
    tensors_of,
    weight_files,
)
from manta.workers.weights.mapping import HuggingFaceTensor, huggingface_tensors
from manta.workers.weights.reading import Weights
from manta.workers.weights.stream_out import MAX_THREADS, Source, threads_for, write_tensors


@pytest.fixture(scope="module")
def sharded(tmp_path_factory) -> Path:
    return saved("llama", tmp_path_factory.mktemp("sharded"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    return saved("gpt2", tmp_path_factory.mktemp("whole"), shard="1GB")


@pytest.fixture
def copied(tmp_path) -> Callable[[Path], Path]:
    return lambda folder: Path(shutil.copytree(folder, tmp_path / "copy"))


def spec_of(folder: Path):
    document = {
        "model": {"from": str(folder), "sequence_length": 8},
        "data": {"source": "python-stdlib"},
        "train": {"steps": 1},
    }
    return parse_job_spec(with_shape_of_weights(document))


def sentence_about(folder: Path) -> str:
    with pytest.raises(WeightsError) as caught:
        check_weights(spec_of(folder))
    return str(caught.value)


def rewritten(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    tensors = load_file(folder / ONE_FILE)
    change(tensors)
    save_file(tensors, folder / ONE_FILE)
    return folder


def test_complete_weights_folder_is_accepted(sharded, whole):
    assert (sharded / INDEX).exists() and not (sharded / ONE_FILE).exists() and (whole / ONE_FILE).exists()
    assert len({tensor.file for tensor in tensors_of(spec_of(sharded)).values()}) > 1
    check_weights(spec_of(whole))


def test_index_of_an_earlier_save_beside_a_whole_file_is_ignored_as_transformers_does(whole, copied):
    folder = copied(whole)
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": "model-00001-of-00004.safetensors"}}))
    assert tensors_of(spec_of(folder)).keys() == tensors_of(spec_of(whole)).keys()


def test_adapter_in_a_weights_folder_is_refused_by_name(whole, copied):
    folder = copied(whole)
    (folder / "adapter_model.safetensors").write_bytes(b"")
    assert f"{folder / 'adapter_model.safetensors'} is an adapter: merge it" in sentence_about(folder)


@pytest.mark.parametrize("name", [ONE_FILE, INDEX, "config.json"])
def test_pointer_of_git_lfs_is_named_in_place_of_weights(whole, copied, name):
    folder = copied(whole)
    spec = spec_of(folder)
    (folder / ONE_FILE).unlink()
    (folder / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n")
    with pytest.raises(WeightsError, match=rf"{folder / name} cannot be read: a pointer of Git LFS"):
        read_config(folder) if name == "config.json" else check_weights(spec)


def test_weights_saved_without_an_output_layer_are_accepted(whole, copied):
    folder = copied(whole)

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        tensors["h.0.attn.bias"] = torch.ones(1, 1, 16, 16)  # the mask, as older releases saved it

    check_weights(spec_of(rewritten(folder, rename)))


@pytest.mark.parametrize("row", [None, 0, 20, -1])
def test_output_layer_that_is_not_the_embeddings_it_is_tied_to_is_refused(whole, copied, row):
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["transformer.wte.weight"].clone()
        if row is not None:
            tensors["lm_head.weight"][row] += 1

    folder = rewritten(copied(whole), change)
    if row is None:
        check_weights(spec_of(folder))
    else:
        assert "lm_head.weight is not transformer.wte.weight, but config.json says" in sentence_about(folder)


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "language_model."])
def test_prefix_of_names_in_a_weights_file_is_shown(whole, copied, prefix):
    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[prefix + name] = tensors.pop(name)

    assert f"; {prefix}transformer.wte.weight is there" in sentence_about(rewritten(copied(whole), change))


@pytest.mark.parametrize("keep", [0, 4, 8, 100, 3000, -1])
def test_truncated_weights_file_is_named(whole, copied, keep):
    file = copied(whole) / ONE_FILE
    content = file.read_bytes()
    file.write_bytes(content[:keep])
    sentence = sentence_about(file.parent)
    assert str(file) in sentence and "is truncated" in sentence
    if keep == -1:
        assert "extends past its end (1 bytes are missing)" in sentence


def test_truncated_weights_shard_is_named_with_its_tensor(sharded, copied):
    file = sorted(copied(sharded).glob("*.safetensors"))[1]
    file.write_bytes(file.read_bytes()[:-1000])
    assert f"{file} is truncated: model." in sentence_about(file.parent)


def test_missing_weights_file_is_named(sharded, copied):
    file = sorted(copied(sharded).glob("*.safetensors"))[1]
    file.unlink()
    assert f"{file} cannot be read: No such file" in sentence_about(file.parent)


def test_weights_whose_mount_is_away_are_unreadable_and_refuse_no_job_in_the_queue(sharded, monkeypatch):
    job = spec_of(sharded)
    monkeypatch.setattr("manta.workers.data.roots.check_data", lambda spec: None)
    with away(sharded):
        for read in (lambda: check_weights(job), lambda: weight_files(sharded), lambda: read_config(sharded)):
            with pytest.raises(WeightsUnreadable, match=rf"^{sharded}.* cannot be read on .* \(Input/output error\)"):
                read()
        assert DataRoots().problem_of_data(job) is None


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda t: t.pop("transformer.h.2.ln_1.bias"), "has no tensor transformer.h.2.ln_1.bias"),
        (lambda t: t.update(score=torch.ones(1)), "the model in config.json has no tensor score"),
        (
            lambda t: t.update({"transformer.ln_f.weight": torch.ones(31)}),
            "transformer.ln_f.weight has shape [31], but config.json requires [32]",
        ),
        (
            lambda t: t.update({"transformer.wte.weight": torch.ones(1000, 32)}),
            "transformer.wte.weight has shape [1000, 32], but config.json requires ",
        ),
        (
            lambda t: t.update({"transformer.wpe.weight": torch.ones(7, 32)}),
            "transformer.wpe.weight has shape [7, 32], but config.json requires [8, 32]",
        ),
        (
            lambda t: t.update({"transformer.ln_f.weight": torch.ones(32, dtype=torch.int8)}),
            "transformer.ln_f.weight has dtype I8: supported: F64, F32, F16, BF16",
        ),
    ],
)
def test_unsuitable_weights_tensor_is_named(whole, copied, change, sentence):
    assert sentence in sentence_about(rewritten(copied(whole), change))


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("{", "is not an index of safetensors files"),
        ('{"weight_map": []}', "is not an index of safetensors files"),
        ('{"weight_map": {"a": "../model.safetensors"}}', "names a file outside of its folder"),
        ('{"weight_map": {"a": "/etc/passwd"}}', "names a file outside of its folder"),
        ('{"weight_map": {"a": ".."}}', "names a file outside of its folder"),
        ('{"weight_map": {"a": ""}}', "names a file outside of its folder"),
    ],
)
def test_invalid_weights_index_is_named(whole, copied, content, sentence):
    folder = copied(whole)
    (folder / ONE_FILE).unlink()
    (folder / INDEX).write_text(content)
    assert f"{folder / INDEX} {sentence}" in sentence_about(folder)


def test_weights_index_that_misplaces_a_tensor_is_named(sharded, copied):
    folder = copied(sharded)
    index = json.loads((folder / INDEX).read_text())
    names = sorted(set(index["weight_map"].values()))
    tensor = next(name for name, file in index["weight_map"].items() if file == names[0])
    index["weight_map"][tensor] = names[1]
    (folder / INDEX).write_text(json.dumps(index))
    assert f"{folder / names[1]} does not contain {tensor}, although {folder / INDEX} lists it" in sentence_about(
        folder
    )


@pytest.mark.parametrize(
    "header",
    [
        b"[]", b"{", b'{"a": 3}', b'{"a": {"dtype": "F32", "shape": [2]}}',
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [-2], "data_offsets": [0, -8]}}',
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}}',
    ],
)  # fmt: skip
def test_invalid_weights_header_is_named(whole, copied, header):
    file = copied(whole) / ONE_FILE
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(64))
    assert sentence_about(file.parent).startswith(str(file))


def test_oversized_weights_header_is_not_read(whole, monkeypatch):
    monkeypatch.setattr("manta.workers.weights.folder._MAX_HEADER_BYTES", 100)
    assert re.fullmatch(
        rf"{whole / ONE_FILE}: its header has \d+ bytes; at most 100 are allowed", sentence_about(whole)
    )


def test_weights_folder_with_a_pipe_for_a_file_is_refused(whole, copied):
    file = copied(whole) / ONE_FILE
    file.unlink()
    os.mkfifo(file)
    assert sentence_about(file.parent) == f"{file} cannot be read: a pipe, not a regular file"
    (file.parent / "config.json").unlink()
    os.mkfifo(file.parent / "config.json")
    with pytest.raises(SpecError, match=r"config\.json cannot be read: a pipe, not a regular file"):
        spec_of(file.parent)


@pytest.mark.parametrize("name", [INDEX, "config.json"])
def test_oversized_json_file_is_not_read(whole, copied, name):
    folder = copied(whole)
    spec = spec_of(folder)
    (folder / ONE_FILE).unlink()
    (folder / name).touch()
    os.truncate(folder / name, 40 * 2**30)
    with pytest.raises(WeightsError, match=rf"{name} cannot be read: it has 42949672960 bytes or more, and at most"):
        read_config(folder) if name == "config.json" else check_weights(spec)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [("consolidated.safetensors", "only consolidated.safetensors"), ("q4.gguf", "only q4.gguf"), (ONE_FILE, "a link")],
)
def test_weights_in_another_form_or_behind_a_dangling_link_are_named(whole, copied, name, sentence):
    folder = copied(whole)
    (folder / ONE_FILE).unlink()
    (folder / name).symlink_to("../blobs/0")
    assert sentence in sentence_about(folder)


def test_pickled_weights_are_never_read(whole, copied):
    folder = copied(whole)
    (folder / ONE_FILE).unlink()
    assert f"{folder} has neither model.safetensors nor" in sentence_about(folder)
    (folder / "pytorch_model.bin").write_bytes(b"")
    assert "pytorch_model.bin is a pickle, which Manta never loads: save the model as safetensors" in sentence_about(
        folder
    )


def test_weights_obey_the_roots_of_data(whole, copied, tmp_path):
    folder = copied(whole)
    spec = spec_of(folder)
    DataRoots((tmp_path,)).check(spec)
    (problem,) = DataRoots((tmp_path / "other",)).problems(spec)
    assert problem.path == "model.from"
    outside = tmp_path / "secret"
    (folder / ONE_FILE).rename(outside)
    (folder / ONE_FILE).symlink_to(outside)
    with pytest.raises(DataError, match="leads elsewhere"):
        DataRoots((folder,)).check(spec)


def test_new_folder_is_private_until_it_is_whole_and_then_has_usual_permissions(tmp_path):
    (tmp_path / "other").mkdir()
    with new_folder(tmp_path / "out") as folder:
        assert folder.stat().st_mode & 0o077 == 0, "until it is whole it is private"
    assert (tmp_path / "out").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_new_folder_leaves_unfinished_folders_of_other_names(tmp_path):
    left = {name: tmp_path / f".{name}.x.unfinished" for name in ("a[1]", "a1", "a*", "ab")}
    for unfinished in left.values():
        unfinished.mkdir()
    for name in ("a[1]", "a*"):
        with new_folder(tmp_path / name):
            pass
    assert {path.name for path in tmp_path.iterdir()} == {"a[1]", "a*", left["a1"].name, left["ab"].name}


@pytest.mark.parametrize(("start", "real"), [(0, 66), (198, 65), (264, 0)])
def test_padded_vocabulary_rows_are_filled_with_zero(start, real):
    """A number that is none would go through gradients of the others, which it is multiplied with zero for."""
    weights = object.__new__(Weights)
    weights._parts = {"embedding.token.weight": []}
    shard = ParameterShard((263, 4), 0, start, group="embedding")
    local = torch.full((66, 4), torch.nan)
    weights.fill(NamedShard("embedding.token.weight", nn.Parameter(local), shard, by_autograd=False), local)
    assert local[:real].isnan().all() and (local[real:] == 0.0).all()


@pytest.mark.parametrize(("rows", "columns"), [(1, 0), (-1, 0), (0, 1)])
def test_export_names_a_parameter_of_another_shape_before_writing(tmp_path, rows, columns):
    theirs = huggingface_tensors(spec(model={"family": "llama", "layers": 1, "hidden_size": 16}))
    shapes: dict[str, tuple[int, int]] = {}
    for tensor in theirs:
        for piece in tensor.pieces:
            height, _ = shapes.get(piece.ours, (0, 0))
            shapes[piece.ours] = height + piece.count * piece.length, (*tensor.rows_first, 1)[1]
    changed = "layers.0.mlp.down.weight"
    shapes[changed] = shapes[changed][0] + rows, shapes[changed][1] + columns
    stored = {f"model.{name}": StoredTensor(shape, "float32", ()) for name, shape in shapes.items()}
    source = Source(parse_location(tmp_path), Manifest("job", 1, 1, {}, {}), Contents(stored))
    with pytest.raises(CheckpointError, match=rf"should be .*, found .* as {changed}"):
        write_tensors(source, theirs, "float32", None, 1, None)  # type: ignore[arg-type]


def test_export_uses_as_many_threads_as_memory_allows():
    def beside_each_other(files: int) -> StoredTensor:
        each = [StoredRectangle((0, n), (8, 1), f"{n}", 0, 1000) for n in range(files)]
        return StoredTensor((8, files), "float32", tuple(each))

    assert [threads_for([beside_each_other(1)], processors) for processors in (1, 2, 64)] == [1, 2, MAX_THREADS]
    assert threads_for([beside_each_other(1), beside_each_other(64)], 64) == 1


TENSORS = [HuggingFaceTensor(name, shape, ()) for name, shape in (("a", (3, 4)), ("b", (5,)), ("c", (2, 2)))]


def test_safetensors_pieces_may_come_in_any_order_and_gaps_are_zero(tmp_path, monkeypatch):
    monkeypatch.setattr(folder, "FLUSH_BYTES", 8)
    written: list[int] = []
    values = numpy.arange(12, dtype=numpy.float32)
    pieces = [("c", 0, values[:4]), *(("a", 4 * n, values[n : n + 3]) for n in (9, 0, 6, 3))]
    planned = plan_files(TENSORS, "float32", 60)
    with NewFiles(tmp_path, planned, "float32", written.append) as files, ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda piece: files.write(*piece), pieces))
    assert sum(written) == 16 + 48
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    first, second = (load_arrays(tmp_path / name) for name in names)
    assert first["a"].tolist() == values.reshape(3, 4).tolist()
    assert second["b"].tolist() == [0.0] * 5
    assert second["c"].tolist() == [[0.0, 1.0], [2.0, 3.0]]


@pytest.mark.parametrize(("most", "held"), [(67, "a bc"), (68, "ab c"), (84, "abc"), (1, "a b c")])
def test_safetensors_file_holds_as_many_bytes_as_allowed(most, held):
    """Of 48, 20 and 16; one that is larger than that has a file of its own."""
    planned = plan_files(TENSORS, "float32", most)
    assert " ".join("".join(tensor.name for tensor in file) for file in planned.values()) == held


def test_safetensors_write_beyond_its_tensor_is_refused(tmp_path):
    planned, problem = plan_files(TENSORS, "float32", 1000), "a has 48 bytes, not 52"
    with NewFiles(tmp_path, planned, "float32") as files, pytest.raises(ValueError, match=problem):
        files.write("a", 40, bytes(12))


def test_failed_flush_fails_the_whole_write(tmp_path, monkeypatch):
    monkeypatch.setattr(folder, "FLUSH_BYTES", 8)
    monkeypatch.setattr(folder.os, "fdatasync", Mock(side_effect=OSError(5, "Input/output error")))
    with pytest.raises(OSError, match="Input/output error"), NewFiles(tmp_path, {"file": TENSORS}, "float32") as files:
        files.write("a", 0, bytes(8))


def added(folder: Path, **data: str) -> dict[str, str]:
    """Names and texts of the files that are added for a checkpoint of a job with such data."""
    (folder / "out").mkdir(parents=True)
    (folder / "checkpoints" / "step").mkdir(parents=True, exist_ok=True)
    add_tokenizer(JobSpec.model_validate(document(data=data)), folder / "checkpoints" / "step", folder / "out")
    return {path.name: path.read_text() for path in (folder / "out").iterdir()}


def test_byte_tokenizer_is_written_beside_exported_weights(tmp_path):
    made = added(tmp_path)
    assert json.loads(made["tokenizer.json"]) == byte_tokenizer()
    assert json.loads(made["tokenizer_config.json"]) == {"tokenizer_class": "PreTrainedTokenizerFast"}


def test_exported_model_generates_until_the_end_of_document_token(tmp_path):
    transformers = pytest.importorskip("transformers")
    made = added(tmp_path, end_of_document="<|endoftext|>")
    spec = JobSpec.model_validate(document(data={"end_of_document": "<|endoftext|>"}, model={"family": "llama"}))
    beside = companion_files(spec, "float32", tmp_path / "checkpoints" / "step")
    assert json.loads(beside["config.json"])["eos_token_id"] == 256
    assert json.loads(beside["generation_config.json"])["eos_token_id"] == 256
    assert json.loads(made["tokenizer_config.json"])["eos_token"] == "<|endoftext|>"
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.eos_token_id == 256 and len(tokenizer) == spec.vocabulary_size
    assert tokenizer.encode("a<|endoftext|>") == [97, 256]


def test_exported_model_has_no_end_token_if_none_is_known(tmp_path):
    for data in ({}, {"end_of_document": "none"}, {"source": "chat", "template": "chatml"}):
        spec = JobSpec.model_validate(document(data=data, model={"family": "llama"}))
        beside = companion_files(spec, "float32", tmp_path / "checkpoints" / "step")
        assert json.loads(beside["config.json"])["eos_token_id"] is None


@pytest.mark.parametrize(
    ("known", "template", "ends"),
    [
        (None, "{{ messages[1].content }}<|im_end|>\n", 1),
        (0, "{{ messages[1].content }}<|im_end|>", [0, 1]),
        ([1, 0], "{{ messages[1].content }}<|im_end|>", [1, 0]),
        (0, "{{ messages[1].content }}", 0),
        (0, "{{ messages[1].content }}<|im_end|><|im_end|>", 0),
    ],
)
def test_exported_generation_ends_also_where_the_template_ends_an_answer(
    tmp_path, whole, copied, known, template, ends
):
    weights = copied(whole)
    (weights / "generation_config.json").write_text(json.dumps({"eos_token_id": known, "temperature": 0.6}))
    tokens = {"<|endoftext|>": 0, "<|im_end|>": 1, "a": 2}
    tokenizer = Tokenizer(models.WordLevel(tokens, unk_token="a"))
    tokenizer.add_special_tokens(list(tokens)[:2])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat.json").write_text(json.dumps({"template": template, "tokens": {}, "name": "t"}))
    spec = spec_of(weights).model_copy(update={"data": DataConfig(source="chat", paths=("a",), tokenizer="gone")})
    beside = companion_files(spec, "float32", tmp_path / "step")
    assert json.loads(beside["generation_config.json"]) == {"eos_token_id": ends, "temperature": 0.6}


@pytest.mark.parametrize("folder", ["checkpoints", "."])
@pytest.mark.parametrize("tokenizer", ["bpe", "a file that is gone"])
def test_exported_tokenizer_is_the_one_kept_beside_the_checkpoint(tmp_path, folder, tokenizer):
    (tmp_path / "checkpoints" / "step").mkdir(parents=True)
    (tmp_path / folder / "tokenizer.json").write_text("kept")
    (tmp_path / "out").mkdir()
    spec = JobSpec.model_validate(document(data={"tokenizer": tokenizer}))
    add_tokenizer(spec, tmp_path / "checkpoints" / "step", tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "kept"


def test_export_copies_the_files_beside_a_named_tokenizer(tmp_path):
    source = tmp_path / "llama"
    source.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "model.safetensors"):
        (source / name).write_text(name)
    made = added(tmp_path, tokenizer=str(source))
    assert made == {name: name for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")}


def test_exported_tokenizer_file_that_is_too_large_is_refused(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "vocab.json").touch()
    os.truncate(tmp_path / "vocab.json", MAX_BYTES + 1)
    with pytest.raises(
        WeightsError, match=r"vocab\.json cannot be read: it has \d+ bytes or more, and at most 67108864"
    ):
        added(tmp_path, tokenizer=str(tmp_path))
    assert not (tmp_path / "out" / "vocab.json").exists()


def test_export_prefers_the_kept_chat_template_to_the_tokenizers(tmp_path):
    source = tmp_path / "llama"
    source.mkdir()
    for name in ("tokenizer.json", "chat_template.jinja"):
        (source / name).write_text(name)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "chat.json").write_text('{"template": "kept", "tokens": {}, "name": "a"}')
    assert added(tmp_path, tokenizer=str(source))["chat_template.jinja"] == "kept"


def test_exported_weights_without_a_known_tokenizer_have_none(tmp_path):
    assert added(tmp_path, source="megatron") == {}
    assert added(tmp_path / "other", tokenizer=str(tmp_path / "nowhere")) == {}


@pytest.fixture(scope="module")
def of_experts(tmp_path_factory) -> Path:
    return saved("deepseek", tmp_path_factory.mktemp("experts"), shard="1GB")


def all_together(tensors: dict[str, torch.Tensor], transposed: bool = False, gate_first: bool = True) -> None:
    """Experts of a layer in one tensor, as transformers 5 has them in memory."""
    ours = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
    found = [(match, tensors.pop(match[0])) for match in map(ours.fullmatch, [*tensors]) if match]
    matrices = {(match[1], int(match[2]), match[3]): tensor for match, tensor in found}
    names = ("gate", "up") if gate_first else ("up", "gate")
    for prefix in sorted({key[0] for key in matrices}):
        numbers = range(len({key[1] for key in matrices if key[0] == prefix}))
        inputs = [torch.cat([matrices[prefix, number, name] for name in names]) for number in numbers]
        outputs = [matrices[prefix, number, "down"] for number in numbers]
        for name, each in (("gate_up_proj", inputs), ("down_proj", outputs)):
            whole = torch.stack(each)
            tensors[f"{prefix}.{name}"] = whole.transpose(1, 2).contiguous() if transposed else whole


@pytest.mark.parametrize("transposed", [False, True])
def test_experts_in_one_tensor_are_read_like_those_with_tensors_of_their_own(of_experts, copied, transposed):
    expected, job = load_file(of_experts / ONE_FILE), spec_of(of_experts)
    folder = rewritten(copied(of_experts), lambda tensors: all_together(tensors, transposed))
    weights = Weights(spec_of(folder))
    for tensor in huggingface_tensors(job):
        if ".experts." in tensor.name:
            (piece,) = tensor.pieces
            local = torch.empty(tensor.shape)
            weights.fill(NamedShard(piece.ours, nn.Parameter(local), ParameterShard(tensor.shape), False), local)
            assert torch.equal(local, expected[tensor.name]), tensor.name


def test_experts_that_are_missing_or_have_other_shapes_are_refused(of_experts, copied):
    def cut(tensors: dict[str, torch.Tensor]) -> None:
        all_together(tensors)
        name = next(name for name in tensors if name.endswith("gate_up_proj"))
        tensors[name] = tensors[name][:, :-1].contiguous()

    folder = rewritten(copied(of_experts), cut)
    needs = "have shapes [8, 23, 32] and [8, 32, 12], but config.json requires [8, 24, 32] and [8, 32, 12], or both"
    assert needs in sentence_about(folder)
    shutil.copy(of_experts / ONE_FILE, folder)
    name = "model.layers.2.mlp.experts.7.up_proj.weight"
    assert f"has no tensor {name}" in sentence_about(rewritten(folder, lambda tensors: tensors.pop(name)))


def test_layers_for_predicting_several_tokens_are_left_out_with_a_notice(of_experts, copied):
    behind = {f"layers.4.{name}": torch.zeros(2) for name in ("eh_proj.weight", "enorm.weight", "mlp.gate.weight")}
    more = {f"model.{name}": tensor for name, tensor in behind.items()}
    folder = rewritten(copied(of_experts), lambda tensors: tensors.update(more))
    assert Weights(spec_of(folder)).notice == f"{folder}: model.layers.4, for predicting several tokens, is left out"
    rewritten(folder, lambda tensors: tensors.pop("model.layers.4.eh_proj.weight"))
    assert "the model in config.json has no tensor model.layers.4.enorm.weight" in sentence_about(folder)


def test_balance_of_experts_may_be_given_beside_weights_but_not_other_numbers_of_them(of_experts):
    def model(**moe: object) -> JobSpec:
        document = {"model": {"from": str(of_experts), "sequence_length": 8, "moe": moe}}
        return parse_job_spec(
            with_shape_of_weights({**document, "data": {"source": "python-stdlib"}, "train": {"steps": 1}})
        )

    job = model(balance={"bias_rate": 0.001}, per_token=3)
    assert (job.model.moe.experts, job.model.moe.balance.bias_rate) == (8, 0.001)
    with pytest.raises(SpecError, match=r"model\.moe\.per_token: 2 differs from .*, which says 3 \(try: 3\)"):
        model(per_token=2)


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("moe", {"expert": 8}, "^model.moe.expert: unknown key; did you mean model.moe.experts"),
        ("moe", [8], "^model.moe: must be a mapping, not a list"),
        (
            "latent_attention",
            {"kv_rank": 8},
            "^model.latent_attention.kv_rank: 8 differs from .*, which says 16 [^;]*$",
        ),
        ("latent_attention", {"kv_lora_rank": 16}, "^model.latent_attention.kv_lora_rank: unknown key; did you mean"),
    ],
)
def test_wrong_key_of_an_object_beside_weights_is_the_only_one_that_is_named(of_experts, key, value, sentence):
    model = {"from": str(of_experts), "sequence_length": 8, key: value}
    with pytest.raises(SpecError, match=sentence):
        parse_job_spec(
            with_shape_of_weights({"model": model, "data": {"source": "python-stdlib"}, "train": {"steps": 1}})
        )
