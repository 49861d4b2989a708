"""Whole training runs: every layout follows the same curve, and the optimizer is AdamW as torch has it."""

from __future__ import annotations

import json

import pytest
import torch
from engine_specs import SEVEN_LAYOUTS, axes, document
from plain_gpt import PlainGPT, random_weights
from rank_programs import START, assemble, run_steps, train_job

from manta.workers.config import ParallelConfig
from manta.workers.spec.reading import parse_job_spec

STEPS = 16
VALIDATION_SETS = ["validation_loss_same", "validation_loss_other"]
PARTS_OF_OTHERS = ((2, 1, 1), (1, 2, 1), (2, 2, 1))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> str:
    """Text with some structure, so that the loss falls."""
    path = tmp_path_factory.mktemp("corpus") / "numbers.txt"
    text = "".join(f"{n} times {n} is {n * n}.\n" for n in range(600))
    path.write_text(text)
    path.with_name("same.txt").write_text(text[-int(len(text) * 0.1) :])
    path.with_name("other.txt").write_text("".join(f"{n} and {n} is {2 * n}.\n" for n in range(90)))
    return str(path)


def training_job(corpus: str, layout: tuple[int, int, int], **train) -> dict:
    """A job with validation every 8 steps, by three texts, the second of which is the first once more."""
    sets = [
        {"name": name, "paths": [corpus.replace("numbers.txt", f"{name}.txt")], "batches": batches}
        for name, batches in (("same", None), ("other", 2))
    ]
    optimizer = {"learning_rate": 3e-3, "warmup_steps": 5}
    return document(
        data={"paths": [corpus], "validation_fraction": 0.1, "validation": sets},
        train={
            "steps": STEPS, "micro_batch_size": 2, "validate_every": 8, "validation_batches": 3,
            "optimizer": optimizer, **train,
        },
        parallel=axes(layout),
    )  # fmt: skip


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> str:
    """Two files of documents."""
    folder = tmp_path_factory.mktemp("texts")
    for name, numbers in (("a.jsonl", range(300)), ("b.jsonl", range(300, 500))):
        lines = (json.dumps({"text": f"{n} times {n} is {n * n}.\n"}) for n in numbers)
        (folder / name).write_text("\n".join(lines))
    return str(folder)


@pytest.fixture(scope="module")
def curve(ranks, corpus):
    """What one rank alone sees."""
    return ranks.run(ParallelConfig(), train_job, training_job(corpus, (1, 1, 1)))[0]


def test_training_reduces_the_loss(curve):
    assert [row["step"] for row in curve.rows] == list(range(1, STEPS + 1))
    assert curve.rows[0]["loss"] == pytest.approx(5.545, abs=0.1), "ln 256: nothing is known yet"
    assert curve.rows[-1]["loss"] < 4.5


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(layout, id=str(layout), marks=[pytest.mark.soak] if layout in PARTS_OF_OTHERS else [])
        for layout in SEVEN_LAYOUTS[1:]
    ],
)
def test_layouts_agree_at_every_step(ranks, corpus, curve, layout):
    by_rank = ranks.run(ParallelConfig(**axes(layout)), train_job, training_job(corpus, layout))
    for rank in by_rank:
        assert rank.statistics == by_rank[0].statistics, "all ranks say the same"
    for step, (row, other) in enumerate(zip(curve.rows, by_rank[0].rows, strict=True), start=1):
        assert other["loss"] == pytest.approx(row["loss"], rel=2e-6), step
        assert other["grad_norm"] == pytest.approx(row["grad_norm"], rel=2e-5), step
        names = [name for name in other if name.startswith("validation_loss")]
        assert names == (["validation_loss", *VALIDATION_SETS] if step % 8 == 0 else [])
        for name in names:
            assert other[name] == pytest.approx(row[name], rel=2e-6), (step, name)
            assert other["validation_loss_same"] == other["validation_loss"]
            assert other["validation_loss_other"] != pytest.approx(other["validation_loss"], rel=1e-3)


@pytest.mark.parametrize("weights", [None, pytest.param([3, 1], marks=pytest.mark.soak)])
def test_token_corpus_gives_every_layout_the_same_curve(ranks, texts, tmp_path, weights):
    """Eight ranks, one of which makes tokenizer and tokens, while the others wait for it."""
    paths = [texts] if weights is None else [f"{texts}/a.jsonl", f"{texts}/b.jsonl"]

    def rows_of(layout):
        job = training_job("", layout)
        job["data"] = {"source": "jsonl", "paths": paths, "weights": weights, "tokenizer": "bpe"}
        job["data"] |= {"tokenizer_vocabulary": 301, "validation_fraction": 0.1}
        cache = str(tmp_path / str(layout))
        by_rank = ranks.run(ParallelConfig(**axes(layout)), train_job, job, None, None, START, 8, cache)
        made = [event for rank in by_rank for event in rank.events if event["type"] == "data_prepared"]
        assert len(made) == 1
        return by_rank[0].rows

    for row, other in zip(rows_of((1, 1, 1)), rows_of((2, 2, 2)), strict=True):
        for name, tolerance in (("loss", 2e-6), ("grad_norm", 2e-5)):
            assert other[name] == pytest.approx(row[name], rel=tolerance), row["step"]
    assert row["validation_loss"] == pytest.approx(other["validation_loss"], rel=2e-6)


def test_same_layout_trained_twice_has_the_same_bits(ranks, corpus):
    layout = ParallelConfig(tensor=2, pipeline=2, data=2)
    job = training_job(corpus, (2, 2, 2))
    first, second = (ranks.run(layout, train_job, job, None, None, resume, 4) for resume in (START, START))
    for a, b in zip(first, second, strict=True):
        assert a.statistics == b.statistics
        assert torch.equal(a.parameters, b.parameters)
        assert all(torch.equal(a.state[kind], b.state[kind]) for kind in a.state)


@pytest.mark.parametrize("micro_batch_size", [1, 4])
def test_gradient_accumulation_does_not_change_the_curve(ranks, corpus, curve, micro_batch_size):
    job = training_job(corpus, (1, 1, 1), micro_batch_size=micro_batch_size)
    rows = ranks.run(ParallelConfig(), train_job, job, None, None, START, 10)[0].rows
    for row, other in zip(curve.rows[:10], rows, strict=True):
        assert other["loss"] == pytest.approx(row["loss"], rel=2e-6)
        assert other["grad_norm"] == pytest.approx(row["grad_norm"], rel=2e-5)


def plain_run(job: dict, batches: list[torch.Tensor], dtype: torch.dtype) -> tuple[PlainGPT, list[float], list[float]]:
    """The same job as a plain loop: torch's AdamW and clipping, the schedule written out."""
    spec = parse_job_spec(job)
    model = PlainGPT(spec).to(dtype).load(random_weights(spec))
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": decayed, "weight_decay": 0.3}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1.0, betas=(0.8, 0.9), eps=1e-6, foreach=False)
    losses, norms = [], []
    rates = torch.cat(
        [torch.tensor([1e-3, 2e-3]), 1e-4 + 1.9e-3 * (1 + torch.cos(torch.arange(1, 9) * torch.pi / 8)) / 2]
    )
    for windows, rate in zip(batches, rates.double().tolist(), strict=True):
        optimizer.zero_grad()
        loss = model.loss(windows)
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        losses.append(loss.item())
    return model, losses, norms


@pytest.mark.parametrize(
    ("layout", "dtype", "bias", "tolerance"),
    # With biases only in fp64: the keys' bias has no gradient but rounding, which AdamW would blow up.
    [
        pytest.param((1, 1, 1), torch.float32, False, 1e-6, id="alone, fp32"),
        pytest.param((2, 2, 2), torch.float64, True, 1e-7, id="eight ranks, fp64 with biases"),
        pytest.param((2, 2, 2), torch.float32, False, 1e-6, id="eight ranks, fp32", marks=pytest.mark.soak),
        pytest.param((1, 1, 1), torch.float64, True, 1e-7, id="alone, fp64 with biases", marks=pytest.mark.soak),
    ],
)
def test_ten_steps_equal_a_plain_loop(ranks, layout, dtype, bias, tolerance):
    job = document(
        model={"bias": bias},
        train={
            "steps": 10,
            "optimizer": {
                "learning_rate": 2e-3, "min_learning_rate": 1e-4, "warmup_steps": 2, "weight_decay": 0.3,
                "beta1": 0.8, "beta2": 0.9, "epsilon": 1e-6, "clip_norm": 0.5,
            },
        },
        parallel=axes(layout),
    )  # fmt: skip
    spec = parse_job_spec(job)
    batches = list(torch.randint(256, (10, 8, 9), generator=torch.Generator().manual_seed(3)))
    weights = random_weights(spec)
    by_rank = ranks.run(ParallelConfig(**axes(layout)), run_steps, [job], [weights], [batches], dtype)
    model, losses, norms = plain_run(job, batches, dtype)
    assert min(norms) > 0.5, "every step is clipped"
    assert by_rank[0][0].losses == pytest.approx(losses, rel=tolerance)
    assert by_rank[0][0].grad_norms == pytest.approx(norms, rel=10 * tolerance)
    whole = assemble(weights, [placed for rank in by_rank for placed in rank[0].parameters])
    for name, parameter in model.named_parameters():
        error = (whole[name] - parameter.detach()).norm() / parameter.detach().norm()
        assert error <= tolerance, name
