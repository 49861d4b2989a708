"""Programs of ranks one of which is asked to save and end early."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from reported import rows_of

from manta.workers.comm.comm import Comm
from manta.workers.protocol.messages import Resume
from manta.workers.protocol.requests import SaveAndEnd
from manta.workers.snapshot.files import stored_steps
from manta.workers.spec.reading import parse_job_spec
from manta.workers.trainer import StatePaths, Trainer
from manta.workers.training.reporter import Reporter

START = Resume()


def train(
    comm: Comm, document: dict[str, Any], folder: str, resume: Resume = START, asked: tuple[int, int] | None = None
) -> tuple[int, bool, list[int], list[tuple[int, float, float]]]:
    """Train from `resume` on. `asked`: (rank, step): that rank is asked to end once it has committed that step.
    Answers the last step, whether the rank ended early, the steps in its memory, and rank 0's curve."""
    spec, messages = parse_job_spec(document), []
    reporter = Reporter(messages.extend)
    places = StatePaths("test", str(Path(folder) / "shared"), str(Path(folder) / "durable"))
    trainer = Trainer(spec, comm, reporter, 1e12, places)
    trainer.restore(resume)
    step = trainer.train_step

    def asking_step() -> Any:
        if asked == (comm.rank, trainer.step):
            comm.requests.add(SaveAndEnd(comm.generation))
        return step()

    trainer.train_step = asking_step  # type: ignore[method-assign]
    trainer.train()
    reporter.close()
    curve = [(row["step"], row["loss"], row["grad_norm"]) for row in rows_of(messages)]
    return trainer.step, trainer.ends_early, stored_steps(Path(folder) / "shared", comm.rank), curve
