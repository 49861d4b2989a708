"""What is left of a service."""

from pathlib import Path

import psutil

from manta.service.cluster.ray_head import MARK
from manta.workers.paths import Paths


def traces_of(home: Path) -> list[str]:
    """What of a service is left outside of its home."""
    paths = Paths.of(home)
    traces = [str(path) for path in (paths.snapshot_root, paths.runtime_folder) if path.exists()]
    for process in psutil.process_iter():
        try:
            if process.status() == psutil.STATUS_ZOMBIE:
                continue
            environment = process.environ()
            if environment.get(MARK) == paths.tag or environment.get("MANTA_HOME") == str(home):
                traces.append(str(process))
        except psutil.Error:
            continue
    return traces
