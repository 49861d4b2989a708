"""Checkpoints as weights for others: of our own models, whole or not there, in the dtype and sizes asked for."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import torch
from checkpoint_programs import job, lone, save
from rank_programs import micro_batches
from safetensors import safe_open
from safetensors.torch import load_file

from manta.workers.checkpoint.catalog import complete_checkpoints
from manta.workers.checkpoint.pruning import remove
from manta.workers.errors import CheckpointError, WeightsError
from manta.workers.protocol.messages import Resume
from manta.workers.weights import export as module
from manta.workers.weights import stream_out
from manta.workers.weights.export import export, main, new_folder

MODELS = {
    "gpt without biases": {"bias": False, "kv_heads": None},
    "gpt": {"kv_heads": None, "tie_embeddings": False},
    "llama, windows": {"family": "llama", "sliding_window": 3},
    "qwen, windows in some layers": {"family": "qwen", "sliding_window": 3, "full_attention_every": 2},
}


def checkpoint_of(folder: Path, corpus: str, steps: int = 1, **model) -> tuple[str, float, torch.Tensor]:
    """A checkpoint of one rank, with its loss on some windows."""
    trainer = lone(job(corpus, {}, model=model), folder)
    trainer.restore(Resume())
    for _ in range(steps):
        trainer.train_step()
    save(trainer)
    windows = torch.randint(256, (12, 9), generator=torch.Generator().manual_seed(5))
    losses_m, tokens = trainer.engine.pipeline.evaluate(micro_batches(trainer.spec, 0, windows))
    trainer.close()
    return str(complete_checkpoints(folder)[-1][0]), (losses_m.sum() / tokens).item(), windows


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, corpus) -> str:
    return checkpoint_of(tmp_path_factory.mktemp("checkpoint"), corpus, family="llama")[0]


@pytest.mark.parametrize("name", MODELS)
def test_exported_models_have_our_loss_in_transformers(name, corpus, tmp_path):
    transformers = pytest.importorskip("transformers")
    path, loss, windows = checkpoint_of(tmp_path / "checkpoints", corpus, **MODELS[name])
    done = export(path, tmp_path / "out")
    assert (done.dtype, done.files) == ("float32", 1)
    theirs, loading = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not loading["missing_keys"] and not loading["unexpected_keys"]
    logits = theirs(windows[:, :-1]).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten()).item()
    assert loss == pytest.approx(expected, rel=1e-5)


def test_exported_byte_tokenizer_encodes_and_decodes_in_transformers(checkpoint, tmp_path):
    transformers = pytest.importorskip("transformers")
    export(checkpoint, tmp_path / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    for text in ("def f(x):\n\treturn  x # ok", "naïve 日本 \x00\x7f\xad", ""):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == list(text.encode())
        assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text


def test_exported_files_have_the_requested_dtype_and_size(checkpoint, tmp_path):
    whole, shards = tmp_path / "whole", tmp_path / "shards"
    export(checkpoint, whole, dtype="fp32")
    progress: list[tuple[int, int]] = []
    done = export(checkpoint, shards, dtype="bf16", shard_bytes=10_000, progress=lambda *bytes: progress.append(bytes))
    files = sorted(shards.glob("model-*.safetensors"))
    assert done.files == len(files) > 3
    assert progress[-1] == (done.bytes, done.bytes)
    before, index = (
        load_file(whole / "model.safetensors"),
        json.loads((shards / "model.safetensors.index.json").read_text()),
    )
    for file in files:
        after = load_file(file)
        assert sum(tensor.numel() * 2 for tensor in after.values()) <= 10_000 or len(after) == 1
        for name, tensor in after.items():
            assert index["weight_map"][name] == file.name
            assert torch.equal(tensor, before[name].bfloat16())
    assert index["metadata"]["total_size"] == done.bytes
    assert index["weight_map"].keys() == before.keys()
    assert json.loads((shards / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_export_as_safetensors_has_our_names_and_the_spec(checkpoint, tmp_path):
    export(checkpoint, tmp_path / "out", "safetensors")
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        names = set(file.keys())
    assert {"embedding.token.weight", "layers.3.attention.kv.weight", "final_norm.weight", "output.weight"} <= names
    assert json.loads((tmp_path / "out" / "job.json").read_text())["model"]["family"] == "llama"
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"model.safetensors", "job.json"}


def test_export_refuses_a_target_that_exists(checkpoint, tmp_path):
    (tmp_path / "out").mkdir()
    export(checkpoint, tmp_path / "out")
    before = sorted((path.name, path.stat().st_mtime_ns) for path in (tmp_path / "out").iterdir())
    with pytest.raises(WeightsError, match=r".* already exists: choose another folder"):
        export(checkpoint, tmp_path / "out")
    assert sorted((path.name, path.stat().st_mtime_ns) for path in (tmp_path / "out").iterdir()) == before


def test_export_names_numbers_too_large_for_fp16_and_leaves_nothing(corpus, tmp_path):
    trainer = lone(job(corpus, {}, model={"family": "llama"}), tmp_path / "checkpoints")
    trainer.restore(Resume())
    trainer.engine.flat.parameters[10] = 1e6
    save(trainer)
    trainer.close()
    path = str(complete_checkpoints(tmp_path / "checkpoints")[-1][0])
    with pytest.raises(WeightsError, match=r"has a value of 1e\+06, which fp16 cannot represent: use bf16 or fp32"):
        export(path, tmp_path / "out", dtype="fp16")
    assert [entry.name for entry in tmp_path.iterdir()] == ["checkpoints"]


def test_a_killed_export_leaves_nothing_in_its_place_and_the_next_one_clears_up(checkpoint, tmp_path):
    target = tmp_path / "out"
    program = (
        "import sys, time; from manta.workers.weights import export as e, folder as s\n"
        "s.put_on_disk = lambda stream: (print('writing', flush=True), time.sleep(60))\n"
        "e.main(sys.argv[1:])"
    )
    arguments = [checkpoint, "--to", str(target)]
    with subprocess.Popen([sys.executable, "-c", program, *arguments], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "writing\n"
        (left,) = tmp_path.iterdir()
        assert left.name.startswith(".out.") and left.name.endswith(".unfinished")
        with new_folder(tmp_path / "out"):
            assert left.exists(), "one that is being written is not taken for one that was left"
        target.rmdir()
        os.kill(process.pid, signal.SIGKILL)
    assert main(arguments) == 0
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]


def test_terminated_export_removes_what_it_has_written(checkpoint, tmp_path):
    """Also if it is asked again meanwhile."""
    program = (
        "import os, shutil, signal, sys, time\n"
        "from manta.workers.weights import export as e, folder as s\n"
        "s.put_on_disk = lambda stream: (print('writing', flush=True), time.sleep(60))\n"
        "remove = shutil.rmtree\n"
        "e.shutil.rmtree = lambda *a, **o: (os.kill(os.getpid(), signal.SIGTERM), time.sleep(0.1), remove(*a, **o))\n"
        "e.main(sys.argv[1:])"
    )
    command = [sys.executable, "-c", program, checkpoint, "--to", str(tmp_path / "out")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "writing\n"
        process.terminate()
        assert process.wait(60) == -signal.SIGTERM
    assert list(tmp_path.iterdir()) == []


def test_export_names_a_damaged_checkpoint_and_leaves_nothing(corpus, tmp_path, capsys):
    path, _, _ = checkpoint_of(tmp_path / "checkpoints", corpus, family="llama")
    data = next(Path(path).glob("*.distcp"))
    content = bytearray(data.read_bytes())
    content[len(content) // 8] ^= 1
    data.write_bytes(content)
    with pytest.raises(CheckpointError, match="is not what was written"):
        export(path, tmp_path / "out")
    assert main([path, "--to", str(tmp_path / "out")]) == 1
    assert "is not what was written" in capsys.readouterr().err
    assert [entry.name for entry in tmp_path.iterdir()] == ["checkpoints"]


def test_checkpoint_removed_during_an_export_is_reported_and_nothing_is_left(corpus, tmp_path, capsys, monkeypatch):
    path, _, _ = checkpoint_of(tmp_path / "checkpoints", corpus, family="llama")
    read = module.read_contents
    monkeypatch.setattr(module, "read_contents", lambda *known: (read(*known), remove(Path(path)))[0])
    assert main([path, "--to", str(tmp_path / "out")]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"the checkpoint at {path} is not there any more: it was removed while it was read")
    assert said.count("\n") == 1 and [entry.name for entry in tmp_path.iterdir()] == ["checkpoints"]


def test_export_needs_memory_for_only_a_few_rows(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(stream_out, "BAND_BYTES", 1)
    bands: list[int] = []
    cast = stream_out.cast

    def noting(values: numpy.ndarray, dtype: str, into: numpy.ndarray, to: str) -> None:
        bands.append(len(into))
        cast(values, dtype, into, to)

    monkeypatch.setattr(stream_out, "cast", noting)
    export(checkpoint, tmp_path / "rows", dtype="bf16")
    assert set(bands) == {1}, "a row at a time"
    monkeypatch.undo()
    export(checkpoint, tmp_path / "whole", dtype="bf16")
    name = "model.safetensors"
    assert (tmp_path / "rows" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


@pytest.mark.parametrize("processors", [1, 2, 7])
def test_the_bytes_do_not_depend_on_the_number_of_threads(processors, checkpoint, tmp_path, monkeypatch):
    export(checkpoint, tmp_path / "expected")
    monkeypatch.setattr(stream_out, "MAX_THREADS", processors)
    monkeypatch.setattr(stream_out, "MEMORY_BYTES", 2**40)
    monkeypatch.setattr(module.os, "sched_getaffinity", lambda process: set(range(processors)))
    export(checkpoint, tmp_path / "out")
    name = "model.safetensors"
    assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "expected" / name).read_bytes()


def test_export_does_not_load_torch(checkpoint, tmp_path):
    program = (
        "import sys; from manta.workers.weights.export import main\n"
        "assert main(sys.argv[1:]) == 0\n"
        "assert 'torch' not in sys.modules"
    )
    command = [sys.executable, "-c", program, checkpoint, "--to", str(tmp_path / "out")]
    subprocess.run(command, check=True, timeout=60)


def test_export_command_reports_what_it_wrote(checkpoint, tmp_path, capsys):
    newest_of = str(Path(checkpoint).parent)
    assert main([newest_of, "--to", str(tmp_path / "out"), "--dtype", "bf16", "--json"]) == 0
    *progress, last = map(json.loads, capsys.readouterr().out.splitlines())
    assert progress[-1]["done"] == progress[-1]["of"] == last["bytes"]
    assert (last["path"], last["step"], last["dtype"]) == (str(tmp_path / "out"), 1, "bfloat16")
    assert main([str(tmp_path / "nowhere"), "--to", str(tmp_path / "other")]) == 1
    assert str(tmp_path / "nowhere") in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert main([checkpoint, "--to", str(tmp_path / "file" / "out")]) == 1
    assert "file/out cannot be written: " in capsys.readouterr().err
