"""A Mixtral of Hugging Face is trained with its experts spread over ranks, through a death and a resize, and others
load the result."""

import json
import os
import subprocess
import sys

import pytest
import torch

from tests.e2e.manta import EVERY_STEP, PAIR
from tests.e2e.test_fine_tuning import CONFIG, exported

STEPS = 30
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}


def test_spread_experts_outlive_a_death_and_a_resize_and_are_loaded_by_transformers(manta, kill, tmp_path):
    """The only rank that has its experts dies: no bit changes. With twice as many ranks sums are rounded otherwise."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    transformers.MixtralForCausalLM(transformers.MixtralConfig(**CONFIG, **EXPERTS)).save_pretrained(tmp_path / "base")
    document = manta.spec(STEPS, PAIR, train={"micro_batch_size": 2}, elastic={"max_data": 4})
    document["model"] = {"from": str(tmp_path / "base"), "sequence_length": 32, "moe": {"balance": {"bias_rate": 0.0}}}
    document["parallel"]["expert"] = 2
    document["checkpoint"] = EVERY_STEP | {"every_steps": STEPS}
    job = manta.submit_held(document, rank=0, step=6)
    kill(manta.pids(job)[1])
    manta.until_recovered(job, 1)
    manta.client.resize(job, 4)
    manta.until("four replicas", lambda: manta.client.job(job).parallel["data"] == 4)
    manta.release_job(job, 0)
    ended = manta.until_state(job, "SUCCEEDED")
    assert (ended.restarts, ended.parallel["expert"], manta.events(job, "experts_unbalanced")) == (1, 2, [])
    resized = manta.events(job, "generation_started")[-1].data["resume_step"]
    curve, clean = manta.curve(job), manta.submit(document)
    manta.until_state(clean, "SUCCEEDED")
    undisturbed = manta.curve(clean)
    assert 7 <= resized < STEPS and curve[:resized] == undisturbed[:resized]
    assert [loss for _, loss, _ in curve] == pytest.approx([loss for _, loss, _ in undisturbed], rel=1e-3)

    text = tmp_path / "text"
    text.write_bytes(bytes(range(90, 123)))
    command = [sys.executable, "-m", "manta.api.cli", "evaluate", job, "--text", str(text), "--json"]
    environment = {**os.environ, "MANTA_HOME": str(manta.home)}
    said = subprocess.run(command, env=environment, check=True, timeout=300, capture_output=True).stdout
    folder = exported(manta, job, tmp_path / "exported", "--format", "hf")
    tokens = torch.tensor([[*text.read_bytes()]])
    with torch.no_grad():
        logits = transformers.AutoModelForCausalLM.from_pretrained(folder)(tokens[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(logits[0], tokens[0, 1:]).item()
    assert json.loads(said)["loss"] == pytest.approx(loss, rel=1e-5)
