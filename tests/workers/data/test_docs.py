"""What docs/data.md and docs/training.md say to run on conversations and Megatron-LM's datasets, and the examples of
jobs."""

from __future__ import annotations

import json
import re

import pytest
import yaml
from documented import ROOT, blocks_of, run_blocks
from engine_specs import document

from manta.workers.data.chat_template import conversation_in
from manta.workers.spec.reading import load_job_spec, parse_job_spec

CHAT = blocks_of("training.md", "Fine-tune on chat data")
MEGATRON = blocks_of("data.md", "To and from Megatron-LM")


@pytest.mark.parametrize("path", sorted(ROOT.glob("examples/*.yaml")), ids=lambda path: path.stem)
def test_example_jobs_are_valid_specs(path):
    assert load_job_spec(path).name == path.stem


@pytest.mark.parametrize("block", [text for kind, text in [*CHAT, *MEGATRON] if kind == "yaml"])
def test_jobs_in_the_pages_are_valid_specs(block):
    job = yaml.safe_load(block)
    # Of weights the shape is in their folder.
    shape = {"layers": 4, "hidden_size": 64, "heads": 4, "vocabulary_size": 320, **job.pop("model")}
    shape.pop("from", None)
    assert parse_job_spec({**document(), **job, "model": shape}).name == job["name"]


def test_conversation_shown_in_the_page_is_valid():
    ((_, row),) = [block for block in blocks_of("data.md", "Conversations") if block[0] == "json"]
    assert [each["role"] for each in conversation_in(json.loads(row), "messages", "the page").messages] == [
        "user", "assistant",
    ]  # fmt: skip


@pytest.mark.soak
def test_a_model_is_fine_tuned_on_conversations_as_the_page_says(tmp_path):
    transformers = pytest.importorskip("transformers")
    _, trained, used = run_blocks(CHAT, tmp_path)
    losses = [float(each) for each in re.findall(r"  loss (\S+)", trained)]
    assert losses[-1] < 0.5 * losses[0]
    assert re.search(r"^conversations +200$", used, re.M)
    assert "What comes after 41?\n" in used
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "exported")
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": "a"}], tokenize=False, add_generation_prompt=True
    )
    assert asked == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.soak
def test_tokens_are_converted_for_megatron_and_read_back_as_the_page_says(tmp_path):
    assert "step 20/20" in run_blocks(MEGATRON, tmp_path)[-1]
