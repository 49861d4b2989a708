"""The cluster that a job was planned for, as it is stored with the plan: enough to plan and draw the same again after
later calibrations. Pure Python."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from service.planner.hardware import MACHINES, Cluster, Core, Gpu, Links, Refined, cpu_machine, measured
from service.planner.refinement import constants_of, measured_of, with_constants


def to_json(cluster: Cluster) -> dict[str, Any]:
    """As JSON."""
    return _one_kind(cluster) | {"type": cluster.type, "others": [to_json(other) for other in cluster.others]}


def _one_kind(cluster: Cluster) -> dict[str, Any]:
    machine = cluster.machine
    record: dict[str, Any] = {"nodes": cluster.nodes, "gpus_per_node": cluster.gpus_per_node}
    if (refined := machine.refined) is not None:
        record["refined"] = {"jobs": refined.jobs, "before": dict(refined.before), "after": constants_of(machine)}
    if machine.core is None:
        return record | {"accelerator": machine.accelerator.name} | measured_of(machine)
    memory = machine.accelerator.memory_bytes * machine.devices
    return record | {"cores": machine.cores, "slots": machine.devices, "memory": memory, "core": asdict(machine.core)}


def from_json(document: dict[str, Any]) -> Cluster:
    """The cluster from a document of `to_json`. Raises KeyError, TypeError if another release wrote it."""
    if "core" in document:
        core = Core(**document["core"])
        machine = cpu_machine(document["slots"], document["cores"], document["memory"], core)
    else:
        machine = MACHINES[document["accelerator"]]
        if document["gpu"] is not None:
            links = document.get("links")  # earlier releases measured none
            machine = measured(machine, Gpu(**document["gpu"]), None if links is None else Links(**links))
    if (refined := document.get("refined")) is not None:
        known = Refined(refined["jobs"], tuple(refined["before"].items()))
        machine = replace(with_constants(machine, refined["after"]), refined=known)
    others = tuple(from_json(other) for other in document.get("others", ()))
    return Cluster(machine, document["nodes"], document["gpus_per_node"], document.get("type"), others)
