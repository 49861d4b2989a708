"""Which snapshot files lie on a node, and what they are called."""

from __future__ import annotations

import subprocess
import sys

import torch

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
    Snapshots(tmp_path, 3, state_at(5), IDENTITY).save(5)
    program = (
        "import sys; from manta.workers.snapshot.files import stored_steps\n"
        "print(stored_steps(sys.argv[1], 3), 'torch' in sys.modules)"
    )
    process = subprocess.run([sys.executable, "-c", program, tmp_path], capture_output=True, text=True, timeout=60)
    assert process.stdout.split("\n")[0] == "[5] False", process.stderr


def test_files_of_several_layouts_lie_side_by_side_until_the_others_go(tmp_path):
    for rank, layout in ((0, "0000aaaa"), (1, "0000aaaa"), (0, "0000bbbb")):
        Snapshots(tmp_path, rank, state_at(0), IDENTITY, layout).save(7 + rank)
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


def test_fingerprints_and_layout_tags_differ_between_incompatible_specs():
    spec = {
        "model": {"layers": 2},
        "parallel": {"tensor": 1},
        "data": {"source": "text"},
        "train": {"precision": "fp32"},
    }
    prints = {
        fingerprint(spec, 0),
        fingerprint(spec, 1),
        fingerprint({**spec, "model": {"layers": 3}}, 0),
        fingerprint({**spec, "parallel": {"tensor": 2}}, 0),
        fingerprint({**spec, "train": {"precision": "bf16"}}, 0),
        fingerprint({**spec, "data": {"source": "bytes"}}, 0),
    }
    assert len(prints) == 6
    assert fingerprint({**spec, "train": {"precision": "fp32", "steps": 9}}, 0) in prints, "more steps fit"
    assert all(len(each) == 16 for each in prints)
    assert layout_tag(spec) != layout_tag({**spec, "parallel": {"tensor": 2}})
    for more in ({"gather": "beside_forward"}, {"stage_accelerators": ["A100"]}, {"stage_layers": None}):
        same = {**spec, "parallel": {"tensor": 1, **more}}
        assert (layout_tag(same), fingerprint(same, 0)) == (layout_tag(spec), fingerprint(spec, 0)), more
    assert layout_tag({**spec, "parallel": {"tensor": 1, "stage_layers": [1, 3]}}) != layout_tag(spec)


def test_stored_steps_of_a_rank_are_sorted_and_of_its_own_files_only(tmp_path):
    for step in (8, 7):
        Snapshots(tmp_path, 1, state_at(0), IDENTITY, f"0000000{step}").save(step)
    Snapshots(tmp_path, 2, state_at(0), IDENTITY).save(33)
    snapshot_path(tmp_path, 2).rename(backup_path(tmp_path, 1, "0000aaaa"))
    assert stored_steps(tmp_path, 1) == [7, 8]
    Snapshots(tmp_path, 3, state_at(0), IDENTITY).save(4)
    assert [(file.rank, file.layout) for file in snapshot_files(tmp_path) if file.rank == 3] == [(3, "")]
    assert stored_steps(tmp_path, 3, "") == [4]


def test_fingerprints_and_layout_tags_do_not_depend_on_the_order_of_keys():
    """A spec that went through a database may come back in another one."""
    one = {"parallel": {"tensor": 1, "data": 2}, "model": {"a": 1, "b": 2}, "data": {}, "train": {"precision": "fp32"}}
    other = {**one, "parallel": {"data": 2, "tensor": 1}, "model": {"b": 2, "a": 1}}
    assert layout_tag(one) == layout_tag(other)
    assert fingerprint(one, 0) == fingerprint(other, 0)
    assert len(layout_tag(one)) == 8
