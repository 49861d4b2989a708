"""The lines by which a job's log says how it trains, made from what its ranks report anyway. Pure Python."""

from __future__ import annotations

from typing import Any

from manta.workers.protocol.reports import Event, Metrics, Payload, Resting, Started
from manta.workers.training.metric_names import EXPERT_LOAD, VALIDATION_LOSS

_NOT_LOGGED = ("checkpoint_saving", "checkpoint_deleted")
"""Types of events that are not worth a line in the log."""
_MIB = 2**20


class LogLines:
    """The lines of one rank in one generation."""

    def __init__(self, steps: int, every: int, rank: int = 0, generation: int | None = None, cause: str = ""):
        """`steps`: of the job; `every`: see `train.log_every`; `generation`: rows of earlier ones, which are reported
        again, have no lines; None: all have; `cause`: why the generation began, in words."""
        self._steps, self._every = steps, every
        self._rank, self._generation, self._cause = rank, generation, cause

    def of(self, payload: Payload) -> list[str]:
        """The lines about one report; none for most."""
        match payload:
            case Metrics(rows):
                return [line for row in rows if self._is_new(row) for line in self._step(row)]
            case Event(kind, message) if kind not in _NOT_LOGGED:
                return [message]
            case Started(step=step) if self._rank == 0:
                begins = f"continues after step {step}" if step else "starts at step 1"
                return [f"generation {self._generation}: {begins}" + (f"; {self._cause}" if self._cause else "")]
            case Resting(step, message):
                where = "in the middle of a step" if step is None else f"after step {step}"
                return [f"generation {self._generation}: rank {self._rank} stopped {where}: {message}"]
        return []

    def _is_new(self, row: dict[str, Any]) -> bool:
        return self._generation is None or row.get("generation") == self._generation

    def _step(self, row: dict[str, Any]) -> list[str]:
        """For the first and the last step, and every few; and for those with a validation."""
        step, every = row["step"], self._every
        is_due = every > 0 and (step % every == 0 or step in (1, self._steps))
        lines = [self._progress(row)] if is_due else []
        losses = {name: loss for name, loss in row.items() if name.startswith(VALIDATION_LOSS)}
        return lines + [
            f"step {step} | validation loss{name.removeprefix(VALIDATION_LOSS).replace('_', ' ', 1)} {loss:.4f}"
            for name, loss in losses.items()
        ]

    def _progress(self, row: dict[str, Any]) -> str:
        parts = [f"step {row['step']}/{self._steps}", f"loss {row['loss']:.4f}", f"grad norm {row['grad_norm']:.3f}"]
        parts += [f"lr {row['learning_rate']:.1e}", f"{row['tokens_per_second']:,.0f} tok/s"]
        parts += [f"MFU {row['mfu_full']:.1%}"] if "mfu_full" in row else []
        parts += [f"expert load {row[EXPERT_LOAD]:.2f}"] if EXPERT_LOAD in row else []
        return " | ".join([*parts, f"{row['memory_bytes'] / _MIB:,.0f} MiB"])
