"""The job that the other trainers run in comparison with Manta: a GPT of the quickstart's size, data parallel over gloo
on CPU.

Plain PyTorch (DistributedDataParallel, AdamW, torch.save), without anything of Manta's, so that any Python with torch
can run it. What happened goes to files in one folder: each rank's process id, and rank 0's completed steps.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

LAYERS, WIDTH, HEADS, LENGTH, VOCABULARY = 4, 128, 4, 128, 256
GLOBAL_BATCH = 32


@dataclass
class Toy:
    """One process of the job."""

    rank: int
    world: int
    attempt: str
    """Names the start of the gang that the process belongs to."""
    folder: Path
    steps: int
    checkpoint_every: int
    load: Callable[[], dict | None]
    """The state of the newest checkpoint."""
    save: Callable[[int, dict], None]
    """Keeps the state of a step; called on every rank."""


class Gpt(nn.Module):
    """A decoder-only transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        hidden = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
        logits: torch.Tensor = self.head(self.layers(hidden, mask=mask, is_causal=True))
        return logits


def train(toy: Toy) -> None:
    """All steps that are left, in a process whose default process group is there already."""
    (toy.folder / f"pid-{toy.rank}").write_text(f"{os.getpid()} {toy.attempt}")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = DistributedDataParallel(Gpt())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    state = toy.load()
    step = 0
    if state is not None:
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    mine = GLOBAL_BATCH // toy.world
    while step < toy.steps:
        step += 1
        draw = torch.Generator().manual_seed(step * toy.world + toy.rank)
        tokens = torch.randint(VOCABULARY, (mine, LENGTH + 1), generator=draw)
        logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.reshape(-1, VOCABULARY), tokens[:, 1:].reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if toy.rank == 0:
            with (toy.folder / "steps").open("a") as file:
                file.write(f"{time.time()} {step} {toy.attempt}\n")
        if step % toy.checkpoint_every == 0:
            state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            toy.save(step, state)


def write_whole(state: dict, path: Path) -> None:
    """Write `state` to `path`, which is never seen half written."""
    part = path.with_suffix(".part")
    torch.save(state, part)
    part.rename(path)


def under_torchrun() -> None:
    """What each process of torchrun runs: `baseline_toy.py FOLDER STEPS CHECKPOINT_EVERY`."""
    import sys

    folder, steps, every = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    # Without keys of its own an attempt meets those of the one before, and never begins.
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    dist.init_process_group("gloo", store=dist.PrefixStore(attempt, store), rank=rank, world_size=world)
    path = folder / "checkpoint.pt"

    def load() -> dict | None:
        state: dict | None = torch.load(path) if path.exists() else None
        return state

    def save(_step: int, state: dict) -> None:
        if rank == 0:
            write_whole(state, path)

    train(Toy(rank, world, attempt, folder, steps, every, load, save))


if __name__ == "__main__":
    under_torchrun()
