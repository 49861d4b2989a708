"""What Ray still holds of a job, seen by a process of its own: one that has joined a Ray cannot join another.

`python -m benchmarks.support.ray_view HOME` answers each job id on standard input with a line of JSON.
"""

from __future__ import annotations

import json
import subprocess
import sys
from types import TracebackType
from typing import Self

from benchmarks.support.own_service import JobWentWrong
from benchmarks.support.report import ROOT
from manta.service.cluster.ray_head import RayHead


class RayView:
    """The process, as a context manager. It must end before the Ray does."""

    def __init__(self, home: str):
        """`home`: of the service whose Ray is looked at."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.support.ray_view", home],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()

    def held_by(self, job_id: str) -> list[str]:
        """Names of the job's actors and placement groups. Raises JobWentWrong."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(job_id + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise JobWentWrong("Ray cannot be looked at")
        names: list[str] = json.loads(line)
        return names


def main() -> None:
    """Answer until standard input ends."""
    ray = RayHead(sys.argv[1]).connect()
    for line in sys.stdin:
        job_id = line.strip()
        groups = ray.util.placement_group_table().values()
        names = [str(actor["name"]) for actor in ray.util.list_named_actors(all_namespaces=True)]
        names += [group["name"] for group in groups if group["state"] != "REMOVED"]
        print(json.dumps([name for name in names if job_id in name]), flush=True)


if __name__ == "__main__":
    main()
