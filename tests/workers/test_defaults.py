"""What a job does of whose spec its user says nothing: a default that changes, changes the jobs of everybody."""

from __future__ import annotations

from typing import Any

import yaml
from engine_specs import TINY

from manta.workers.spec.reading import parse_job_spec

DEFAULTS = """
name: job
model: {family: gpt, bias: true, tie_embeddings: true, activation: gelu, norm_epsilon: 1.0e-5}
data: {documents: together, tokenizer: bytes, validation_fraction: 0.05}
train: {global_batch_size: 16, micro_batch_size: 1, seed: 1234, deterministic: layout, precision: fp32, fp8: "off",
        attention: auto, validation_batches: 8, time_parts_every: 10,
        optimizer: {name: adamw, learning_rate: 1.0e-3, min_learning_rate: 1.0e-4, schedule: cosine,
                    decay_shape: linear, weight_decay: 0.1, weight_decay_groups: [linear, embedding],
                    beta1: 0.9, beta2: 0.95, epsilon: 1.0e-8, clip_norm: 1.0}}
parallel: {tensor: 1, pipeline: 1, data: 1, context: 1, virtual_stages: 1, schedule: 1f1b, forward_chunks: 1,
           recompute: none, recompute_modules: [core_attention], recompute_every: 1, zero: 1, bucket_megabytes: auto,
           gather: after_update}
resources: {accelerator: auto, threads: auto}
checkpoint: {every_steps: 50, keep: 3, snapshots: auto, snapshot_every_steps: auto}
recovery: {nonfinite: fail, spike: {policy: ignore, window: 50, loss_deviations: 8.0, grad_norm_deviations: 20.0},
           roll_back_steps: 10, max_roll_backs: 10, check_replicas_every: 100, stragglers: report, max_restarts: 20,
           restart_window_seconds: 86400.0}
"""
"""Keys that are left out are off, none, or 0."""


def without_nothings(section: dict[str, Any]) -> dict[str, Any]:
    """`section` and those below it without keys whose value is off, none, 0 or empty."""
    parts = {key: without_nothings(value) if isinstance(value, dict) else value for key, value in section.items()}
    return {key: value for key, value in parts.items() if value}


def test_a_job_whose_user_says_nothing_has_the_defaults():
    said = {section: TINY[section] for section in ("model", "data")} | {"train": {"steps": 1}}
    spec = parse_job_spec(said).model_dump(mode="json")
    for section, keys in said.items():
        for key in keys:
            del spec[section][key]
    assert without_nothings(spec) == yaml.safe_load(DEFAULTS)
