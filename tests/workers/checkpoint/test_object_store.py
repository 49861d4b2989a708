"""Durable checkpoints in an object store: saved, found, loaded, damaged and deleted as in a folder, and readable by
torch's own."""

import threading

import pytest
import torch
from engine_specs import spec

from manta.workers.checkpoint import checkpointer
from manta.workers.checkpoint.catalog import Condition, list_checkpoints, newest_usable, next_generation, verify
from manta.workers.checkpoint.checksums import DamagedCheckpoint
from manta.workers.checkpoint.pruning import prune
from manta.workers.comm.comm import Comm
from manta.workers.comm.grid import RankGrid
from manta.workers.protocol.messages import Resume
from manta.workers.storage import object_files
from manta.workers.storage.files import files_of
from manta.workers.trainer import StatePaths, Trainer
from manta.workers.training.reporter import Reporter

STEPS = 4


@pytest.fixture(autouse=True)
def corpus(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpus.txt").write_text("to be or not to be, that is the question. " * 40, encoding="utf-8")
    monkeypatch.setattr(checkpointer, "PATIENCE_SECONDS", 60.0)  # each save at its step, however slow the server is


def _trained(places, steps=STEPS, path=None):
    """The parameters after the last step, and all that was reported, of a job that goes on from the checkpoint at
    `path`."""
    reported = []
    trainer = _trainer(places, reported, steps)
    trainer.restore(Resume() if path is None else Resume("checkpoint", 2, str(path)))
    trainer.train()
    parameters = trainer.engine.flat.parameters.clone()
    trainer.close()
    trainer.reporter.close()
    return parameters, [message.payload for message in reported]


def _trainer(places, reported, steps=STEPS):
    job = spec(train={"steps": steps}, checkpoint={"every_steps": 2, "keep": 2})
    comm = Comm(RankGrid(job.layout), 0, torch.device("cpu"))
    return Trainer(job, comm, Reporter(reported.extend), 1e12, places)


def _folder(bucket):
    return bucket / "manta" / "job-1" / "checkpoints"


def test_a_job_goes_on_from_a_bucket_with_the_same_bits(bucket, tmp_path):
    local, _ = _trained(StatePaths(job="job-1", checkpoints=str(tmp_path / "checkpoints")))
    folder = _folder(bucket)
    kept, reported = _trained(
        StatePaths(job="job-1", checkpoints=str(folder), corpus_record=folder.parent / "corpus.json")
    )
    listing = list_checkpoints(folder)
    assert [(each.step, each.condition) for each in listing.checkpoints] == [
        (2, Condition.COMPLETE),
        (4, Condition.COMPLETE),
    ]
    assert str(listing.checkpoints[0].path) == f"{folder}/step-00000002-generation-0"
    assert next_generation(str(folder)) == 1
    assert [each.type for each in reported if getattr(each, "type", "") == "checkpoint_failed"] == []
    assert files_of(folder).is_there(folder.parent / "corpus.json")
    again, _ = _trained(StatePaths(job="job-1", checkpoints=str(folder)), path=listing.checkpoints[0].path)
    assert torch.equal(kept, local) and torch.equal(again, local)


def test_torchs_own_reader_loads_a_tensor_from_a_checkpoint_in_a_bucket(bucket):
    from torch.distributed.checkpoint import load  # both take seconds, also for who collects tests
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

    _trained(StatePaths(job="job-1", checkpoints=str(_folder(bucket))))
    newest, _ = newest_usable(_folder(bucket))
    state = {"model.final_norm.weight": torch.zeros(16)}
    metadata = FsspecReader(str(newest)).read_metadata().state_dict_metadata
    state = {"model.final_norm.weight": torch.zeros(metadata["model.final_norm.weight"].size)}
    load(state, storage_reader=FsspecReader(str(newest)), no_dist=True)
    assert state["model.final_norm.weight"].abs().sum() > 0


def test_damaged_checkpoint_in_a_bucket_is_found_and_the_one_before_is_used(bucket):
    _trained(StatePaths(job="job-1", checkpoints=str(_folder(bucket))))
    older, newer = (each.path for each in list_checkpoints(_folder(bucket)).checkpoints)
    files, file = files_of(newer), newer / "__0_0.distcp"
    content = bytearray(files.read(file))
    content[len(content) // 2] ^= 1
    files.write_atomically(file, bytes(content))
    with pytest.raises(DamagedCheckpoint, match=f"the checkpoint at {newer} is damaged: __0_0.distcp is not what was"):
        verify(newer)
    assert newest_usable(_folder(bucket))[0] == older
    files.remove(file)
    (_, missing) = list_checkpoints(_folder(bucket)).checkpoints
    assert missing.condition is Condition.INCOMPLETE and missing.problem.endswith("__0_0.distcp is missing")


def test_checkpoint_in_a_bucket_is_deleted_once_newer_ones_replace_it(bucket):
    _, reported = _trained(StatePaths(job="job-1", checkpoints=str(_folder(bucket))), steps=6)
    assert [each.step for each in list_checkpoints(_folder(bucket)).checkpoints] == [4, 6]
    deleted = [each.data["path"] for each in reported if getattr(each, "type", "") == "checkpoint_deleted"]
    assert deleted == [f"{_folder(bucket)}/step-00000002-generation-0"]
    assert prune(str(_folder(bucket)), 1, generation=0) == [_folder(bucket) / "step-00000004-generation-0"]


def test_a_save_that_the_store_breaks_off_is_an_event_and_leaves_nothing(wired_bucket, wire, monkeypatch):
    monkeypatch.setattr(object_files, "PART_BYTES", 5 * 1024 * 1024)
    wire.meddle = lambda head: "cut" if head.startswith(b"PUT") and b"step-00000002" in head else None
    _, reported = _trained(StatePaths(job="job-1", checkpoints=str(_folder(wired_bucket))))
    types = [(each.type, each.step) for each in reported if getattr(each, "type", "").startswith("checkpoint_")]
    assert ("checkpoint_failed", 2) in types and ("checkpoint_saved", 4) in types
    assert [each.step for each in list_checkpoints(_folder(wired_bucket)).checkpoints] == [4]


def test_rank_that_leaves_a_generation_does_not_wait_for_a_silent_store(wired_bucket, wire, monkeypatch):
    """Each rank that saves would take longer to come to rest than it may."""
    asked, may_answer = threading.Event(), threading.Event()
    wire.meddle = lambda head: asked.set() or (may_answer.wait(120) and None)
    monkeypatch.setattr(checkpointer, "CLOSE_SECONDS", 60.0)  # what is given up ends, however busy the machine is
    trainer = _trainer(StatePaths(checkpoints=str(_folder(wired_bucket))), [])
    trainer.restore(Resume())
    trainer.train_step()
    monkeypatch.setattr(trainer.comm, "size", lambda axis: 2)  # a rank that is alone saves on
    trainer.state.checkpoints.start(1)
    assert asked.wait(60)
    trainer.comm.close()
    rests = threading.Thread(target=trainer.rest, daemon=True)
    rests.start()
    rests.join(60)
    assert not rests.is_alive() and "has ended" in trainer.state.checkpoints.failure
    may_answer.set()
    trainer.close()


def test_checkpoints_in_an_unreachable_object_store_are_of_unknown_condition(bucket, wire):
    from s3_server import reached_at

    _trained(StatePaths(job="job-1", checkpoints=str(_folder(bucket))))
    path = str(list_checkpoints(_folder(bucket)).checkpoints[1].path)
    wire.meddle = lambda head: "cut"
    with reached_at(wire.url):
        listing = list_checkpoints(_folder(bucket))
    assert listing.problem is not None and listing.condition_of(path, [path])[0] is Condition.UNKNOWN
