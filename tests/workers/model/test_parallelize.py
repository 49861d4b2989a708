"""Which parts of the model a rank holds, and who has which copy of a tied embedding."""

from __future__ import annotations

import pytest
from engine_specs import spec
from one_layer import lone_rank

from manta.workers.model.stage import TOKEN_EMBEDDING, ModelStage


def stages(**sections) -> list[ModelStage]:
    """Of each pipeline rank."""
    job = spec(
        model={"layers": 6, "hidden_size": 16, **sections.pop("model", {})}, train={"global_batch_size": 6}, **sections
    )
    return [ModelStage(job, lone_rank(job, rank)) for rank in range(job.layout.pipeline)]


@pytest.mark.parametrize(
    ("parallel", "reading"),
    [
        ({"pipeline": 3}, [True, False, True]),
        ({"pipeline": 3, "schedule": "zb-v", "virtual_stages": 2}, [True, False, False]),
        ({"pipeline": 3, "schedule": "interleaved", "virtual_stages": 2}, [True, False, True]),
        ({}, [True]),
    ],
    ids=str,
)
def test_text_is_read_where_tokens_go_in_and_where_the_loss_comes_out(parallel, reading):
    assert [stage.reads_tokens for stage in stages(parallel=parallel)] == reading


def test_every_layer_is_somewhere_under_its_name_in_the_whole_model():
    names = [shard.name for stage in stages(parallel={"pipeline": 3}) for shard in stage.named_shards()]
    layers = [name.split(".")[1] for name in names if name.endswith("mlp.up.weight")]
    assert layers == ["0", "1", "2", "3", "4", "5"]
    assert len([name for name in names if name == TOKEN_EMBEDDING]) == 2, "an original and a copy"
    others = [name for name in names if name != TOKEN_EMBEDDING]
    assert len(set(others)) == len(others)


def test_a_tied_embedding_is_one_weight_where_both_ends_are_on_a_rank():
    (alone,) = stages()
    assert alone.used_twice is alone.chunks[0].embedding.token.weight is alone.chunks[0].output.weight
    shards = alone.named_shards()
    assert [shard.name for shard in shards].count(TOKEN_EMBEDDING) == 1
    assert len({id(shard.parameter) for shard in shards}) == len(shards), "it is updated and saved once"
    first, last = stages(parallel={"pipeline": 2, "schedule": "zb-v", "virtual_stages": 2})
    assert first.used_twice is first.chunks[1].output.weight
    assert last.used_twice is None


def test_tied_embedding_on_two_stages_has_its_original_on_the_first():
    tied = [
        [(shard.shard.tied_across_stages, shard.shard.shared_copy) for shard in stage.named_shards()
         if shard.name == TOKEN_EMBEDDING]
        for stage in stages(parallel={"pipeline": 2})
    ]  # fmt: skip
    assert tied == [[(True, False)], [(True, True)]]


def test_untied_embedding_and_output_are_two_tables():
    first, last = stages(model={"tie_embeddings": False}, parallel={"pipeline": 2})
    assert first.used_twice is None
    assert "output.weight" in [shard.name.split("chunks.")[-1] for shard in last.named_shards()]
    assert not any(shard.shard.tied_across_stages for stage in (first, last) for shard in stage.named_shards())
