"""Which snapshot files lie on a node, and what they are called."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import reduce

import pytest
import torch
from stepped_snapshots import parts_of

from manta.workers.config import JobSpec
from manta.workers.snapshot.files import (
    backup_path,
    fingerprint,
    layout_tag,
    remove_other_layouts,
    snapshot_files,
    snapshot_path,
    stored_steps,
)
from manta.workers.snapshot.snapshots import Snapshots

IDENTITY = b"0123456789abcdef"


def state_at(step: int) -> list[torch.Tensor]:
    """A rank's state that tells its step."""
    return [torch.full((5,), float(step))]


def test_committed_steps_needs_no_torch(tmp_path):
    Snapshots(tmp_path, 3, parts_of(state_at(5)), IDENTITY).save(5)
    program = (
        "import sys; from manta.workers.snapshot.files import stored_steps\n"
        "print(stored_steps(sys.argv[1], 3), 'torch' in sys.modules)"
    )
    process = subprocess.run([sys.executable, "-c", program, tmp_path], capture_output=True, text=True, timeout=60)
    assert process.stdout.split("\n")[0] == "[5] False", process.stderr


def test_snapshot_files_of_several_layouts_coexist_until_other_layouts_are_removed(tmp_path):
    for rank, layout in ((0, "0000aaaa"), (1, "0000aaaa"), (0, "0000bbbb")):
        Snapshots(tmp_path, rank, parts_of(state_at(0)), IDENTITY, layout).save(7 + rank)
    backup_path(tmp_path, 2, "0000aaaa").write_bytes(b"")
    snapshot_path(tmp_path, 1, "0000aaaa").with_name("rank-00001.snapshot.arriving").write_bytes(b"")
    (tmp_path / "rank-00000.else").write_bytes(b"")
    assert [(file.rank, file.layout, file.is_backup) for file in snapshot_files(tmp_path)] == [
        (0, "0000aaaa", False), (0, "0000bbbb", False), (1, "0000aaaa", False), (2, "0000aaaa", True),
    ]  # fmt: skip
    assert stored_steps(tmp_path, 1) == [8]
    assert stored_steps(tmp_path, 0) == [7], "once, though two files hold it"
    assert stored_steps(tmp_path, 1, "0000bbbb") == []
    remove_other_layouts(tmp_path, "0000bbbb")
    assert [file.path for file in snapshot_files(tmp_path)] == [snapshot_path(tmp_path, 0, "0000bbbb")]
    assert snapshot_files(tmp_path / "nowhere") == []


MODEL = {"layers": 4, "hidden_size": 64, "heads": 4, "sequence_length": 32}
PINNED = {
    "": ("d905e156", "4019087a"),
    "parallel.tensor=2": ("9df1217b", "0c5aaa38"),
    "parallel.pipeline=4": ("9d0e2091", "d8972b16"),
    'parallel.pipeline=2 parallel.virtual_stages=2 parallel.schedule="interleaved"': ("0a431fb4", "68389cd6"),
    'parallel.pipeline=4 parallel.schedule="gpipe"': ("d16bf9a3", "710c258e"),
    'parallel.pipeline=4 parallel.schedule="zb-h1"': ("927132f8", "9a0a476f"),
    "parallel.data=4": ("142279c6", "f729826e"),
    "parallel.data=4 parallel.zero=0": ("aa659eb4", "b4b3c746"),
    "parallel.tensor=2 parallel.pipeline=2 parallel.data=2": ("957e2a87", "7f4ec4ff"),
    "parallel.tensor=2 parallel.sequence_parallel=false": ("66bb68aa", "4032fd83"),
    "parallel.pipeline=2 parallel.stage_layers=[1,3]": ("c8c24e19", "dd656f38"),
    'parallel.recompute="full"': ("b35fe1f9", "2e7e1004"),
    "parallel.bucket_megabytes=1": ("d05b5973", "bac63c55"),
    'train.precision="bf16"': ("d905e156", "0a6cc24e"),
    "model.layers=8": ("d905e156", "02598b77"),
    "model.dropout=0.1": ("d905e156", "babf5c6c"),
    "model.vocabulary_size=512": ("d905e156", "4b227469"),
    'model.family="llama" model.kv_heads=2': ("d905e156", "fd3a5d05"),
    'model.family="qwen" model.tie_embeddings=true': ("d905e156", "256209e2"),
    'model.family="llama" model.sliding_window=16 model.rope={"theta":500000.0}': ("d905e156", "c785bdef"),
    'data.paths=["/other"]': ("d905e156", "b248943c"),
    'data.tokenizer="bpe"': ("d905e156", "27655510"),
}
"""By changes to MODEL and the other sections: the layout's tag, and the beginning of rank 0's fingerprint. A release
that changes one of them cannot read the snapshots of jobs that run while it is installed."""


def spec_of(changes: str) -> JobSpec:
    """The spec with `section.key=value` for each change, separated by spaces."""
    document = {"model": dict(MODEL), "data": {"source": "text", "paths": ["/corpus"]}, "train": {"steps": 9}}
    for change in changes.split():
        path, _, value = change.partition("=")
        *sections, key = path.split(".")
        reduce(lambda inner, name: inner.setdefault(name, {}), sections, document)[key] = json.loads(value)
    return JobSpec.model_validate(document)


@pytest.mark.parametrize("changes", PINNED)
def test_identity_of_snapshots_is_that_of_earlier_releases(changes):
    spec = spec_of(changes)
    assert (layout_tag(spec.layout), fingerprint(spec, 0)[:4].hex()) == PINNED[changes]


def test_identity_of_snapshots_differs_between_states_that_do_not_fit():
    assert len(set(PINNED.values())) == len(PINNED)
    spec = spec_of("")
    assert fingerprint(spec, 0) != fingerprint(spec, 1) and len(fingerprint(spec, 0)) == 16


@pytest.mark.parametrize(
    "changes",
    ['parallel.gather="beside_forward"', 'parallel.stage_accelerators=["A100"]', "train.steps=99", "parallel.data=1"],
)
def test_identity_of_snapshots_ignores_default_values_and_options_without_state(changes):
    spec, other = spec_of(""), spec_of(changes)
    assert (layout_tag(other.layout), fingerprint(other, 0)) == (layout_tag(spec.layout), fingerprint(spec, 0))


def test_stored_steps_of_a_rank_are_sorted_and_of_its_own_files_only(tmp_path):
    for step in (8, 7):
        Snapshots(tmp_path, 1, parts_of(state_at(0)), IDENTITY, f"0000000{step}").save(step)
    Snapshots(tmp_path, 2, parts_of(state_at(0)), IDENTITY).save(33)
    snapshot_path(tmp_path, 2).rename(backup_path(tmp_path, 1, "0000aaaa"))
    assert stored_steps(tmp_path, 1) == [7, 8]
    Snapshots(tmp_path, 3, parts_of(state_at(0)), IDENTITY).save(4)
    assert [(file.rank, file.layout) for file in snapshot_files(tmp_path) if file.rank == 3] == [(3, "")]
    assert stored_steps(tmp_path, 3, "") == [4]
