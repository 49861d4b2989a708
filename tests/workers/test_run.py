"""The engine alone: `python -m manta.workers.run`, in one process and under torchrun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml
from chat_files import CONVERSATIONS, chat_file, tokenizer_folder
from engine_specs import document, spec
from perfetto_reader import read_trace
from rank_programs import run_as_launched
from their_models import saved

from manta.workers import run
from manta.workers import standalone as standalone
from manta.workers.checkpoint.catalog import complete_checkpoints, seal
from manta.workers.config import ParallelConfig
from manta.workers.errors import CheckpointError, MantaError
from manta.workers.settings import Launcher
from manta.workers.standalone import TraceFile
from manta.workers.system import gpu
from manta.workers.system.threads import OF_COMPUTATION
from manta.workers.weights.export import export

ROOT = Path(__file__).parents[2]
NAMES = {
    "step", "loss", "grad_norm", "learning_rate", "tokens", "tokens_per_second", "step_seconds", "mfu_full",
    "mfu_causal", "hfu_full", "hfu_paper", "memory_bytes", "time",
    "generation", "seconds",
}  # fmt: skip


@pytest.fixture(autouse=True)
def alone(monkeypatch) -> None:
    """Not started by torchrun; threads as before, and one for a run: other tests share the cores."""
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(standalone, "usable_cores", lambda: 1)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def config(tmp_path) -> Path:
    """A job of four steps with its corpus beside it."""
    return job_file(tmp_path)


def job_file(folder: Path, **sections) -> Path:
    """A spec as a file."""
    (folder / "corpus.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 40)
    path = folder / "job.yaml"
    train = {"steps": 4, "validate_every": 2, **sections.pop("train", {})}
    path.write_text(yaml.safe_dump(document(train=train, **sections)))
    return path


def test_the_losses_of_validation_sets_are_written_and_shown(tmp_path, capsys):
    (tmp_path / "other.txt").write_text("a bird in the hand is worth two in the bush\n" * 9)
    config = job_file(tmp_path, data={"validation": [{"name": "other", "paths": ["other.txt"]}]})
    assert run.main([str(config), "--metrics", str(tmp_path / "metrics.jsonl")]) == 0
    rows = rows_of(tmp_path / "metrics.jsonl")
    assert ["validation_loss_other" in row for row in rows] == [False, True, False, True]
    last = capsys.readouterr().out.splitlines()[-2:]
    own, other = rows[-1]["validation_loss"], rows[-1]["validation_loss_other"]
    assert last == [f"step 4 | validation loss {own:.4f}", f"step 4 | validation loss other {other:.4f}"]


def rows_of(path: Path) -> list[dict]:
    """The metrics file, line by line."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_run_names_a_file_without_a_spec_once_and_no_class(tmp_path, capsys):
    file = tmp_path / "job.yaml"
    assert run.main([str(file)]) == 2
    assert capsys.readouterr().err == f"{file}: cannot be read (No such file or directory)\n"
    file.write_bytes(b"name: \xe9\n")
    assert run.main([str(file)]) == 2
    assert capsys.readouterr().err == f"{file}: is not valid UTF-8 at byte 7\n"


def test_unwritable_checkpoint_folder_is_refused_before_the_first_step(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"^--checkpoints: .*file/below cannot be written \(Not a directory\)$"):
        standalone.refuse_unwritable(tmp_path / "file" / "below")
    standalone.refuse_unwritable(tmp_path / "new" / "folder")
    assert [*(tmp_path / "new" / "folder").iterdir()] == [], "nothing stays of trying"


def test_second_run_that_saves_to_the_same_checkpoint_folder_is_refused(tmp_path):
    is_refused = pytest.raises(CheckpointError, match=f"another run is saving to {tmp_path / 'new'}")
    with standalone.alone_in(tmp_path / "new"), is_refused, standalone.alone_in(tmp_path / "new"):
        pass
    with standalone.alone_in(tmp_path / "new"), standalone.alone_in(tmp_path / "other"):
        pass


def test_torch_is_loaded_only_for_a_job_that_is_valid():
    """Its import takes seconds."""
    loaded = [sys.executable, "-c", "import sys, manta.workers.run; print(*sys.modules)"]
    modules = subprocess.run(loaded, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    assert "torch" not in modules and "manta.workers.spec.rules" in modules


def test_metrics_have_the_names_of_the_contract(config, tmp_path, capsys):
    assert run.main([str(config), "--metrics", str(tmp_path / "metrics.jsonl")]) == 0
    rows = rows_of(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert [row["tokens"] for row in rows] == [64, 128, 192, 256]
    for row in rows:
        assert set(row) == NAMES | ({"validation_loss"} if row["step"] % 2 == 0 else set())
        assert row["tokens_per_second"] == pytest.approx(64 / row["step_seconds"])
        assert row["mfu_causal"] < row["mfu_full"] == row["hfu_full"] == row["hfu_paper"]
        assert row["memory_bytes"] > 10**7
    assert "step 4/4 | loss" in capsys.readouterr().out


def test_run_trace_has_the_requested_steps(config, tmp_path, capsys):
    trace = tmp_path / "trace.json"
    assert run.main([str(config), "--trace", str(trace), "--trace-steps", "2", "--trace-first-step", "3"]) == 0
    assert "incomplete" not in capsys.readouterr().err
    (rank,) = json.loads(trace.read_text())["ranks"]
    assert [step["step"] for step in rank["steps"]] == [3, 4]
    assert {each["kind"] for each in rank["slices"]} >= {"loader", "forward", "backward", "optimizer", "validation"}
    for_perfetto = tmp_path / "trace.pftrace"
    assert run.main([str(config), "--trace", str(for_perfetto)]) == 0
    assert [track.name for track in read_trace(for_perfetto.read_bytes())][1:] == [
        "rank 0 (tensor 0, pipeline 0, data 0)"
    ]
    assert run.main([str(config), "--trace", str(trace), "--trace-steps", "7"]) == 0
    assert "is incomplete: the recording was interrupted" in capsys.readouterr().err
    assert [step["step"] for step in json.loads(trace.read_text())["ranks"][0]["steps"]] == [2, 3, 4]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--trace-steps", "0"], "--trace-steps must be at least 1, not 0"),
        (["--trace-first-step", "9"], "no step is traced: from step 9 on there is none to record"),
    ],
)
def test_a_trace_that_cannot_be_made_says_why(config, tmp_path, capsys, options, why):
    assert run.main([str(config), "--trace", str(tmp_path / "trace.json"), *options]) == 1
    said = capsys.readouterr()
    assert why in said.err
    assert said.out == "", "nothing was trained for it"


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("trace.txt", "trace.txt must end with .json or .pftrace"),
        ("no/trace.json", "no/trace.json cannot be written: there is no folder"),
        ("folder.json", "folder.json is a folder"),
    ],
)
def test_a_trace_that_could_not_be_kept_is_refused_before_anything_is_trained(tmp_path, name, why):
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(MantaError, match=why):
        TraceFile(tmp_path / name)


@pytest.mark.parametrize("step", ["0", "-3", "x"])
def test_run_refuses_to_stop_before_its_first_step(config, capsys, step):
    with pytest.raises(SystemExit):
        run.main([str(config), "--stop-after-step", step])
    assert f"must be a step, of which the first is 1, not '{step}'" in capsys.readouterr().err


def test_second_run_continues_where_the_first_ended(tmp_path):
    folder = tmp_path / "checkpoints"
    whole, again = tmp_path / "whole.jsonl", tmp_path / "again.jsonl"
    assert run.main([str(job_file(tmp_path)), "--metrics", str(whole), "--checkpoints", str(tmp_path / "other")]) == 0
    for step in (2, 4):
        (tmp_path / str(step)).mkdir()
    first = job_file(tmp_path / "2", checkpoint={"every_steps": 2})
    assert run.main([str(first), "--checkpoints", str(folder)]) == 0
    newest, manifest = complete_checkpoints(folder)[-1]
    assert manifest.step == 4
    (newest / "manifest.json").unlink()  # as if it had been killed while it saved the last one
    assert run.main([str(first), "--checkpoints", str(folder), "--metrics", str(again)]) == 0
    kept = [(row["step"], row["loss"], row["grad_norm"]) for row in rows_of(whole)]
    assert [(row["step"], row["loss"], row["grad_norm"]) for row in rows_of(again)] == kept[2:]
    saved = [(manifest.generation, manifest.step) for _, manifest in complete_checkpoints(folder)]
    assert saved == [(1, 2), (2, 4)], "each run is a generation of its own"


def test_run_refuses_to_resume_with_another_corpus(tmp_path, capsys):
    config = [str(job_file(tmp_path, checkpoint={"every_steps": 2})), "--checkpoints", str(tmp_path / "checkpoints")]
    assert run.main([*config, "--stop-after-step", "2"]) == 0
    (tmp_path / "corpus.txt").write_text("the lazy dog sleeps on while the quick brown fox jumps\n" * 40)
    capsys.readouterr()
    assert run.main(config) == 1
    assert capsys.readouterr().err.startswith("DataError: ")
    assert run.main([config[0]]) == 0, "without checkpoints there is nothing to go on from"


@pytest.mark.parametrize(
    ("key", "before", "now", "more"),
    [
        ("train.global_batch_size", 4, 8, {}), ("train.seed", 0, 1, {}), ("data.validation_fraction", 0.05, 0.1, {}),
        ("model.sequence_length", 8, 4, {}),
        ("train.batch_ramp", None, {"start": 2, "increment": 2, "samples": 8}, {}),
        ("data.paths", ["b.txt", "corpus.txt"], ["corpus.txt", "b.txt"], {}),
        ("data.weights", None, [1.0, 2.0], {"data": {"paths": ["b.txt", "corpus.txt"]}}),
    ],
)  # fmt: skip
def test_run_refuses_to_resume_under_a_key_that_gives_its_steps_other_samples(tmp_path, capsys, key, before, now, more):
    (tmp_path / "b.txt").write_text("a second text of words\n" * 40)
    checkpoints = ["--checkpoints", str(tmp_path / "checkpoints")]

    def started(value, steps: int) -> int:
        section, name = key.split(".")
        sections = {"checkpoint": {"every_steps": 2}, "train": {"steps": steps}, **more}
        sections[section] = {**sections.get(section, {}), **({} if value is None else {name: value})}
        return run.main([str(job_file(tmp_path, **sections)), *checkpoints])

    assert started(before, 2) == 0
    capsys.readouterr()
    assert started(now, 4) == 1
    error = capsys.readouterr().err
    assert error.startswith("CheckpointError: ") and f"leave some out: {key} (was " in error
    assert started(before, 4) == 0, "more steps are no other samples"


def test_run_refuses_to_resume_with_other_adapters(tmp_path, capsys):
    def started(steps: int, **lora: Any) -> int:
        train = {"steps": steps, "lora": lora or None}
        config = job_file(tmp_path, checkpoint={"every_steps": 2}, train=train)
        return run.main([str(config), "--checkpoints", str(tmp_path / "checkpoints")])

    assert started(2, rank=3) == 0
    assert f"train.lora: {4 * 3 * (4 * 64 + 2 * 160):,} of " in capsys.readouterr().out
    for other in ({}, {"rank": 4}, {"rank": 3, "alpha": 1.0}, {"rank": 3, "targets": ["q"]}):
        assert started(4, **other) == 1
        assert "was trained with other adapters: the rank, alpha, targets and scaling" in capsys.readouterr().err
    assert started(4, rank=3, dropout=0.1, targets=["q", "k", "v", "o", "up", "down"]) == 0


def test_run_refuses_to_resume_with_a_model_that_leaves_out_a_part_of_the_state(tmp_path, capsys):
    def started(steps: int, layers: int = 2, moe: dict[str, Any] | None = None, **balance: float) -> int:
        experts = {"experts": 4, "per_token": 2, "ffn_hidden_size": 8, "balance": balance, **(moe or {})}
        model = {"family": "llama", "layers": layers, "moe": experts}
        config = job_file(tmp_path, model=model, checkpoint={"every_steps": 2}, train={"steps": steps})
        return run.main([str(config), "--checkpoints", str(tmp_path / "checkpoints")])

    assert started(2, moe={"shared": 1}, bias_rate=0.01) == 0
    for given, error in (
        ({"bias_rate": 0.01}, "is of another model: the job's has no layers.0.mlp.shared.down.weight"),
        ({"layers": 1, "moe": {"shared": 1}, "bias_rate": 0.01}, "is of another model: the job's has no layers.1."),
        ({"moe": {"shared": 1}}, "set model.moe.balance.bias_rate above 0"),
    ):
        capsys.readouterr()
        assert started(4, **given) == 1
        assert error in capsys.readouterr().err
    assert started(4, moe={"shared": 1}, bias_rate=1e-12) == 0


def test_run_that_stops_early_has_the_numbers_of_a_whole_one(tmp_path):
    folder, whole, part = tmp_path / "checkpoints", tmp_path / "whole.jsonl", tmp_path / "part.jsonl"
    config = str(job_file(tmp_path, checkpoint={"every_steps": 2}))
    assert run.main([config, "--metrics", str(whole)]) == 0
    assert run.main([config, "--metrics", str(part), "--checkpoints", str(folder), "--stop-after-step", "3"]) == 0
    curve = [(row["step"], row["loss"], row["grad_norm"], row["learning_rate"]) for row in rows_of(whole)]
    assert [(row["step"], row["loss"], row["grad_norm"], row["learning_rate"]) for row in rows_of(part)] == curve[:3]
    assert [manifest.step for _, manifest in complete_checkpoints(folder)] == [2]


def test_a_bad_spec_is_reported_field_by_field(tmp_path, capsys):
    config = job_file(tmp_path, model={"heads": 5})
    assert run.main([str(config)]) == 2
    expected = f"{config}: model.heads: heads (5) must divide hidden_size (32) (try: 4)\n"
    assert capsys.readouterr().err == expected


def test_run_reports_a_file_that_is_no_mapping(tmp_path, capsys):
    (tmp_path / "job.yaml").write_text("just words")
    assert run.main([str(tmp_path / "job.yaml")]) == 2
    assert capsys.readouterr().err.startswith(f"{tmp_path}/job.yaml: a job spec is a mapping of sections, not a string")


def test_run_with_the_wrong_number_of_processes_says_how_to_start_it(tmp_path, capsys):
    assert run.main([str(job_file(tmp_path, parallel={"tensor": 2}))]) == 1
    error = capsys.readouterr().err
    assert "wrong number of processes (1): the layout needs 2" in error
    assert "torchrun --nproc-per-node 2 -m manta.workers.run" in error


def test_run_names_missing_data(config, capsys):
    (config.parent / "corpus.txt").unlink()
    assert run.main([str(config)]) == 1
    assert capsys.readouterr().err == f"DataError: no such file or directory: {config.parent}/corpus.txt\n"


def two_ranks_and_one(folder: Path) -> tuple[Path, list[dict]]:
    """A job of two ranks, and the rows of the same job with one."""
    for name in ("one", "two"):
        (folder / name).mkdir()
    assert run.main([str(job_file(folder / "one")), "--metrics", str(folder / "one.jsonl")]) == 0
    return job_file(folder / "two", parallel={"pipeline": 2}), rows_of(folder / "one.jsonl")


def assert_same_curve(rows: list[dict], expected: list[dict]) -> None:
    for row, other in zip(expected, rows, strict=True):
        assert other["loss"] == pytest.approx(row["loss"], rel=2e-6)


def test_run_of_two_ranks_with_the_launchers_store_follows_the_curve_of_one(ranks, tmp_path):
    """As torchrun starts them, but in processes that have imported torch."""
    config, expected = two_ranks_and_one(tmp_path)
    command = [str(config), "--metrics", str(tmp_path / "two.jsonl")]
    assert ranks.run(ParallelConfig(data=2), run_as_launched, command, ranks.port) == [0, 0]
    assert_same_curve(rows_of(tmp_path / "two.jsonl"), expected)


@pytest.mark.soak
def test_run_of_two_ranks_under_torchrun_follows_the_curve_of_one(tmp_path):
    config, expected = two_ranks_and_one(tmp_path)
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", "-m",
        "manta.workers.run",
    ]  # fmt: skip
    environment = {**os.environ, **OF_COMPUTATION}
    ended = subprocess.run(
        [*command, str(config), "--metrics", str(tmp_path / "two.jsonl")],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert_same_curve(rows_of(tmp_path / "two.jsonl"), expected)


def run_with_cores(monkeypatch, cores, config, folder=None):
    """Train on a machine with so many cores; with how many threads, and what the newest checkpoint says of them."""
    said = []
    monkeypatch.setattr(standalone, "usable_cores", lambda: cores)
    monkeypatch.setattr(torch, "set_num_threads", said.append)  # some that wait would keep the cores from other tests
    assert run.main([str(config), *([] if folder is None else ["--checkpoints", str(folder)])]) == 0
    newest = complete_checkpoints(folder)[-1][1] if folder is not None else None
    return said[0], newest and newest.spec["resources"]["threads"]


def test_a_process_alone_computes_with_all_cores_or_as_its_job_says(tmp_path, monkeypatch):
    assert run_with_cores(monkeypatch, 3, job_file(tmp_path)) == (3, None)
    assert run_with_cores(monkeypatch, 3, job_file(tmp_path, resources={"threads": 2})) == (2, None)
    assert run_with_cores(monkeypatch, 3, job_file(tmp_path, train={"deterministic": "elastic"})) == (1, None)


def test_resumed_run_keeps_its_threads_unless_told_otherwise(tmp_path, monkeypatch):
    folder = tmp_path / "checkpoints"
    assert run_with_cores(monkeypatch, 3, job_file(tmp_path), folder) == (3, 3)
    assert run_with_cores(monkeypatch, 2, job_file(tmp_path, train={"steps": 6}), folder) == (3, 3)
    asks_for_one = job_file(tmp_path, train={"steps": 8}, resources={"threads": 1})
    assert run_with_cores(monkeypatch, 2, asks_for_one, folder) == (1, 1)


def test_run_from_before_the_threads_setting_keeps_one_thread(tmp_path, monkeypatch):
    folder = tmp_path / "checkpoints"
    run_with_cores(monkeypatch, 1, job_file(tmp_path), folder)
    for path, manifest in complete_checkpoints(folder):
        spec = {name: section for name, section in manifest.spec.items() if name != "resources"}
        seal(path, replace(manifest, spec=spec))
    assert run_with_cores(monkeypatch, 3, job_file(tmp_path, train={"steps": 6}), folder) == (1, 1)


@pytest.mark.parametrize(("rank", "threads"), [(0, 4), (1, 5)])
def test_ranks_on_other_machines_compute_as_rank_0_does(monkeypatch, rank, threads):
    monkeypatch.setattr(standalone, "usable_cores", lambda: 8)
    store = dist.HashStore()
    if rank:
        store.set("manta/threads", "5")
    launcher = Launcher(rank, 2, 0, 2, "127.0.0.1", 1, store_is_running=False)
    decided = standalone._with_threads(spec(), torch.device("cpu"), launcher, store, None)
    assert (decided.resources.threads, int(store.get("manta/threads"))) == (threads, threads)


@pytest.fixture
def gpus(monkeypatch):
    """Sets how many GPUs there seem to be; returns which of them were made the current one."""
    chosen = []

    def have(count):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: chosen.append(str(device)))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        return chosen

    yield have
    gpu.leave()


def device(accelerator, local_rank=0):
    return str(standalone.pick_device(spec(resources={"accelerator": accelerator}), local_rank))


def test_ranks_share_the_gpus_of_a_machine_in_turn_or_use_none_if_told_so(gpus):
    chosen = gpus(2)
    assert [device("auto", rank) for rank in range(3)] == ["cuda:0", "cuda:1", "cuda:0"]
    assert device("gpu", 1) == "cuda:1"
    assert device("cpu", 1) == "cpu"
    assert chosen == ["cuda:0", "cuda:1", "cuda:0", "cuda:1"]


def test_run_without_a_gpu_is_refused_only_if_one_is_required(gpus):
    gpus(0)
    assert device("auto") == device("cpu") == "cpu"
    with pytest.raises(MantaError, match="accelerator is gpu, but this machine has none"):
        device("gpu")


def test_run_with_more_processes_than_ranks_is_refused():
    launcher = Launcher(0, 2, 0, 2, "127.0.0.1", 1, store_is_running=False)
    with pytest.raises(MantaError, match=r"wrong number of processes \(2\): the layout needs 1"):
        run._check_world(spec(), launcher)
    run._check_world(spec(parallel={"data": 2}), launcher)


def test_resumed_run_keeps_the_metrics_rows_of_earlier_steps(tmp_path, capsys):
    path = tmp_path / "metrics.jsonl"
    config = [str(job_file(tmp_path, checkpoint={"every_steps": 2})), "--checkpoints", str(tmp_path / "checkpoints")]
    assert run.main([*config, "--metrics", str(path), "--stop-after-step", "3"]) == 0
    before = rows_of(path)
    path.write_bytes(path.read_bytes() + b'{"step": 4, "lo')  # the last words of one that was killed
    assert run.main([*config, "--metrics", str(path)]) == 0
    assert [row["step"] for row in rows_of(path)] == [1, 2, 3, 4]
    assert rows_of(path)[:2] == before[:2] and rows_of(path)[2] != before[2], "step 3 was done again"
    whole = path.read_bytes()
    capsys.readouterr()
    assert run.main([*config, "--metrics", str(path)]) == 0
    assert path.read_bytes() == whole
    assert capsys.readouterr().out == "there is nothing left to train: step 4 is done, and the last one is 4\n"


def test_damaged_checkpoint_is_skipped_with_a_message_and_if_all_are_the_run_fails(tmp_path, capsys):
    folder = tmp_path / "checkpoints"
    config = [str(job_file(tmp_path, checkpoint={"every_steps": 2})), "--checkpoints", str(folder)]
    assert run.main(config) == 0
    paths = [path for path, _ in complete_checkpoints(folder)]
    assert len(paths) == 2

    def damage(path):
        (file,) = path.glob("*.distcp")
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)

    damage(paths[1])
    capsys.readouterr()
    metrics = tmp_path / "metrics.jsonl"
    assert run.main([*config, "--metrics", str(metrics)]) == 0
    assert [row["step"] for row in rows_of(metrics)] == [3, 4]
    assert f"skipped: the checkpoint at {paths[1]} is damaged" in capsys.readouterr().err
    for path, _ in complete_checkpoints(folder)[:1] + complete_checkpoints(folder)[2:]:
        damage(path)
    assert run.main(config) == 1
    assert capsys.readouterr().err.startswith("CheckpointError: the checkpoint at ")


def test_weights_are_fine_tuned_on_conversations_with_the_loss_that_transformers_has(tmp_path):
    """Each conversation by itself there, packed here: the mean over all tokens of answers."""
    transformers = pytest.importorskip("transformers")
    base = saved("llama", tmp_path / "base", vocab_size=420, max_position_embeddings=1024)
    tokenizer_folder(base, "qwen")
    chat_file(tmp_path / "chats.jsonl")
    data = {"source": "chat", "paths": ["chats.jsonl"], "tokenizer": "base", "validation_fraction": 0.0}
    train = {"steps": 2, "global_batch_size": 1, "validate_every": 2}
    sets = [{"name": "same", "paths": ["chats.jsonl"]}]
    path, metrics = tmp_path / "job.yaml", tmp_path / "metrics.jsonl"
    job = {"model": {"from": "base", "sequence_length": 576}, "data": {**data, "validation": sets}, "train": train}
    path.write_text(yaml.safe_dump({"name": "chat", **job}))
    checkpoints = tmp_path / "checkpoints"
    assert run.main([str(path), "--metrics", str(metrics), "--checkpoints", str(checkpoints)]) == 0
    rows = rows_of(metrics)

    model = transformers.AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager")
    assert rows[0]["loss"] == pytest.approx(loss_of_answers(model, base), rel=1e-5), "one sample holds all of them"
    assert rows[1]["loss"] < rows[0]["loss"]
    export(str(complete_checkpoints(checkpoints)[-1][0]), tmp_path / "exported")
    tuned = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported", attn_implementation="eager")
    assert rows[1]["validation_loss_same"] == pytest.approx(loss_of_answers(tuned, tmp_path / "exported"), rel=1e-5)


def loss_of_answers(model, folder: Path) -> float:
    """In nats a token of all answers, by transformers alone."""
    tokenizer = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(folder)
    losses = []
    for messages in CONVERSATIONS:
        said = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        tokens, marks = torch.tensor([said["input_ids"]]), torch.tensor(said["assistant_masks"]).bool()
        with torch.no_grad():
            logits = model(tokens).logits[0, :-1]
        losses += torch.nn.functional.cross_entropy(logits, tokens[0, 1:], reduction="none")[marks[1:]].tolist()
    return sum(losses) / len(losses)
