"""What docs/models.md says to run, as it is written there."""

from __future__ import annotations

import pytest
import yaml
from documented import blocks_of, run_blocks
from engine_specs import document

from manta.workers.spec.reading import parse_job_spec

BLOCKS = blocks_of("models.md")


@pytest.mark.parametrize("block", [text for kind, text in BLOCKS if kind == "yaml" and not text.startswith("#")])
def test_the_examples_of_families_are_specs(block):
    spec = parse_job_spec({**document(), **yaml.safe_load(block)})
    assert spec.model.family in block


@pytest.mark.soak
def test_weights_go_in_and_out_as_the_page_says(tmp_path):
    pytest.importorskip("transformers")
    ran = run_blocks(BLOCKS, tmp_path)
    assert "step 4/4" in ran[2]
    assert "has the weights of" in ran[3]
    assert (tmp_path / "exported" / "model.safetensors").exists()
