"""Any layout goes on from the snapshots of any other, to the bit; what is damaged or missing is named."""

from __future__ import annotations

import contextlib
import itertools
import math
import mmap
import shutil
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_programs import (
    EXPERTS,
    OF_EXPERTS,
    SMALL,
    RankOutcome,
    fail_to_load_from_memory,
    job,
    load_from_memory,
    train_and_snapshot,
)
from hypothesis import given
from hypothesis import strategies as st
from stepped_snapshots import parts_of

from manta.workers.checkpoint.durable import Rectangle
from manta.workers.config import OptimizerConfig, ParallelConfig
from manta.workers.errors import CheckpointError
from manta.workers.parallel.data.state import FROZEN
from manta.workers.snapshot.files import snapshot_files
from manta.workers.snapshot.note import read_note
from manta.workers.snapshot.reshard import ReshardedState, intersection, load_from_snapshots, rest
from manta.workers.snapshot.snapshot_file import SnapshotFile
from manta.workers.snapshot.snapshots import Snapshots

LAYOUTS: dict[str, dict[str, Any]] = {
    "1": {},
    "d2": {"data": 2},
    "d3 small buckets": {"data": 3, **SMALL},
    "d2 zero 0": {"data": 2, "zero": 0},
    "t4": {"tensor": 4},
    "d3 zero 3": {"data": 3, "zero": 3},
    "p2 interleaved d2 small buckets": {
        "pipeline": 2, "schedule": "interleaved", "virtual_stages": 2, "data": 2, **SMALL,
    },
    "t2 p2 zb-v d2": {"tensor": 2, "pipeline": 2, "schedule": "zb-v", "virtual_stages": 2, "data": 2},
    "c2 d2 small buckets": {"context": 2, "context_method": "ring", "data": 2, **SMALL},
    "c4 zero 0": {"context": 4, "zero": 0},
    "p2, three layers and one": {"pipeline": 2, "stage_layers": [3, 1]},
}  # fmt: skip
ALL = LAYOUTS | EXPERTS
STEPS = 2
MODEL = {"hidden_size": 16, "kv_heads": 2}
Whole = dict[str, torch.Tensor]


@dataclass
class RankFiles:
    """The snapshots of a job in one layout."""

    folder: Path
    by_rank: list[RankOutcome]
    """What each rank had when it made them."""

    @property
    def paths(self) -> tuple[str, ...]:
        """The files."""
        return tuple(str(each.path) for each in snapshot_files(self.folder))

    def copied(self, folder: Path) -> RankFiles:
        """The same somewhere else, for those who change or remove them."""
        shutil.copytree(self.folder, folder)
        return RankFiles(folder, self.by_rank)


def written_by(layout: str, ranks: Any, corpus: str, folder: Path, **sections: Any) -> RankFiles:
    """Train from the start in one layout."""
    document = job(corpus, ALL[layout], **{"model": MODEL, **sections})
    return RankFiles(folder, ranks.run(ParallelConfig(**ALL[layout]), train_and_snapshot, document, str(folder), STEPS))


def resharded(layout: str, written: RankFiles, ranks: Any, corpus: str, more: int = 0, **sections: Any) -> Any:
    """Go on in another layout: what each rank found."""
    document = job(corpus, ALL[layout], **{"model": MODEL, **sections})
    arguments = (document, written.paths, STEPS, str(written.folder), more)
    return ranks.run(ParallelConfig(**ALL[layout]), load_from_memory, *arguments)


def elements(by_rank: list[RankOutcome], which: str = "loaded") -> Whole:
    """Layout-free tensors out of the parts of all ranks, which must agree where they overlap."""
    placed = [each for rank in by_rank for each in getattr(rank, which)]
    whole: Whole = {}
    for name, offsets, values in placed:
        ends = [at + n for at, n in zip(offsets, values.shape, strict=True)]
        size = [max(a, b) for a, b in zip(ends, whole[name].shape, strict=True)] if name in whole else ends
        larger = torch.full(size, float("nan"))
        if name in whole:
            larger[tuple(slice(0, n) for n in whole[name].shape)] = whole[name]
        where = tuple(slice(at, end) for at, end in zip(offsets, ends, strict=True))
        known = ~larger[where].isnan()
        assert torch.equal(larger[where][known], values.float()[known])
        larger[where] = values.float()
        whole[name] = larger
    assert not any(tensor.isnan().any() for tensor in whole.values())
    return whole


def assert_equal(first: Whole, second: Whole) -> None:
    """To the bit."""
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.fixture(scope="module")
def written(ranks, corpus, tmp_path_factory) -> dict[str, RankFiles]:
    """By layout: its snapshots after two steps."""
    folder = tmp_path_factory.mktemp("written")
    return {name: written_by(name, ranks, corpus, folder / name.replace(" ", "-")) for name in LAYOUTS}


PAIRS = [pair for pair in itertools.permutations(LAYOUTS, 2) if "1" in pair or "zb-v" in "".join(pair)]
IN_TURN = dict(zip(LAYOUTS, (*list(LAYOUTS)[3:], *list(LAYOUTS)[:3]), strict=True))
"""Each layout once as the old one and once as the new one."""


@pytest.mark.parametrize(
    ("old", "new"), [*IN_TURN.items(), *(pytest.param(*each, marks=pytest.mark.soak) for each in PAIRS)]
)
def test_parameters_and_moments_are_the_same_bits_in_every_layout(written, ranks, corpus, tmp_path, old, new):
    source = written[old].copied(tmp_path / "shared")
    by_rank = resharded(new, source, ranks, corpus)
    expected = elements(written[old].by_rank)
    assert_equal(elements(by_rank), expected)
    model = {name: tensor for name, tensor in expected.items() if name.startswith("model.")}
    assert_equal(elements(by_rank, "computing"), model)
    assert by_rank[0].rows == [1, 2], "the journal of the old rank 0 comes along"
    assert not any(rank.rows for rank in by_rank[1:])


def test_the_old_files_go_once_every_rank_has_a_snapshot_of_its_own(written, ranks, corpus, tmp_path):
    source = written["d3 small buckets"].copied(tmp_path / "shared")
    old = set(source.paths)
    by_rank = resharded("d2", source, ranks, corpus, more=1)
    assert all(len(rank.paths) == 2 and not old & set(rank.paths) for rank in by_rank)
    for path in source.paths:
        with_steps = SnapshotFile.open(Path(path))
        assert {with_steps.step(slot) for slot in range(2)} == {STEPS, STEPS + 1}
    again = resharded("1", source, ranks, corpus, more=1)
    assert again[0].statistics[0] == pytest.approx(by_rank[0].statistics[0], rel=1e-5), "and the curve goes on"


def test_masters_and_loss_scale_are_the_same_in_another_layout(ranks, corpus, tmp_path):
    train = {"precision": "fp16"}
    source = written_by("d2", ranks, corpus, tmp_path / "shared", train=train)
    by_rank = resharded("p2 interleaved d2 small buckets", source, ranks, corpus, train=train)
    assert_equal(elements(by_rank), elements(source.by_rank))
    assert all(rank.loss_scale == source.by_rank[0].loss_scale for rank in by_rank)
    assert source.by_rank[0].loss_scale[1] == STEPS


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("e2", "e3 t2 small buckets"),
        # Thirty pairs; the other four layouts are in the tests of checkpoints.
        *(pytest.param(*each, marks=pytest.mark.soak) for each in itertools.permutations([*EXPERTS][:6], 2)),
    ],
)
def test_spread_experts_and_routers_biases_are_the_same_in_another_layout(ranks, corpus, tmp_path, old, new):
    source = written_by(old, ranks, corpus, tmp_path / "shared", model=OF_EXPERTS)
    by_rank = resharded(new, source, ranks, corpus, model=OF_EXPERTS)
    assert_equal(elements(by_rank), elements(source.by_rank))
    assert any(source.by_rank[0].router_bias)
    assert all(rank.router_bias == source.by_rank[0].router_bias for rank in (*source.by_rank, *by_rank))


def test_missing_snapshot_file_is_replaced_by_that_of_another_replica(written, ranks, corpus, tmp_path):
    source = written["d2 zero 0"].copied(tmp_path / "shared")
    Path(source.paths[0]).unlink()
    assert_equal(elements(resharded("1", source, ranks, corpus)), elements(source.by_rank))


def failed(written: RankFiles, ranks: Any, corpus: str, step: int = STEPS) -> str:
    """The error of going on in another layout of two ranks, which leaves all ranks as they were."""
    document = job(corpus, LAYOUTS["d2"], model=MODEL)
    arguments = (document, written.paths, step, str(written.folder))
    by_rank = ranks.run(ParallelConfig(data=2), fail_to_load_from_memory, *arguments)
    kinds, messages, unchanged = (set(each) for each in zip(*by_rank, strict=True))
    assert unchanged == {True}
    assert len(kinds) == len(messages) == 1, "the same on every rank"
    return messages.pop()


def test_state_that_no_snapshot_file_holds_is_reported_missing(written, ranks, corpus, tmp_path):
    source = written["d3 small buckets"].copied(tmp_path / "shared")
    Path(source.paths[1]).unlink()
    message = failed(source, ranks, corpus)
    assert message.startswith(f"the snapshots of step {STEPS} do not hold all of ")
    assert message.endswith("which are of ranks [0, 2]")


def test_resharding_to_a_step_that_a_snapshot_file_lacks_names_file_and_step(written, ranks, corpus, tmp_path):
    source = written["t4"].copied(tmp_path / "shared")
    path = source.paths[0]
    assert failed(source, ranks, corpus, step=7) == f"{path} holds no snapshot of step 7"


@pytest.mark.parametrize("damage", ["flipped", "cut off"])
def test_resharding_from_a_damaged_snapshot_file_fails_with_the_damaged_byte(written, ranks, corpus, tmp_path, damage):
    source = written["t2 p2 zb-v d2"].copied(tmp_path / "shared")
    path = Path(source.paths[-1])
    file = SnapshotFile.open(path)
    at = file.form.payload_at(file.slot_of(STEPS))
    with path.open("r+b") as content:
        if damage == "flipped":
            content.seek(at + 100)
            content.write(bytes([file.memory[at + 100] ^ 4]))
        else:
            content.truncate(at + 100)
    where = at if damage == "flipped" else at + 100
    assert failed(source, ranks, corpus).startswith(f"the snapshot file {path} is damaged at byte {where}: ")


def load(paths: Any, step: int, rectangles: Any, length: int) -> ReshardedState:
    """Trained parameters alone."""
    lengths = dict.fromkeys(TRAINED, length) | {FROZEN: 0}
    return load_from_snapshots(paths, step, dict.fromkeys(TRAINED, rectangles) | {FROZEN: []}, lengths)


def test_loading_from_no_snapshot_files_is_refused():
    with pytest.raises(CheckpointError, match="no snapshot files to read step 3 from"):
        load([], 3, [], 5)


boxes = st.lists(st.tuples(st.integers(0, 6), st.integers(1, 5)), min_size=2, max_size=2).map(
    lambda pairs: (tuple(at for at, _ in pairs), tuple(n for _, n in pairs))
)


def cells(box: Any) -> set[tuple[int, ...]]:
    """Indices of all elements."""
    return set(itertools.product(*(range(at, at + n) for at, n in zip(*box, strict=True))))


@given(boxes, boxes)
def test_box_divides_into_its_intersection_with_another_and_the_rest(first, second):
    common = intersection(first, second)
    assert (cells(common) if common else set()) == cells(first) & cells(second)
    if common:
        left = rest(first, common)
        assert set().union(*(cells(box) for box in left)) == cells(first) - cells(second)
        assert sum(math.prod(box[1]) for box in left) == len(cells(first) - cells(second)), "no overlap"


TRAINED = ("model", *OptimizerConfig().moments)
"""Names of the parts of trained parameters."""
WEIGHT = Rectangle("weight", (2, 3), (0, 0), (2, 3), 0, 3)


def one_weight(folder: Path, note: bytes = b"") -> Snapshots:
    """Snapshots of a rank that has nothing else; that of step 7 is there, with this note."""
    parts = {kind: {"at": 24 * number, "length": 6, "dtype": "float32"} for number, kind in enumerate(TRAINED)}
    parts["loss_scale"] = {"at": 72, "length": 2, "dtype": "float32"}
    table = {"rank": 0, "parts": parts, "pieces": [astuple(WEIGHT)]}
    snapshots = Snapshots(folder, 0, parts_of([torch.ones(6), torch.ones(12), torch.ones(2)]), b"0" * 16, table=table)
    snapshots.save(7, note)
    snapshots.wait_for_sums()
    return snapshots


def test_a_step_that_is_overwritten_while_it_is_read_is_refused(tmp_path):
    """Its sums do not tell where the content is the same: what was read may be of both steps."""
    snapshots = one_weight(tmp_path)

    def rectangles(overwrites: int) -> Any:
        yield WEIGHT
        for step in range(8, 8 + overwrites):
            snapshots.save(step)

    read = load([snapshots.path], 7, rectangles(1), 6)
    assert read.parts["exp_avg"].tolist() == [1.0] * 6
    with pytest.raises(CheckpointError, match="was overwritten while step 7 was being read"):
        load([snapshots.path], 7, rectangles(2), 6)


def test_damaged_note_is_refused(tmp_path):
    snapshots = one_weight(tmp_path, b"a note")
    assert load([snapshots.path], 7, [WEIGHT], 6).note == b"a note"
    file = snapshots._file
    file.memory[file.form.note_at(file.slot_of(7)) + 8] ^= 1
    with pytest.raises(CheckpointError, match="are not what was written"):
        load([snapshots.path], 7, [WEIGHT], 6)


@pytest.mark.parametrize("shape", [(2, 2), (1, 3)])
def test_a_larger_model_s_parameters_are_not_taken_in_part(tmp_path, shape):
    smaller = Rectangle("weight", shape, (0, 0), shape, 0, shape[1])
    with pytest.raises(CheckpointError, match=r"are of another model: weight should be .*, found \(2, 3\)"):
        load([one_weight(tmp_path).path], 7, [smaller], 6)


@pytest.mark.parametrize(
    "table",
    [{}, {"rank": 0, "parts": {}}, {"rank": 0, "parts": {}, "pieces": [1]}, {"rank": 0, "parts": {}, "pieces": [[1]]}],
)
def test_snapshot_file_without_a_valid_table_is_refused_by_name(tmp_path, table):
    snapshots = Snapshots(tmp_path, 0, parts_of([torch.ones(6), torch.ones(12), torch.ones(2)]), b"0" * 16, table=table)
    snapshots.save(7)
    snapshots.wait_for_sums()
    with pytest.raises(CheckpointError, match=f"{snapshots.path} does not say what it consists of"):
        load([snapshots.path], 7, [Rectangle("weight", (2, 3), (0, 0), (2, 3), 0, 3)], 6)


@pytest.mark.parametrize(("layout", "named"), [("d2", [0, 1]), ("d2 zero 0", [0, 0]), ("t4", [0, 1, 2, 3])])
def test_snapshot_file_table_names_the_first_rank_with_the_same_state(written, layout, named):
    """Where the node of rank 0 is lost its replica stands in for it, with the note that only rank 0's file has."""
    tables = []
    for path in written[layout].paths:
        with contextlib.closing(SnapshotFile.open(Path(path), mmap.ACCESS_COPY)) as file:
            tables.append(file.table()["rank"])
    assert tables == named


@pytest.mark.parametrize("first", [0, 1])
def test_the_note_is_that_of_rank_0_in_whichever_order_the_files_are_given(written, first):
    paths = written["t4"].paths
    loaded = load([*paths[first:], *paths[:first]], STEPS, [], 0)
    rows, _ = read_note(loaded.note)
    assert [row["step"] for row in rows] == [1, 2]
