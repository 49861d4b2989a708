"""Who trains the same model on one device: this engine, and others where they are installed. Each maker takes a JobSpec
and a device and returns a step to be called again and again; it raises ImportError where its library is not there.

torchtitan's and Megatron Core's are put together from what their sources of torchtitan 0.2 and Megatron Core 0.14 say;
neither has been run by us.

Shapes: b batch, s sequence, v vocabulary.
"""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.support.hugging_face import causal_attention, transformers_like
from manta.workers.comm.comm import Comm
from manta.workers.comm.grid import RankGrid
from manta.workers.config import JobSpec
from manta.workers.data.batches import MicroBatch
from manta.workers.engine import Engine
from manta.workers.system import gpu

LEARNING_RATE = 1e-4
CLIP_NORM = 1.0
Step = Callable[[], object]
Maker = Callable[[JobSpec, torch.device], Step]
WARM_UP = 3


def timed(make: Callable[[], Step], steps: int, device: torch.device) -> tuple[float, int]:
    """Median seconds of a step after warm-up, and the most memory that was allocated, in bytes."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    try:
        seconds = _step_seconds(make(), steps, device)
    finally:
        gpu.leave()
        torch.compiler.reset()
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return statistics.median(seconds), torch.cuda.max_memory_allocated() if device.type == "cuda" else 0


def _step_seconds(step: Step, steps: int, device: torch.device) -> list[float]:
    for _ in range(WARM_UP):
        step()
    seconds = []
    for _ in range(steps):
        settle(device)
        began = time.perf_counter()
        step()
        settle(device)
        seconds.append(time.perf_counter() - began)
    return seconds


def settle(device: torch.device) -> None:
    """Return once the device has done what was queued."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def product_rate(device: torch.device) -> float:
    """Sustained rate of large bf16 matrix products, FLOP/s."""
    n = 8192 if device.type == "cuda" else 256
    left, right = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
    out = left @ right
    settle(device)
    began, count = time.perf_counter(), 50
    for _ in range(count):
        torch.mm(left, right, out=out)
    settle(device)
    return 2.0 * n**3 * count / (time.perf_counter() - began)


def batch_of(spec: JobSpec, device: torch.device) -> list[MicroBatch]:
    """The micro-batches of a global batch of random tokens."""
    parts = _tokens(spec, device).split(spec.train.micro_batch_size, dim=1)
    b = spec.train.micro_batch_size
    return [
        MicroBatch(range(i * b, (i + 1) * b), part[:-1].contiguous(), part[1:].contiguous())
        for i, part in enumerate(parts)
    ]


def _tokens(spec: JobSpec, device: torch.device) -> torch.Tensor:
    """Random tokens [s + 1, global batch]."""
    generator = torch.Generator().manual_seed(spec.train.seed)
    shape = (spec.model.sequence_length + 1, spec.train.global_batch_size)
    return torch.randint(spec.vocabulary_size, shape, generator=generator).to(device)


def manta(spec: JobSpec, device: torch.device) -> Step:
    """This engine, on the kernels that a job's ranks choose."""
    engine = manta_engine(spec, device)
    batch = batch_of(spec, device)
    return lambda: engine.step(batch, spec.train.global_batch_size, LEARNING_RATE, 0)


def manta_engine(spec: JobSpec, device: torch.device) -> Engine:
    """The engine of a job of one rank, with its first weights."""
    gpu.use_for(spec, device)
    engine = Engine(spec, Comm(RankGrid(spec.layout), 0, device))
    engine.initialise(spec.train.seed)
    return engine


def transformers(spec: JobSpec, device: torch.device) -> Step:
    """The family's model there, with fp32 weights, bf16 autocast and fused AdamW; compiled where the job is."""
    return _of_transformers(spec, device, "sdpa")


def transformers_causal(spec: JobSpec, device: torch.device) -> Step:
    """Like `transformers`, but without masks, so that flash attention takes the family's attention: as fast as it gets
    without a package of its own for that."""
    return _of_transformers(spec, device, causal_attention())


def _of_transformers(spec: JobSpec, device: torch.device, attention: str) -> Step:
    model = transformers_like(spec, attention).to(device)
    compiled = torch.compile(model) if spec.train.compile else model
    return _plain(model, lambda tokens_bs: compiled(tokens_bs).logits, spec, device)


def torchtitan(spec: JobSpec, device: torch.device) -> Step:
    """torchtitan's Llama, block by block compiled as torchtitan does; fp32 weights, bf16 autocast and fused AdamW."""
    from torchtitan.models.llama3.model.args import TransformerModelArgs
    from torchtitan.models.llama3.model.model import Transformer

    shape = spec.model
    if shape.family != "llama":
        raise ImportError("it has no GPT")
    # Its gated layers are 8/3 of dim, times a factor, and rounded up to a multiple: so they come out as ours.
    arguments = TransformerModelArgs(
        dim=shape.hidden_size,
        n_layers=shape.layers,
        n_heads=shape.heads,
        n_kv_heads=shape.key_value_heads,
        vocab_size=spec.vocabulary_size,
        ffn_dim_multiplier=shape.ffn_size / int(8 * shape.hidden_size / 3),
        multiple_of=32,
        max_seq_len=shape.sequence_length,
    )
    with torch.device(device):
        model = Transformer(arguments)
    model.init_weights(buffer_device=device)
    for layer in model.layers.values() if spec.train.compile else ():
        layer.compile(fullgraph=True)
    return _plain(model, model, spec, device)


def _plain(
    model: torch.nn.Module, logits_of: Callable[[torch.Tensor], torch.Tensor], spec: JobSpec, device: torch.device
) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    tokens_bs = _tokens(spec, device).t().contiguous()
    inputs_bs, targets_bs = tokens_bs[:, :-1].contiguous(), tokens_bs[:, 1:].contiguous()

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16):
            logits_bsv = logits_of(inputs_bs)
            loss = F.cross_entropy(logits_bsv.flatten(0, 1).float(), targets_bs.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()

    return step


def megatron_core(spec: JobSpec, device: torch.device) -> Step:
    """Megatron Core's GPTModel with Transformer Engine's layers where that is installed, its DDP and its bf16
    optimizer."""
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer.transformer_config import TransformerConfig

    if not torch.distributed.is_initialized():
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", "29517")
        torch.distributed.init_process_group("nccl", rank=0, world_size=1)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(1, 1)
    tensor_parallel.random.model_parallel_cuda_manual_seed(spec.train.seed)
    shape, is_llama = spec.model, spec.model.family == "llama"
    likes = {"normalization": "RMSNorm", "gated_linear_unit": True, "activation_func": F.silu, "add_bias_linear": False}
    config = TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.heads,
        num_query_groups=shape.key_value_heads,
        ffn_hidden_size=shape.ffn_size,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        bias_activation_fusion=True,
        masked_softmax_fusion=True,
        **(likes if is_llama else {}),
    )
    model = GPTModel(
        config=config,
        transformer_layer_spec=_layer_spec(),
        vocab_size=spec.vocabulary_size,
        max_sequence_length=shape.sequence_length,
        position_embedding_type="rope" if is_llama else "learned_absolute",
        share_embeddings_and_output_weights=shape.tie_embeddings,
    ).to(device)
    parallel = DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model)
    settings = OptimizerConfig(optimizer="adam", lr=LEARNING_RATE, bf16=True, clip_grad=CLIP_NORM)
    optimizer = get_megatron_optimizer(settings, [parallel])
    tokens_bs = _tokens(spec, device).t().contiguous()
    inputs_bs, targets_bs = tokens_bs[:, :-1].contiguous(), tokens_bs[:, 1:].contiguous()
    positions_bs = torch.arange(inputs_bs.shape[1], device=device).expand_as(inputs_bs).contiguous()

    def step() -> None:
        parallel.zero_grad_buffer()
        optimizer.zero_grad()
        parallel(inputs_bs, positions_bs, None, labels=targets_bs).float().mean().backward()
        parallel.finish_grad_sync()
        optimizer.step()

    return step


def _layer_spec() -> Any:
    from megatron.core.models.gpt import gpt_layer_specs

    try:
        return gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec()
    except (ImportError, NameError):  # it names what it did not import
        return gpt_layer_specs.get_gpt_layer_local_spec()


OTHERS: dict[str, Maker] = {
    "transformers": transformers,
    "transformers_causal": transformers_causal,
    "torchtitan": torchtitan,
    "megatron_core": megatron_core,
}
