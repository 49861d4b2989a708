"""Chats fine-tune adapters of a Hugging Face model; a rank dies, the size changes, and others load the result."""

import json
import os
import random
import subprocess
import sys

import pytest
import torch

STEPS = 30
CONFIG = {
    "vocab_size": 320, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """The folder of a small Llama, and a file of chats."""
    transformers = pytest.importorskip("transformers")
    folder, numbers = tmp_path_factory.mktemp("base"), random.Random(0)
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG)).save_pretrained(folder / "llama")
    pairs = [(numbers.randrange(100), numbers.randrange(100)) for _ in range(400)]
    chats = [
        {"messages": [{"role": "user", "content": f"{a} + {b}?"}, {"role": "assistant", "content": str(a + b)}]}
        for a, b in pairs
    ]
    (folder / "chats.jsonl").write_text("".join(f"{json.dumps(chat)}\n" for chat in chats))
    return folder


def job_of(manta, base, data):
    """Adapters at tensor 2 x context 2, with one or two replicas, which say the same whatever their number."""
    train = {
        "deterministic": "elastic",
        "micro_batch_size": 2,
        "lora": {"rank": 4},
        "optimizer": {"learning_rate": 1e-3},
    }
    job = manta.spec(STEPS, (2, 1, data), train=train, checkpoint={"every_steps": 10})
    job["parallel"]["context"] = 2
    job["model"] = {"from": str(base / "llama"), "sequence_length": 64}
    job["data"] = {"source": "chat", "paths": [str(base / "chats.jsonl")], "template": "chatml"}
    return job | {"elastic": {"min_data": 1, "max_data": 2}}


def exported(manta, job, folder, *options):
    command = [sys.executable, "-m", "manta.api.cli", "export", job, "--to", str(folder), *options]
    subprocess.run(command, env={**os.environ, "MANTA_HOME": str(manta.home)}, check=True, timeout=300)
    return folder


def test_adapters_are_trained_through_a_death_and_a_resize_and_loaded_by_peft(manta, base, kill, tmp_path):
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    job = manta.submit_held(job_of(manta, base, 1), rank=0, step=6)
    kill(manta.pids(job)[3])
    manta.until_recovered(job, 1)
    manta.client.resize(job, 2)
    manta.until("two replicas", lambda: manta.client.job(job).parallel["data"] == 2)
    manta.release_job(job, 0)
    ended = manta.until_state(job, "SUCCEEDED")
    assert (ended.restarts, ended.parallel["context"]) == (1, 2)
    saved = [row.bytes for row in manta.client.checkpoints(job).items if row.bytes]
    assert saved and max(saved) < 1_000_000, "checkpoints do not repeat the frozen weights"
    manta.succeeded(manta.submit(job_of(manta, base, 1)), manta.curve(job))

    load = transformers.AutoModelForCausalLM.from_pretrained
    adapter = exported(manta, job, tmp_path / "adapter", "--adapter")
    adapted = peft.PeftModel.from_pretrained(load(base / "llama"), adapter)
    merged, tokens = load(exported(manta, job, tmp_path / "merged", "--format", "hf")), torch.arange(48).view(1, -1)
    with torch.no_grad():
        logits, before = adapted(tokens).logits, load(base / "llama")(tokens).logits
        torch.testing.assert_close(merged(tokens).logits, logits, atol=1e-5, rtol=1e-5)
    assert (logits - before).abs().max() > 1e-2
