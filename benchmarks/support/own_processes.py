"""The processes of one service, found from outside: its zygotes, what they forked, its agents, and what a job that is
over has left."""

from __future__ import annotations

import psutil

from manta.service.cluster.ray_head import MARK
from manta.workers.paths import Paths


def zygotes(paths: Paths) -> list[psutil.Process]:
    """The zygotes of all nodes on this machine."""
    return [process for process in psutil.process_iter() if _is_zygote(process, paths)]


def _is_zygote(process: psutil.Process, paths: Paths) -> bool:
    try:
        words, parent = process.cmdline(), process.parent()
        forked = parent is not None and "manta.workers.zygote" in parent.cmdline()
    except psutil.Error:
        return False
    return "manta.workers.zygote" in words and not forked and any(paths.tag in word for word in words)


def forked(paths: Paths) -> list[psutil.Process]:
    """What the zygotes forked: trainers and rendezvous stores."""
    processes = []
    for zygote in zygotes(paths):
        try:
            processes += zygote.children(recursive=True)
        except psutil.NoSuchProcess:  # it has ended meanwhile
            continue
    return processes


def agents(paths: Paths) -> list[psutil.Process]:
    """The processes of all agents."""
    return [process for process in psutil.process_iter() if _is_agent(process, paths)]


def _is_agent(process: psutil.Process, paths: Paths) -> bool:
    try:
        return process.name().startswith("ray::Agent") and process.environ().get(MARK) == paths.tag
    except psutil.Error:
        return False


def of_service(service: psutil.Process, paths: Paths) -> set[psutil.Process]:
    """All of them: the service's own, Ray's, and what Ray and the zygotes started."""
    roots = [service, *(process for process in psutil.process_iter() if _is_marked(process, paths))]
    processes = set(roots)
    for root in roots:
        try:
            processes.update(root.children(recursive=True))
        except psutil.NoSuchProcess:  # it has ended meanwhile
            continue
    return processes


def _is_marked(process: psutil.Process, paths: Paths) -> bool:
    try:
        return bool(process.environ().get(MARK) == paths.tag)
    except psutil.Error:
        return False


def leftovers(paths: Paths, job: str) -> list[str]:
    """What `job`, which is over and was the only one, still holds: files in shared memory, processes."""
    folder = paths.snapshot_folder(job)
    files = [str(file) for file in folder.glob("*")]
    return [*files, *([str(folder)] if folder.exists() else []), *(str(process) for process in forked(paths))]
