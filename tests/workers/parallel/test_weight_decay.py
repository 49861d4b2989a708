"""What is decayed is what the job says, under every layout, as torch's AdamW has it with groups of parameters."""

from __future__ import annotations

import pytest
import torch
from engine_specs import axes, document
from plain_gpt import PlainGPT, random_weights
from rank_programs import assemble, light, run_steps

from manta.workers.config import ParallelConfig
from manta.workers.spec.reading import parse_job_spec
from manta.workers.training.learning_rate import learning_rate

STEPS, DECAY = 3, 2.0
ALL = ("linear", "embedding", "norm", "bias")
GROUPS = (("linear",), ("embedding", "bias"), ("norm",), ALL, ())


def group_of(name: str) -> str:
    """Of a parameter of the plain model."""
    if name.endswith(".bias"):
        return "bias"
    if name.startswith("embedding"):
        return "embedding"
    return "norm" if "norm" in name else "linear"


def job(groups: tuple[str, ...], layout: tuple[int, int, int], tied: bool = True, **parallel) -> dict:
    """Large steps and a strong decay, so that each step decays what it decays by two per cent."""
    optimizer = {
        "learning_rate": 1e-2, "min_learning_rate": 1e-3, "weight_decay": DECAY, "weight_decay_groups": list(groups),
    }  # fmt: skip
    return document(
        model={"layers": 2, "hidden_size": 16, "tie_embeddings": tied},
        train={"steps": STEPS, "micro_batch_size": 2, "optimizer": optimizer},
        parallel={**axes(layout), "bucket_megabytes": 0.002, **parallel},
    )


def plain_run(document: dict, batches: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same job as a plain loop in fp64."""
    spec = parse_job_spec(document)
    config = spec.train.optimizer
    model = PlainGPT(spec).double().load(random_weights(spec))
    groups = [
        {"params": [parameter], "weight_decay": DECAY if group_of(name) in config.weight_decay_groups else 0.0}
        for name, parameter in model.named_parameters()
    ]
    optimizer = torch.optim.AdamW(groups, betas=(config.beta1, config.beta2), eps=config.epsilon, foreach=False)
    for step, windows in enumerate(batches, start=1):
        optimizer.zero_grad()
        model.loss(windows).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip_norm)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config, step, STEPS)
        optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(
    ("layout", "tied", "parallel"),
    [
        pytest.param((1, 1, 1), True, {}, marks=pytest.mark.soak),
        ((1, 1, 3), False, {"zero": 1}),
        ((2, 2, 2), True, {"zero": 1}),
        ((2, 1, 2), False, {"zero": 0}),
        pytest.param((1, 2, 2), True, {"zero": 0}, marks=pytest.mark.soak),
        pytest.param((2, 2, 1), False, {}, marks=pytest.mark.soak),
    ],
    ids=str,
)
def test_weight_decay_of_parameter_groups_matches_torch(ranks, layout, tied, parallel):
    jobs = [job(groups, layout, tied, **parallel) for groups in GROUPS]
    batches = list(torch.randint(256, (STEPS, 8, 9), generator=torch.Generator().manual_seed(3)))
    weights = random_weights(parse_job_spec(jobs[0]))
    by_rank = ranks.run(
        ParallelConfig(**axes(layout)),
        run_steps, jobs, [light(weights)] * len(jobs), [batches] * len(jobs), torch.float64,
    )  # fmt: skip
    for number, groups in enumerate(GROUPS):
        whole = assemble(weights, [placed for rank in by_rank for placed in rank[number].parameters])
        for name, expected in plain_run(jobs[number], batches).items():
            error = (whole[name] - expected).norm() / expected.norm()
            assert error <= 1e-7, (groups, name)


def test_the_reference_would_notice_a_group_that_is_not_decayed():
    """Each group matters by far more than the tolerance."""
    batches = list(torch.randint(256, (STEPS, 8, 9), generator=torch.Generator().manual_seed(3)))
    nothing = plain_run(job((), (1, 1, 1)), batches)
    everything = plain_run(job(ALL, (1, 1, 1)), batches)
    for name, value in nothing.items():
        assert (everything[name] - value).norm() > 1e-3 * value.norm(), name
