"""Any of seventeen layouts reads what any other wrote: parameters and moments to the bit; also with experts that are
spread over ranks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_programs import EXPERTS, OF_EXPERTS, SMALL, Placed, RankOutcome, job, load_and_save, train_and_save
from torch_reader import metadata_by_torch, state_by_torch

from manta.workers.checkpoint import durable
from manta.workers.checkpoint.catalog import complete_checkpoints, manifest_of, verify
from manta.workers.checkpoint.durable import Rectangle, rectangles_of
from manta.workers.comm.comm import Comm
from manta.workers.comm.grid import RankGrid
from manta.workers.config import OptimizerConfig, ParallelConfig
from manta.workers.engine import Engine
from manta.workers.spec.reading import parse_job_spec

LAYOUTS: dict[str, dict[str, Any]] = {
    "1": {},
    "t2 without sequence parallelism": {"tensor": 2, "sequence_parallel": False},
    "t4": {"tensor": 4},
    "p2 gpipe": {"pipeline": 2, "schedule": "gpipe"},
    "p4 1f1b": {"pipeline": 4},
    "d2 zero 0": {"data": 2, "zero": 0},
    "d3 small buckets": {"data": 3, **SMALL},
    "t2 d3 zero 3": {"tensor": 2, "data": 3, "zero": 3},
    "c2 d2 zero 2": {"context": 2, "context_method": "all_to_all", "data": 2, "zero": 2},
    "p2 interleaved d2 small buckets": {
        "pipeline": 2, "schedule": "interleaved", "virtual_stages": 2, "data": 2, **SMALL,
    },
    "t2 p2 zb-v d2": {"tensor": 2, "pipeline": 2, "schedule": "zb-v", "virtual_stages": 2, "data": 2},
    "p2 zb-h1 d3 small buckets": {"pipeline": 2, "schedule": "zb-h1", "data": 3, **SMALL},
    "t2 p2 d2 zero 0 small buckets": {"tensor": 2, "pipeline": 2, "data": 2, "zero": 0, **SMALL},
    "t4 p2 zb-h1": {"tensor": 4, "pipeline": 2, "schedule": "zb-h1"},
    "c2 d2 small buckets": {"context": 2, "context_method": "ring", "data": 2, **SMALL},
    "c4 zero 0": {"context": 4, "zero": 0},
    "p2 d2, one layer and three": {"pipeline": 2, "data": 2, "stage_layers": [1, 3]},
}  # fmt: skip
ALL = LAYOUTS | EXPERTS
WRITER = "t2 p2 zb-v d2"
SAVED_STEP = 2
GOING_ON = (
    "1",
    "t4",
    "p2 d2, one layer and three",
    "t2 d3 zero 3",
    "c2 d2 zero 2",
    "c4 zero 0",
    "p2 interleaved d2 small buckets",
    "p2 zb-h1 d3 small buckets",
)
TIED = {"hidden_size": 16, "bias": False}
PARTS = ("model", *OptimizerConfig().moments)
UNTIED = {"hidden_size": 16, "tie_embeddings": False, "kv_heads": 1, "vocabulary_size": 263}
Whole = dict[str, torch.Tensor]


@dataclass
class RankFiles:
    """A checkpoint and what is in it."""

    path: Path
    content: Whole
    """Layout-free tensors, by torch's own reader."""


@dataclass
class Resaved:
    """What a layout made of a checkpoint."""

    path: Path
    """The checkpoint that it saved in turn."""
    by_rank: list[RankOutcome]
    """What each of its ranks saw."""


def newest(folder: Path) -> Path:
    """The newest whole checkpoint."""
    return complete_checkpoints(folder)[-1][0]


@pytest.fixture(scope="module")
def first(ranks, corpus, tmp_path_factory) -> RankFiles:
    """A checkpoint after two steps in one layout."""
    return written_by(WRITER, TIED, ranks, corpus, tmp_path_factory.mktemp("first"))


@pytest.fixture(scope="module")
def resaved(first, ranks, corpus, tmp_path_factory) -> dict[str, Resaved]:
    """By layout: what it made of the first checkpoint."""
    folder = tmp_path_factory.mktemp("resaved")
    return {name: resaved_by(name, TIED, first.path, ranks, corpus, folder / name) for name in LAYOUTS}


def written_by(layout: str, model: dict[str, Any], ranks: Any, corpus: str, folder: Path, **train: Any) -> RankFiles:
    """Train from the start in one layout, and save."""
    document = job(corpus, ALL[layout], model=model, train=train)
    by_rank = ranks.run(ParallelConfig(**ALL[layout]), train_and_save, document, str(folder), SAVED_STEP)
    written = RankFiles(newest(folder), content_of(newest(folder)))
    assert_is(written.content, (each for rank in by_rank for each in rank.loaded))
    assert all(tensor.count_nonzero() for tensor in state_by_torch(written.path).values()), "all has been trained"
    return written


def resaved_by(
    layout: str, model: dict[str, Any], path: Path, ranks: Any, corpus: str, folder: Path, **train: Any
) -> Resaved:
    """Load in another layout, and save from there."""
    document, more = job(corpus, ALL[layout], model=model, train=train), int(layout in (*GOING_ON, *EXPERTS))
    arguments = (document, str(path), SAVED_STEP, str(folder), more)
    by_rank = ranks.run(ParallelConfig(**ALL[layout]), load_and_save, *arguments)
    return Resaved(newest(folder), by_rank)


def content_of(path: Path) -> Whole:
    """A checkpoint's tensors by torch's own reader, with those that it refers to. Each element is written once."""
    frozen, content = manifest_of(path).frozen, {}
    for each in (path, path.parent / frozen.folder) if frozen else (path,):
        content |= state_by_torch(each)
        for name, entry in metadata_by_torch(each).state_dict_metadata.items():
            assert sum(chunk.sizes.numel() for chunk in entry.chunks) == entry.size.numel(), name
    return content


def assert_is(content: Whole, parts: Iterable[Placed]) -> None:
    """`parts` are parts of `content`, to the bit, and together all of it."""
    missing = {name: torch.ones(tensor.shape, dtype=torch.bool) for name, tensor in content.items()}
    for name, offsets, values in parts:
        where = tuple(slice(a, a + n) for a, n in zip(offsets, values.shape, strict=True))
        assert torch.equal(content[name][where], values), name
        missing[name][where] = False
    assert not any(tensor.any() for tensor in missing.values())


def assert_kept(written: RankFiles, resaved: Resaved) -> None:
    """All that was read, computed with and saved is what was written, to the bit."""
    assert_is(written.content, (each for rank in resaved.by_rank for each in rank.loaded))
    model = {name: tensor for name, tensor in written.content.items() if name.startswith("model.")}
    assert_is(model, (each for rank in resaved.by_rank for each in rank.computing))
    manifest = verify(resaved.path)
    assert manifest.blocks is not None
    assert manifest.files.keys() == manifest.blocks.keys()
    saved = content_of(resaved.path)
    assert saved.keys() == written.content.keys()
    assert all(torch.equal(saved[name], tensor) for name, tensor in written.content.items())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_state_loaded_and_saved_by_every_layout_is_bit_equal(first, resaved, layout):
    assert_kept(first, resaved[layout])


@pytest.mark.parametrize(
    "distances", [pytest.param((5,), id="each from another"), pytest.param(range(17), id="all", marks=pytest.mark.soak)]
)
def test_checkpoint_of_any_layout_is_read_bit_for_bit_by_any_other(first, resaved, corpus, distances):
    """Each layout reads what those so far behind it in the list wrote; `all` are 289 pairs. The writers are those of
    the test above, where each wrote in its own processes what it had loaded; here each rank of each reader loads all
    that it would need, by itself, as it does in a restore."""
    names = list(LAYOUTS)
    assert len(names) == 17
    for place, name in enumerate(names):
        readers = set(readers_of(job(corpus, LAYOUTS[name], model=TIED)))
        for writer in (names[place - distance] for distance in distances):
            for rectangles, length in readers:
                wanted, lengths = (dict.fromkeys(PARTS, value) for value in (rectangles, length))
                _, parts = durable.load(str(resaved[writer].path), wanted, lengths)
                for kind, part in parts.items():
                    for rectangle in rectangles:
                        where = tuple(slice(a, a + n) for a, n in zip(rectangle.offsets, rectangle.sizes, strict=True))
                        assert torch.equal(rectangle.view(part), first.content[f"{kind}.{rectangle.name}"][where])


@pytest.mark.parametrize(
    "chain",
    [
        ("d3 small buckets", "t2 p2 d2 zero 0 small buckets", "1"),
        pytest.param(("p4 1f1b", "d3 small buckets", "t2 p2 d2 zero 0 small buckets", "1"), marks=pytest.mark.soak),
    ],
    ids=["short", "long"],
)
def test_untied_embeddings_and_biases_are_bit_equal_over_a_chain_of_layouts(ranks, corpus, tmp_path, chain):
    """In a chain: each layout reads what the one before it wrote."""
    written = written_by(WRITER, UNTIED, ranks, corpus, tmp_path / "first")
    path = written.path
    for layout in chain:
        resaved = resaved_by(layout, UNTIED, path, ranks, corpus, tmp_path / layout)
        assert_kept(written, resaved)
        path = resaved.path


def test_frozen_weights_in_units_are_written_once_and_read_bit_for_bit_by_other_layouts(ranks, corpus, tmp_path):
    train = {"lora": {"rank": 3}}
    written = written_by("t2 d3 zero 3", TIED, ranks, corpus, tmp_path, **train)
    for layout in ("c2 d2 zero 2", "p2 interleaved d2 small buckets"):
        resaved = resaved_by(layout, TIED, written.path, ranks, corpus, tmp_path, **train)
        assert_kept(written, resaved)
        assert manifest_of(resaved.path).frozen == manifest_of(written.path).frozen is not None
        assert resaved.path != written.path


def test_state_with_spread_experts_is_bit_equal_over_a_chain_of_layouts(ranks, corpus, tmp_path):
    """Weights, moments and the routers' bias; and all go on alike."""
    first = written_by("e3 t2 small buckets", OF_EXPERTS, ranks, corpus, tmp_path / "first")
    path, bias, numbers = first.path, manifest_of(first.path).small["router_bias"], {}
    assert any(bias)
    for layout in EXPERTS:
        resaved = resaved_by(layout, OF_EXPERTS, path, ranks, corpus, tmp_path / layout)
        assert_kept(first, resaved)
        path, numbers[layout] = resaved.path, [rank.statistics[0] for rank in resaved.by_rank]
        assert manifest_of(path).small["router_bias"] == bias
    expected = numbers["e1"][0]
    assert all(each == pytest.approx(expected, rel=1e-5) for of_layout in numbers.values() for each in of_layout)


@pytest.mark.soak
@pytest.mark.parametrize("writer", EXPERTS)
def test_state_of_spread_experts_in_any_layout_is_read_by_any_other(ranks, corpus, tmp_path, writer):
    first = written_by(writer, OF_EXPERTS, ranks, corpus, tmp_path / "first")
    bias = manifest_of(first.path).small["router_bias"]
    for layout in EXPERTS:
        resaved = resaved_by(layout, OF_EXPERTS, first.path, ranks, corpus, tmp_path / layout)
        assert_kept(first, resaved)
        assert bias == manifest_of(resaved.path).small["router_bias"]
        assert all(rank.router_bias == bias for rank in resaved.by_rank) and any(bias)


def test_frozen_spread_experts_are_written_once_and_read_by_other_layouts(ranks, corpus, tmp_path):
    train = {"frozen": ["layers.1.mlp.experts", "layers.0"]}
    written = written_by("e2 d4 zero 0 small buckets", OF_EXPERTS, ranks, corpus, tmp_path / "first", **train)
    for layout in ("e3 d6", "e6 t2 d3, whole experts"):
        resaved = resaved_by(layout, OF_EXPERTS, written.path, ranks, corpus, tmp_path / layout, **train)
        assert_kept(written, resaved)


def readers_of(document: dict[str, Any]) -> list[tuple[tuple[Rectangle, ...], int]]:
    """For each rank of a layout: the rectangles of its state, and its length."""
    spec, readers = parse_job_spec(document), []
    for rank in range(spec.layout.world_size):
        engine = Engine(spec, Comm(RankGrid(spec.layout), rank, torch.device("cpu")))
        held, index = engine.optimizer.held, engine.comm.index("tensor")
        rectangles = rectangles_of(engine.flat, held, held, owned_only=False, tensor_index=index)
        readers.append((tuple(rectangles), engine.optimizer.length))
    return readers


def test_layouts_of_these_tests_divide_the_saved_state_in_at_least_7_ways(resaved):
    """Else the tests above prove less than they say."""
    cuts = set()
    for each in resaved.values():
        entries = metadata_by_torch(each.path).state_dict_metadata
        cuts.add(frozenset((name, chunk.offsets, chunk.sizes) for name in entries for chunk in entries[name].chunks))
    assert len(cuts) >= 7, "tensor 1, 2, 4 and their combinations with data 2, 3 and small buckets"


def test_training_from_one_checkpoint_continues_alike_in_every_layout(resaved):
    steps = {layout: [rank.statistics for rank in resaved[layout].by_rank] for layout in GOING_ON}
    ((expected,),) = steps["1"]
    for ranks in steps.values():
        assert all(rank == ranks[0] for rank in ranks)
        assert ranks[0][0] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_masters_moments_and_the_loss_scale_survive_a_change_of_layout(ranks, corpus, tmp_path, precision):
    writer, *readers = (LAYOUTS[name] for name in ("p2 interleaved d2 small buckets", "t2 p2 zb-v d2", "d2 zero 0"))
    train = {"precision": precision}
    document = job(corpus, writer, model=TIED, train=train)
    ranks.run(ParallelConfig(**writer), train_and_save, document, str(tmp_path / "first"), SAVED_STEP)
    path = newest(tmp_path / "first")
    content, loss_scale = state_by_torch(path), manifest_of(path).loss_scale
    assert (loss_scale is not None) == (precision == "fp16")
    model = {name: tensor for name, tensor in content.items() if name.startswith("model.")}
    rounded = {
        name: tensor.to({"bf16": torch.bfloat16, "fp16": torch.float16}[precision]) for name, tensor in model.items()
    }
    assert not any(torch.equal(rounded[name].float(), tensor) for name, tensor in model.items() if tensor.dim() == 2)
    for number, parallel in enumerate(readers):
        document, folder = job(corpus, parallel, model=TIED, train=train), tmp_path / str(number)
        arguments = (document, str(path), SAVED_STEP, str(folder), 1)
        by_rank = ranks.run(ParallelConfig(**parallel), load_and_save, *arguments)
        assert_is(content, (each for rank in by_rank for each in rank.loaded))
        assert_is(rounded, (each for rank in by_rank for each in rank.computing))
        assert all(rank.loss_scale == (loss_scale or [1.0, 0.0]) for rank in by_rank)
        path = newest(folder)
        saved = state_by_torch(path)
        assert all(torch.equal(saved[name], tensor) for name, tensor in content.items())
        assert manifest_of(path).loss_scale == loss_scale
