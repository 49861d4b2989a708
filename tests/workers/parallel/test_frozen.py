"""Parameters that are not trained, under every layout: what torch does with `requires_grad` False, in fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine_specs import axes, document
from plain_gpt import NO_TARGET, PlainGPT, random_weights
from rank_programs import assemble, light, run_steps

from manta.workers.spec.parameters import frozen_names
from manta.workers.spec.reading import parse_job_spec
from manta.workers.training.learning_rate import learning_rate

STEPS = 2
FROZEN: dict[str, list[str]] = {
    "embedding": ["embedding"],
    "the first layers": ["embedding", "layers.0-1"],
    "all but the end": ["embedding", "layers"],
    "parts of all layers": ["*.mlp", "layers.2-9.attention.output"],
    "norms and biases": ["*norm", "*.bias"],
    "what is in the middle": ["layers.1-2"],
    "the end": ["layers.3", "final_norm"],
    "positions and a weight": ["embedding.position", "layers.0.attention.qkv.weight", "layers.3.mlp.down.bias"],
}
LAYOUTS: list[tuple[tuple[int, int, int], dict[str, Any]]] = [
    ((1, 1, 1), {}),
    ((2, 2, 2), {"recompute": "full"}),
    ((2, 2, 1), {"schedule": "zb-v", "virtual_stages": 2, "recompute": "selective", "recompute_modules": ["norm"]}),
    ((1, 4, 1), {"schedule": "1f1b"}),
    ((1, 2, 2), {"schedule": "interleaved", "virtual_stages": 2, "zero": 0}),
    ((2, 1, 1), {"sequence_parallel": False, "recompute": "selective", "recompute_modules": ["mlp_activation"]}),
    ((1, 1, 3), {"zero": 1}),
    ((1, 4, 2), {"schedule": "zb-h1"}),
]
HALVES = {((2, 2, 2), True, "layout"): slice(0, None, 2), ((2, 2, 1), True, "layout"): slice(1, None, 2)}
"""What is not for the soak: which of FROZEN under which layout, tied or not."""


def job(frozen: list[str], layout: tuple[int, int, int] = (1, 1, 1), tied: bool = False, **sections: Any) -> dict:
    """A few large steps; what is not frozen is decayed too."""
    optimizer = {"learning_rate": 1e-2, "weight_decay": 1.0, "clip_norm": 0.5}
    return document(
        model={"layers": 4, "hidden_size": 16, "tie_embeddings": tied},
        train={"steps": STEPS, "frozen": frozen, "optimizer": optimizer, **sections.get("train", {})},
        parallel={**axes(layout), "bucket_megabytes": 0.002, **sections.get("parallel", {})},
    )


def batches() -> list[torch.Tensor]:
    """Global batches [B, 9], one position without a target."""
    windows = torch.randint(256, (STEPS, 12, 9), generator=torch.Generator().manual_seed(3))
    windows[1, 0, 4] = NO_TARGET
    return list(windows)


def plain_run(document: dict) -> tuple[dict[str, torch.Tensor], list[float], list[float]]:
    """(Parameters, losses, gradient norms) of the same job as a plain loop in fp64."""
    spec = parse_job_spec(document)
    config, frozen = spec.train.optimizer, frozen_names(spec)
    model = PlainGPT(spec).double().load(random_weights(spec))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [{"params": [p], "weight_decay": config.weight_decay if p.dim() > 1 else 0.0} for p in trained]
    optimizer = torch.optim.AdamW(groups, betas=(config.beta1, config.beta2), eps=config.epsilon, foreach=False)
    losses, norms = [], []
    for step, windows in enumerate(batches(), start=1):
        optimizer.zero_grad()
        loss = model.loss(windows)
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(trained, config.clip_norm).item())
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config, step, STEPS)
        optimizer.step()
        losses.append(loss.item())
    return {name: parameter.detach() for name, parameter in model.named_parameters()}, losses, norms


@pytest.mark.parametrize(
    ("layout", "parallel", "tied", "deterministic", "some"),
    [
        pytest.param(
            layout, parallel, tied, deterministic, some,
            id=f"{layout} {'tied ' if tied else ''}{deterministic}{'' if some == slice(None) else ', some'}",
            marks=[pytest.mark.soak] if some == slice(None) else [],
        )
        for layout, parallel in LAYOUTS
        for tied in (False, True)
        for deterministic in ("layout", "elastic")
        for some in (slice(None), HALVES.get((layout, tied, deterministic)))
        if some is not None
    ],
)  # fmt: skip
def test_layouts_with_frozen_parameters_train_as_a_plain_loop(ranks, layout, parallel, tied, deterministic, some):
    train = {"global_batch_size": 12, "micro_batch_size": 3, "deterministic": deterministic}
    jobs = [job(frozen, layout, tied, parallel=parallel, train=train) for frozen in list(FROZEN.values())[some]]
    weights = random_weights(parse_job_spec(jobs[0]))
    by_rank = ranks.run(
        parse_job_spec(jobs[0]).layout,
        run_steps, jobs, [light(weights)] * len(jobs), [batches()] * len(jobs), torch.float64,
    )  # fmt: skip
    for number, each in enumerate(jobs):
        expected, losses, norms = plain_run(each)
        frozen = frozen_names(parse_job_spec(each))
        assert frozen, "else this shows nothing"
        whole = assemble(weights, [placed for rank in by_rank for placed in rank[number].parameters])
        for rank in by_rank:
            assert rank[number].losses == pytest.approx(losses, rel=1e-9), each["train"]["frozen"]
            assert rank[number].grad_norms == pytest.approx(norms, rel=1e-8), each["train"]["frozen"]
        for name, value in expected.items():
            assert (whole[name] - value).norm() <= 1e-7 * value.norm(), (each["train"]["frozen"], name)
            assert torch.equal(whole[name], weights[name]) == (name in frozen), name
        moments = {name for rank in by_rank for name, *_ in rank[number].gradients}
        assert moments == set(weights) - frozen, "what is frozen has none"
