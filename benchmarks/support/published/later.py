"""Throughput tables that were looked at only after the planner was made, and what it says of the same jobs.

Each file in `later/` is a table, a job a line; what a line leaves empty was not published, and the fastest choice that
fits is taken for it. Nothing is fitted on them.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.support.published.rows import Row
from manta.service.planner.communication import gather_seconds
from manta.service.planner.hardware import GIB, Cluster, Machine, machine_of
from manta.service.planner.memory import fits
from manta.service.planner.software import (
    MANTA,
    MEGATRON_2021,
    MEGATRON_2021_SCATTER,
    MEGATRON_2022,
    MEGATRON_DEEPSPEED_2021,
    Software,
)
from manta.service.planner.step_time import StepModel, slowest_of
from manta.workers.accounting.flops import step_flops
from manta.workers.config import JobSpec
from manta.workers.spec.divisors import divisors

FOLDER = Path(__file__).with_name("later")

MEGATRON_CORE = replace(
    MEGATRON_2022,
    name="megatron-core",
    blocks_on_messages=False,
    overlaps_gradients=True,
    forwards_inside=True,
    shards_optimizer=True,
)
"""Since 2023: messages, sums of gradients and gathering of parameters overlap the passes."""
MEGATRON_MOE = replace(MEGATRON_CORE, groups_experts=True, sends_rows_again=False, imbalance=1.0)
"""With experts, of balanced tokens: tables say that they forced that, and the others do not say how far from it they
were."""
NANOTRON = replace(MANTA, name="nanotron", overlaps_tensor=0.0, blocks_on_messages=True, fused=True)
DEEPSPEED_2022 = replace(MEGATRON_DEEPSPEED_2021, name="megatron-deepspeed-2022", shards_optimizer=True)
DEEPSPEED_2022_FP16 = replace(DEEPSPEED_2022, gradient_bytes=2, accumulation_bytes=8.0)
"""Gradients are added to themselves in 16 bits."""
MEGATRON_2023 = replace(MEGATRON_2022, name="megatron-2023", forwards_inside=True, shards_optimizer=True)
"""Of early 2023: sharded optimizers, but messages and sums of gradients that nothing hides."""
FUSED_ZERO_1 = replace(NANOTRON, name="torch-zero-1", gradient_bytes=2, accumulation_bytes=6.0)
"""Engines with ZeRO 1, fused kernels and sums of gradients in 16 bits that overlap with backward."""
MEGATRON_2021_OVERLAPPING = replace(MEGATRON_2021, overlaps_gradients=True)
"""With torch's DistributedDataParallel, as one of its scripts asks for without a pipeline."""


_WHOLE_EXPERTS = "experts that are not split over tensor ranks are taken for split ones on fewer expert ranks"


@dataclass(frozen=True)
class Table:
    """Where a table is from, and how it was made."""

    source: str
    unit: str
    engine: Software
    sharded: bool = False
    """Whether parameters are gathered for each pass (FSDP), which this planner's layouts have not."""
    overlaps_forward: bool = False
    """Whether forward's communication of the tensor group runs beside its products, in pieces: as many as are
    fastest."""


TABLES = {
    "megatron_2021": Table(
        "NVIDIA/Megatron-LM, images/cases_april2021.png (table 1 of arXiv:2104.04473); micro-batches and chunks: "
        "examples/sc21/run_table_1.sh",
        "hardware TFLOP/s",
        MEGATRON_2021_SCATTER,
    ),
    "megatron_2024": Table(
        "NVIDIA/Megatron-LM, images/model_table.png of July 2024; no micro-batches, chunks or recomputation are said",
        "model TFLOP/s",
        MEGATRON_CORE,
        overlaps_forward=True,
    ),
    "llama3": Table("arXiv:2407.21783, table 4; no chunks are said", "model TFLOP/s", MEGATRON_CORE),
    "zero_bubble": Table("arXiv:2401.10241, table 4 without ZB-2p; no chunks are said", "samples/s", MEGATRON_2022),
    "bigscience": Table(
        "bigscience-workshop/bigscience, train/tr11-176B-ml/chronicles-prequel.md, from 25 February 2022 on",
        "s",
        DEEPSPEED_2022,
    ),
    "nanotron": Table(
        "huggingface.co/nanotron/old_bench, llama-1B, log_metrics.csv: those that were found", "s", NANOTRON
    ),
    "nemo": Table(
        "NVIDIA/NeMo, docs/source/performance/performance_summary.md (24.07; 25.02 for three of B200 and one of H100), "
        "Megatron-Bridge's for 25.11 and 26.02: those without experts and context parallelism",
        "tokens/s",
        MEGATRON_CORE,
        overlaps_forward=True,
    ),
    "torchtitan": Table(
        "pytorch/torchtitan, docs/performance.md and benchmarks/llama3_h100_202412_torchtitan.md, without context "
        "parallelism; what its selective recomputation drops (every other layer, or product) is taken for half of all",
        "tokens/s",
        MANTA,
        sharded=True,
    ),
    "mosaicml": Table(
        "mosaicml/llm-foundry, scripts/train/benchmarking/README.md: all of its rows", "tokens/s", MANTA, sharded=True
    ),
    "layouts": Table(
        "JohannesHa/COLM-submission-efficient-parallelization-layouts, data/ (arXiv:2311.05610): runs with "
        "FlashAttention-2 and a fused RMS norm that ended; batches of four million tokens and 128,000 words, by which "
        "the sheets' MFU comes out",
        "s",
        FUSED_ZERO_1,
    ),
    "megascale": Table(
        "arXiv:2402.15627, table 2: its rows of Megatron-LM (commit 285068c8); no micro-batches or recomputation are "
        "said",
        "s",
        MEGATRON_2023,
    ),
    "internevo": Table(
        "InternLM/InternEvo, doc/en/train_performance.md: rows with zero1=-1; model: configs/7B_sft.py",
        "tokens/s",
        FUSED_ZERO_1,
    ),
    "flash_attention": Table(
        "Dao-AILab/flash-attention, training/README.md (FlashAttention of 2022); micro-batches: its configurations",
        "tokens/s",
        FUSED_ZERO_1,
    ),
    "flash_attention_2": Table(
        "arXiv:2307.08691, table 1: its rows of FlashAttention-2; batches: the same configurations",
        "model TFLOP/s",
        FUSED_ZERO_1,
    ),
    "neox": Table(
        "EleutherAI/gpt-neox, configs/20B.yml; 117 TFLOP/s: arXiv:2204.06745, section 2.3",
        "hardware TFLOP/s",
        DEEPSPEED_2022_FP16,
    ),
    "megatron_moe": Table(
        "NVIDIA/Megatron-LM, issue 756 (sequence length: that of its rates), megatron/core/transformer/moe/README.md "
        "of MCore 0.8 and 0.9; yanring/Megatron-MoE-ModelZoo, best_practice/Qwen3/readme.md, without FSDP; "
        f"{_WHOLE_EXPERTS}",
        "model TFLOP/s",
        MEGATRON_MOE,
        overlaps_forward=True,
    ),
    "nemo_moe": Table(
        "NVIDIA-NeMo/Megatron-Bridge, docs/performance-summary.md (25.11) and performance-summary-archive.md (26.02, "
        "and 25.09 of DeepSeek V3): rows of H100 and B200 whose layers are known here and that drop no tokens; "
        "NVIDIA-NeMo/Automodel, docs/performance-summary.md of October 2025, whose FSDP is taken for ZeRO 1; "
        f"{_WHOLE_EXPERTS}",
        "tokens/s",
        MEGATRON_MOE,
        overlaps_forward=True,
    ),
    "deepseek_v3": Table(
        "arXiv:2412.19437, section 1: 180,000 hours of H800 for 10^12 tokens; layout: section 3.2. DualPipe is taken "
        "for zb-v, and the batch as that of most of its training",
        "tokens/s",
        MEGATRON_MOE,
    ),
}
"""By the name of the file. Rates are of one GPU."""


def _gpt(layers: int, hidden: int, heads: int, vocabulary: int = 51200, **more: Any) -> dict[str, Any]:
    return {"layers": layers, "hidden_size": hidden, "heads": heads, "vocabulary_size": vocabulary, **more}


def _llama(layers: int, hidden: int, heads: int, kv: int, inner: int, vocabulary: int) -> dict[str, Any]:
    return _gpt(layers, hidden, heads, vocabulary, family="llama", kv_heads=kv, ffn_hidden_size=inner)


def _experts(count: int, per_token: int, inner: int, **more: Any) -> dict[str, Any]:
    return {"experts": count, "per_token": per_token, "ffn_hidden_size": inner, **more}


def _deepseek(heads: int, vocabulary: int, moe: dict[str, Any]) -> dict[str, Any]:
    latent = {"q_rank": 1536, "kv_rank": 512, "rope_size": 64, "nope_size": 128, "value_size": 128}
    more = {"family": "deepseek", "ffn_hidden_size": 18432, "moe": moe, "latent_attention": latent}
    return _gpt(61, 7168, heads, vocabulary, **more)


_DEEPSEEK = {"shared": 1, "score": "sigmoid"}
_QWEN = {"family": "qwen", "head_dim": 128}
_DROPOUT: dict[str, Any] = {"dropout": 0.1}
_SHAPES_2021 = {
    "1.7b": (24, 2304, 24),
    "3.6b": (30, 3072, 32),
    "7.5b": (36, 4096, 32),
    "18b": (40, 6144, 48),
    "39b": (48, 8192, 64),
    "76b": (60, 10240, 80),
    "145b": (80, 12288, 96),
    "310b": (96, 16384, 128),
    "530b": (105, 20480, 128),
    "1t": (128, 25600, 160),
}
_SHAPES_2024 = {
    "1.7b": (24, 2048, 16),
    "7.1b": (30, 4096, 32),
    "16b": (32, 6144, 48),
    "32b": (48, 7168, 56),
    "70b": (84, 8192, 64),
    "119b": (92, 10240, 80),
    "177b": (96, 12288, 96),
    "314b": (96, 16384, 128),
    "462b": (112, 18432, 144),
}
_SHAPES_MPT = {
    "125m": (12, 768, 12),
    "350m": (24, 1024, 16),
    "760m": (24, 1536, 12),
    "1b": (24, 2048, 16),
    "3b": (32, 2560, 20),
    "7b": (32, 4096, 32),
    "13b": (40, 5120, 40),
    "30b": (48, 7168, 56),
    "70b": (80, 8192, 64),
}
MODELS: dict[str, dict[str, Any]] = {
    **{f"gpt-{name}": _gpt(*shape, **_DROPOUT) for name, shape in _SHAPES_2021.items()},
    **{f"gpt24-{name}": _gpt(*shape, 131072) for name, shape in _SHAPES_2024.items()},
    **{f"mpt-{name}": _gpt(*shape, 50368, bias=False) for name, shape in _SHAPES_MPT.items()},
    "zb-1.5b": _gpt(22, 2304, 24, **_DROPOUT),
    "zb-6.2b": _gpt(30, 4096, 32, **_DROPOUT),
    "zb-14.6b": _gpt(46, 5120, 40, **_DROPOUT),
    "zb-28.3b": _gpt(62, 6144, 48, **_DROPOUT),
    "nanotron-1b": _llama(24, 2048, 32, 32, 8192, 50272) | {"tie_embeddings": True},
    "aa-llama-13b": _llama(40, 5120, 40, 40, 13824, 128000),
    "aa-llama-30b": _llama(60, 6656, 52, 52, 17920, 128000),
    "aa-llama-65b": _llama(80, 8192, 64, 64, 22016, 128000),
    "megascale-175b": _gpt(96, 12288, 128, 64000),
    "internlm-7b": _llama(32, 4096, 32, 32, 11008, 103168),
    "neox-20b": _gpt(44, 6144, 64, 50432, tie_embeddings=False),
    "flash-125m": _gpt(12, 768, 12, 50264),
    "flash-355m": _gpt(24, 1024, 16, 50264),
    "flash-760m": _gpt(24, 1536, 16, 50264),
    "flash-1.3b": _gpt(24, 2048, 16, 50264),
    "flash-2.7b": _gpt(32, 2560, 20, 50264),
    "llama2-7b": _llama(32, 4096, 32, 32, 11008, 32000),
    "llama2-13b": _llama(40, 5120, 40, 40, 13824, 32000),
    "llama2-70b": _llama(80, 8192, 64, 8, 28672, 32000),
    "llama3-8b": _llama(32, 4096, 32, 8, 14336, 128256),
    "llama3-70b": _llama(80, 8192, 64, 8, 28672, 128256),
    "llama3-405b": _llama(126, 16384, 128, 8, 53248, 128256),
    "gpt3-5b": _gpt(24, 4096, 32),
    "gpt3-20b": _gpt(44, 6144, 48),
    "gpt3-175b": _gpt(96, 12288, 96),
    "nemotron-8b": _gpt(32, 4096, 32, 256000, tie_embeddings=False, bias=False),
    "nemotron-22b": _gpt(40, 6144, 48, 256000, tie_embeddings=False, bias=False),
    "nemotron-15b": _gpt(32, 6144, 48, 256000, kv_heads=8, tie_embeddings=False, bias=False),
    "mixtral-8x7b": _llama(32, 4096, 32, 8, 14336, 32000) | {"moe": _experts(8, 2, 14336)},
    "qwen3-30b-a3b": _llama(48, 2048, 32, 4, 6144, 151936) | _QWEN | {"moe": _experts(128, 8, 768)},
    "qwen3-235b-a22b": _llama(94, 4096, 64, 4, 12288, 151936) | _QWEN | {"moe": _experts(128, 8, 1536)},
    "deepseek-v3": _deepseek(128, 129280, _experts(256, 8, 2048, first_dense=3, **_DEEPSEEK)),
    "kimi-k2": _deepseek(64, 163840, _experts(384, 8, 2048, first_dense=1, **_DEEPSEEK)),
    "nemotron-340b": _gpt(96, 18432, 96, 256000, kv_heads=8, tie_embeddings=False, bias=False),
}
"""What the tables, or the scripts and configurations next to them, say of the models."""


def model_of(name: str) -> dict[str, Any]:
    """The model that a line names; `bloom-HxLxA` is one of hidden size H, with L layers and A heads."""
    if name not in MODELS:
        hidden, layers, heads = map(int, name.removeprefix("bloom-").split("x"))
        return _gpt(layers, hidden, heads, 250880)
    return MODELS[name]


def machine(name: str) -> Machine:
    """The machine of a line."""
    if name == "a100-40gb-hdr":  # four adapters of 200 Gb/s a node
        return replace(machine_of("a100-40gb"), adapters=4)
    if name == "a100-80gb-opa":  # Jean Zay: four adapters of 100 Gb/s a node
        return replace(machine_of("a100-80gb"), adapters=4, adapter_bandwidth=12.5e9, numa_nodes=0)
    if name == "h800-80gb":  # half of the H100's NVLink
        h100 = machine_of("h100-80gb")
        return replace(h100, accelerator=replace(h100.accelerator, name=name, link_bandwidth=200e9))
    if name == "h100-96gb-500w":  # Grand Teton with HBM2e
        h100 = machine_of("h100-80gb")
        device = replace(h100.accelerator, name=name, memory_bytes=95 * GIB, memory_bandwidth=2.4e12)
        return replace(h100, accelerator=device)
    return machine_of(name)


def lines_of(name: str) -> list[dict[str, str]]:
    """The lines of a table, by column."""
    with (FOLDER / f"{name}.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def rows(name: str) -> Iterator[Row]:
    """Every line of a table next to the planner's prediction."""
    table = TABLES[name]
    for line in lines_of(name):
        spec, seconds = predicted(table, line)
        yield Row(name, case_of(line), float(line["published"]), in_unit(table.unit, spec, seconds), table.unit, "none")


def case_of(line: dict[str, str]) -> str:
    """A line in words."""
    axes = "x".join(line[axis] for axis in ("tensor", "pipeline", "data"))
    axes += "".join(f" {name} {line[name]}" for name in ("context", "expert") if line.get(name, "1") != "1")
    chunks = f" {line['schedule']} {line['chunks']}".rstrip() if line["schedule"] not in ("", "1f1b") else ""
    more = "" if line["recompute"] in ("", "none") else f", {line['recompute']} recomputation"
    more += ", sequence parallel" if line.get("sequence_parallel") == "1" else ""
    sequences = f"{line['micro_batch'] or '?'} of {line['batch']} x {line['sequence']}"
    return f"{line['model']}, {line['accelerator']} {axes}{chunks}, {sequences}, {line['precision']}{more}"


def in_unit(unit: str, spec: JobSpec, seconds: float) -> float:
    """A step's seconds as a table has them."""
    ranks, samples = spec.layout.world_size, spec.train.global_batch_size
    if unit == "s":
        return seconds
    if unit == "hardware TFLOP/s":
        return step_flops(spec).hardware_full / ranks / seconds / 1e12
    if unit == "model TFLOP/s":
        return step_flops(spec).model_full / ranks / seconds / 1e12
    rate = samples / ranks / seconds
    return rate * spec.model.sequence_length if unit == "tokens/s" else rate


def predicted(table: Table, line: dict[str, str]) -> tuple[JobSpec, float]:
    """The job of a line, and the seconds of its step; of several that it may be the fastest that fits."""
    gpus = int(line["gpus"])
    cluster = Cluster(machine(line["accelerator"]), -(-gpus // 8), min(8, gpus))
    engine = _engine(table, line)
    estimates = []
    pieces = (1, 2, 4) if table.overlaps_forward and line["tensor"] != "1" else (1,)
    for choice, chunks in product(_choices(line), pieces):
        spec = _spec(choice, engine, chunks)
        too_large = not line["recompute"] and not fits(spec, cluster).fits
        seconds = sharded_seconds(spec, cluster, engine) if table.sharded else _seconds(spec, cluster, engine)
        estimates.append((too_large, seconds, spec))
    _, seconds, spec = min(estimates, key=lambda each: each[:2])
    return spec, seconds


def _seconds(spec: JobSpec, cluster: Cluster, engine: Software) -> float:
    return StepModel(spec, cluster, engine).time().seconds


def _engine(table: Table, line: dict[str, str]) -> Software:
    if table.engine is DEEPSPEED_2022 and line["precision"] == "fp16":
        return DEEPSPEED_2022_FP16
    if table.engine is MEGATRON_2021_SCATTER and line["pipeline"] == "1":
        return MEGATRON_2021_OVERLAPPING
    return table.engine


def _choices(line: dict[str, str]) -> Iterator[dict[str, str]]:
    """What a line may be, where it does not say everything."""
    share = int(line["batch"]) // int(line["data"])
    pipeline, layers = int(line["pipeline"]), model_of(line["model"])["layers"]
    chunks = [str(each) for each in range(1, layers // pipeline + 1)] if pipeline > 1 else ["1"]
    for micro_batch, virtual, recompute in product(
        [line["micro_batch"]] if line["micro_batch"] else [str(each) for each in divisors(share) if each <= 8],
        [line["chunks"]] if line["chunks"] else chunks,
        [line["recompute"]] if line["recompute"] else ["none", "selective", "full"],
    ):
        whole = share // int(micro_batch) % pipeline == 0
        if virtual != "1" and line["schedule"] in ("", "interleaved") and not whole:
            continue
        schedule = line["schedule"] or ("1f1b" if virtual == "1" else "interleaved")
        if schedule == "interleaved" and virtual == "1":
            continue
        filled = {"micro_batch": micro_batch, "chunks": virtual, "recompute": recompute, "schedule": schedule}
        yield line | filled


_RECOMPUTED: dict[str, dict[str, Any]] = {
    "half": {"recompute": "full", "recompute_every": 2},
    "norm and activation": {"recompute": "selective", "recompute_modules": ["norm", "mlp_activation"]},
}


def _spec(line: dict[str, str], engine: Software, forward_chunks: int) -> JobSpec:
    precision, _, compiled = line["precision"].partition("+")
    layout: dict[str, Any] = {axis: int(line[axis]) for axis in ("tensor", "pipeline", "data")}
    layout |= {"schedule": line["schedule"], "virtual_stages": int(line["chunks"])}
    layout |= {axis: int(line[axis]) for axis in ("context", "expert") if line.get(axis, "1") != "1"}
    layout |= {"expert_dispatch": "all_to_all"} if "expert" in layout else {}
    layout |= _RECOMPUTED.get(line["recompute"], {"recompute": line["recompute"]})
    layout |= {"zero": int(engine.shards_optimizer), "stage_layers": _stage_layers(line)}
    if engine.name.startswith(("megatron-2021", "megatron-deepspeed")):
        layout["sequence_parallel"] = False
    layout |= {"forward_chunks": forward_chunks}
    if line.get("sequence_parallel"):
        layout["sequence_parallel"] = line["sequence_parallel"] == "1" and line["tensor"] != "1"
    if engine is MEGATRON_CORE:
        layout["gather"] = "beside_forward"
    return JobSpec.model_validate(
        {
            "model": model_of(line["model"]) | {"sequence_length": int(line["sequence"])},
            "data": {"source": "megatron", "paths": ("corpus.bin",)},
            "train": {
                "steps": 1,
                "global_batch_size": int(line["batch"]),
                "micro_batch_size": int(line["micro_batch"]),
                "precision": "bf16" if precision == "fp8" else precision,
                "fp8": "tensorwise" if precision == "fp8" else "off",
                "compile": bool(compiled),
                "attention": "explicit" if line["model"].startswith(("bloom", "neox")) else "auto",
            },
            "parallel": layout,
        }
    )


def _stage_layers(line: dict[str, str]) -> tuple[int, ...] | None:
    """Layers of each virtual stage: one fewer at each end where that is what makes the others equal; else, where they
    do not divide, the last stage has what is left."""
    layers, stages = model_of(line["model"])["layers"], int(line["pipeline"]) * int(line["chunks"])
    each, more = divmod(layers + 2, stages)
    if stages == 1 or layers % stages == 0:
        return None
    if more == 0 and each > 1:
        return (each - 1, *[each] * (stages - 2), each - 1)
    last = layers - (stages - 1) * -(-layers // stages)
    return (*[-(-layers // stages)] * (stages - 1), last) if last > 0 else None


def sharded_seconds(spec: JobSpec, cluster: Cluster, engine: Software) -> float:
    """Of a step whose replicas have a part of the parameters each and gather them for every pass (FSDP), beside it:
    16-bit ones for forwards and for backwards, and 16-bit gradients are reduced after each backward."""
    model = StepModel(spec, cluster, engine)
    if spec.layout.pipeline > 1:
        return model.time().seconds
    passes, replicas = model.pipeline().times[0], model.groups.holders
    gathering = gather_seconds(replicas, cluster, 2 * model.parameters)
    forward = max(passes.forward, gathering)
    backward = max(passes.backward, 2 * gathering)
    alone = replace(replicas, size=1)
    model.groups = replace(model.groups, holders=alone)
    update = model.optimizer_seconds()
    step = spec.micro_batches * (forward + backward) + update
    return step * slowest_of(spec.layout.data, cluster)
