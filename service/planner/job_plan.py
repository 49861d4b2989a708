"""The planned step of a job on the nodes where it really runs, as a JSON document that is stored with it, or the
sentence that is stored instead if nothing can be planned. With it goes the cluster that the job was planned for: enough
to plan and draw the same again after later calibrations. Pure Python."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from manta.service.errors import ErrorKind, ServiceError
from manta.service.planner import explain
from manta.service.planner.budget import step_shares
from manta.service.planner.hardware import (
    MACHINES,
    Cluster,
    Core,
    CpuNode,
    Gpu,
    Links,
    Refined,
    UnknownMachine,
    cpu_machine,
    machine_name,
    measured,
)
from manta.service.planner.pictures import picture
from manta.service.planner.refinement import constants_of, dependence_of, measured_of, with_constants
from manta.service.planner.request import NONE_MEASURED, Machines, cluster_of_nodes, too_large
from manta.service.planner.search import plan_of
from manta.service.planner.sizes import elastic_sizes
from manta.service.planner.step_time import step_model, threads_in
from manta.workers.config import JobSpec, ParallelConfig
from manta.workers.spec.problems import Problem, SpecError
from manta.workers.system.threads import with_threads


class NotPlanned(ServiceError):
    """No plan can be made for this job; the message says why."""

    kind = ErrorKind("nothing_planned", 409, "the job has no plan, or none that can be drawn; `detail` says why")


@dataclass(frozen=True)
class RankNode:
    """A node on which ranks of a job run."""

    ranks: int
    cores: int
    """Cores that a rank without a GPU may use; 0: not known."""
    has_gpus: bool
    gpu_type: str | None = None
    """Ray's name for the type of its GPUs."""
    gpu_memory_bytes: int | None = None


def cluster_of(rank_nodes: Sequence[RankNode], node: CpuNode, known: Machines = NONE_MEASURED) -> Cluster:
    """The nodes of a job, as far as they are alike. `node`: what one without GPUs is; `known`: those whose GPUs were
    measured.
    Raises SpecError where the type of the GPUs is not known."""
    most = max(rank_node.ranks for rank_node in rank_nodes)
    if not rank_nodes[0].has_gpus:
        cores = min((rank_node.cores for rank_node in rank_nodes if rank_node.cores), default=node.cores)
        return Cluster(CpuNode(cores, node.memory_bytes, node.core).machine(most), len(rank_nodes), most)
    unknown = {node.gpu_type for node in rank_nodes if node.gpu_type and machine_name(node.gpu_type, None) is None}
    if unknown and len({node.gpu_type for node in rank_nodes}) > 1:
        problem = f"some of its ranks are on GPUs of type {min(unknown)}, for which no plans can be made"
        raise SpecError([Problem("cluster.accelerator", problem)])
    nodes = [
        {"alive": True, "accelerator": "gpu", "total": most, "gpu_type": node.gpu_type}
        | {"gpu_memory_bytes": node.gpu_memory_bytes}
        for node in rank_nodes
    ]
    return cluster_of_nodes(nodes, None, node, known)


def refuse_unplannable(spec: JobSpec) -> None:
    """Raises NotPlanned if no plan can be made for this job."""
    if spec.model.family == "custom":
        raise NotPlanned("the parts of a custom model are unknown")
    if problems := too_large(spec):
        raise NotPlanned("; ".join(problem.rule for problem in problems))


def planned(spec: JobSpec, cluster: Cluster) -> dict[str, Any]:
    """The planned step of `spec` on `cluster`, in the form of `manta.api.schemas.PlannedStep`. Raises NotPlanned."""
    refuse_unplannable(spec)
    try:
        model = step_model(spec, cluster)
    except UnknownMachine as error:  # the job was submitted for nodes that it is not on
        raise NotPlanned(str(error)) from error
    plan = plan_of(spec, cluster, time=model.time())
    step, shares = plan.time.seconds, step_shares(model, plan.time, plan.peak_flops)
    return {
        "step_seconds": step,
        "memory_bytes": plan.memory.parts(),
        "parts": [asdict(each) | {"fraction": each.seconds / step, "help": each.help or None} for each in shares],
        "assumed": cluster.machine.is_assumed,
        "has_gpus": cluster.machine.has_gpus,
        "sizes": _sizes(spec, cluster),
        "cluster": cluster_to_json(cluster),
        "threads": threads_in(spec, cluster),
        "refined_by_jobs": 0 if cluster.machine.refined is None else cluster.machine.refined.jobs,
        # With several kinds of nodes it cannot be said which of them was slow.
        "dependence": None if cluster.others else dependence_of(model, cluster),
    }


def drawn(spec: JobSpec, kept: dict[str, Any], title: str) -> str:
    """The picture (SVG) of a job's stored plan: `kept`, and the layout (`parallel`) of `spec`. Raises NotPlanned."""
    if kept["planned"] is None:
        raise NotPlanned(kept["problem"])
    try:
        cluster = cluster_from_json(kept["planned"]["cluster"])
        spec = with_threads(spec, kept["planned"]["threads"])
        spec = spec.model_copy(update={"parallel": ParallelConfig.model_validate(kept["parallel"])})
    except (KeyError, TypeError, ValueError) as error:
        raise NotPlanned("this job was planned by another release, without the data for a picture") from error
    plan = plan_of(spec, cluster)
    return picture(title, explain.to_json(explain.explain(plan, cluster)))


def _sizes(spec: JobSpec, cluster: Cluster) -> list[dict[str, Any]]:
    """The layouts that the job continues in as it loses GPUs; empty if its size is fixed."""
    plans = elastic_sizes(spec, cluster)
    return [plan.to_json() for plan in plans] if len(plans) > 1 else []


def cluster_to_json(cluster: Cluster) -> dict[str, Any]:
    """As JSON."""
    machine, others = cluster.machine, [cluster_to_json(other) for other in cluster.others]
    record: dict[str, Any] = {"nodes": cluster.nodes, "gpus_per_node": cluster.gpus_per_node}
    record |= {"type": cluster.type, "others": others}
    if (refined := machine.refined) is not None:
        record["refined"] = {"jobs": refined.jobs, "before": dict(refined.before), "after": constants_of(machine)}
    if machine.core is None:
        return record | {"accelerator": machine.accelerator.name} | measured_of(machine)
    memory = machine.accelerator.memory_bytes * machine.devices
    return record | {"cores": machine.cores, "slots": machine.devices, "memory": memory, "core": asdict(machine.core)}


def cluster_from_json(document: dict[str, Any]) -> Cluster:
    """The cluster from a document of `cluster_to_json`. Raises KeyError, TypeError if another release wrote it."""
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
    others = tuple(cluster_from_json(other) for other in document.get("others", ()))
    return Cluster(machine, document["nodes"], document["gpus_per_node"], document.get("type"), others)
