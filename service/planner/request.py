"""The request for a plan, as a document: a model, a batch, a cluster, and a layout or `auto`. Pure Python."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from manta.service.planner.candidates import MAX_STAGES
from manta.service.planner.defaults import with_micro_batch_size, with_precision
from manta.service.planner.hardware import (
    MACHINES,
    Cluster,
    CpuNode,
    Machine,
    UnknownMachine,
    machine_name,
    machine_of,
    ray_type,
)
from manta.service.planner.mixed_search import best_layouts
from manta.service.planner.search import Answer, evaluate, smallest_cluster
from manta.workers.config import JobSpec, ParallelConfig
from manta.workers.spec.problems import Problem, SpecError, kind_of, problems_of
from manta.workers.spec.rules import find_problems

CurrentCluster = Callable[[str | None], Cluster]
"""Returns the cluster that a service runs on; may need to be given its type of accelerators. Raises SpecError."""

CPU = "cpu"
"""The accelerator of a cluster of nodes like the planning one, without GPUs; `gpus_per_node` are then its ranks."""
SECTIONS = ("model", "train", "data", "parallel", "cluster")
"""Sections that are read. A job's other sections may be present too, so that its file can be planned as it is."""
Machines = Mapping[str, Machine]
"""Machines whose GPUs were measured, by their name in MACHINES."""
NONE_MEASURED: Machines = MappingProxyType({})
OPTIONAL_PARTS = ("explain", "sizes")
"""Optional parts of an answer, in addition to plans."""
MAX_LAYERS, MAX_NODES, MAX_MICRO_BATCHES = 1000, 100_000, 100_000
_KEYS = {"accelerator", "nodes", "gpus_per_node"}
MAX_KINDS = 4
"""Most nodes in one cluster."""


@dataclass(frozen=True)
class PlanRequest:
    """A checked request for plans."""

    job: JobSpec
    """The job, with the layout, or with `auto`."""
    cluster: Cluster
    explain: bool = False
    """Whether the best plan is to be explained."""
    sizes: bool = False
    """Whether the best layouts of fewer GPUs are wanted too."""

    @property
    def is_auto(self) -> bool:
        """Whether the layout is to be searched for."""
        return isinstance(self.job.parallel, str)

    def answer(self, limit: int = 5) -> Answer:
        """The plans. If nothing fits, the first rejected one also says which cluster would be large enough."""
        if not self.is_auto:
            return evaluate(self.job, self.cluster)
        answer = best_layouts(self.job, self.cluster, limit)
        if not answer.plans and answer.rejected and (larger := smallest_cluster(self.job, self.cluster)):
            first = answer.rejected[0]
            return Answer((), (type(first)(first.spec, f"{first.reason}; {larger}"), *answer.rejected[1:]))
        return answer


def read_request(document: Any, current: CurrentCluster, node: CpuNode, known: Machines = NONE_MEASURED) -> PlanRequest:
    """Check `document`. `node`: the one that accelerator `cpu` means. `known`: machines whose GPUs were measured.
    Raises SpecError with everything that is wrong with it."""
    if not isinstance(document, dict):
        raise SpecError([Problem("", f"a plan request is a mapping, not {kind_of(document)}", "model: {...}")])
    wishes = {name: document.get(name, False) for name in OPTIONAL_PARTS}
    if problems := [
        Problem(name, f"must be true or false, not {kind_of(value)}", "true")
        for name, value in wishes.items()
        if not isinstance(value, bool)
    ]:
        raise SpecError(problems)
    job = _job_in({key: value for key, value in document.items() if key not in OPTIONAL_PARTS})
    cluster = read_cluster(document.get("cluster"), for_job(job, current), node, known)
    problems = [*_misplaced(job, cluster), *too_large(job)]
    if problems:
        raise SpecError(problems)
    job = with_precision(job, cluster)
    return PlanRequest(job if isinstance(job.parallel, str) else with_micro_batch_size(job, cluster), cluster, **wishes)


def _misplaced(job: JobSpec, cluster: Cluster) -> list[Problem]:
    """Whether the cluster has none of what the job asks for."""
    wanted, has_gpus = job.resources.accelerator, any(part.machine.has_gpus for part in cluster.parts)
    if wanted == "cpu" and has_gpus:
        problem = "the job uses CPU slots, but this cluster has GPUs: use `gpu` or `auto`"
        return [Problem("resources.accelerator", problem, "auto")]
    return [_WITHOUT_GPUS] if wanted == "gpu" and not has_gpus else []


_WITHOUT_GPUS = Problem(
    "resources.accelerator",
    "the job needs GPUs, and this cluster has none: use `cpu` or `auto`",
    "auto",
)


def for_job(job: JobSpec, current: CurrentCluster) -> CurrentCluster:
    """`current`, limited to what `job` may use: `resources.accelerator` decides if no type of GPU is given."""
    wanted = job.resources.accelerator

    def cluster(accelerator: str | None) -> Cluster:
        as_measured = current(CPU if accelerator is None and wanted == "cpu" else accelerator)
        if wanted == "gpu" and not as_measured.machine.has_gpus:
            raise SpecError([_WITHOUT_GPUS])
        return as_measured

    return cluster


def _job_in(document: Mapping[str, Any]) -> JobSpec:
    sections = {name: document[name] for name in document if name in JobSpec.model_fields}
    train = sections.get("train")
    sections["train"] = {"steps": 1} | train if isinstance(train, dict) else train or {"steps": 1}
    sections.setdefault("data", _data_for(sections.get("model")))
    sections.setdefault("parallel", "auto")
    unknown = [
        Problem(name, f"unknown key; known are those of a job, and {SECTIONS[-1]}")
        for name in document
        if name not in JobSpec.model_fields and name != "cluster"
    ]
    try:
        job = JobSpec.model_validate(sections)
    except ValueError as error:
        raise SpecError([*unknown, *problems_of(error)]) from error  # type: ignore[arg-type]
    if job.model.family == "custom":
        problem = "the parts of a custom model are unknown, so its time and memory cannot be predicted"
        unknown.append(Problem("model.family", problem, "gpt", unsupported=True))
    elif not unknown:
        # A layout that is still to be searched for breaks no rules, and `elastic` limits which ones are looked at;
        # problems of the model show with the smallest layout.
        is_auto = isinstance(job.parallel, str)
        judged = job.model_copy(update={"parallel": ParallelConfig()}) if is_auto else job
        unread = ("data", "elastic") if is_auto else ("data",)
        unknown += [problem for problem in find_problems(judged) if not problem.path.startswith(unread)]
        if job.model.vocabulary_size is None and job.data.token_ids is None:
            problem = "the vocabulary's size is in the tokenizer's file, which is not read for a plan"
            unknown.append(Problem("model.vocabulary_size", problem, "50257"))
    if unknown:
        raise SpecError(unknown)
    return job


def _data_for(model: Any) -> dict[str, Any]:
    """A corpus for a job that names none: tokens, if the model says how many there are."""
    if isinstance(model, dict) and model.get("vocabulary_size") is not None:
        return {"source": "megatron", "paths": ["corpus.bin"]}
    return {"source": "python-stdlib"}


def read_cluster(document: Any, current: CurrentCluster, node: CpuNode, known: Machines = NONE_MEASURED) -> Cluster:
    """The cluster that `document` describes; {current: true} is the one that `current` returns, {groups: [...]} has
    nodes of several kinds. Raises SpecError."""
    example = "{accelerator: a100-80gb, nodes: 8, gpus_per_node: 8}"
    if not isinstance(document, dict):
        what = "required, but missing" if document is None else f"must be a mapping, not {kind_of(document)}"
        raise SpecError([Problem("cluster", what, example)])
    if document.get("groups") is not None:
        return _unequal_cluster(document, node, known)
    is_current = document.get("current", False)
    if not isinstance(is_current, bool):
        raise SpecError([Problem("cluster.current", f"must be true or false, not {kind_of(is_current)}", "true")])
    name, sizes = _read_nodes("cluster", document, {*_KEYS, "current", "groups"})
    if is_current and sizes:
        problem = f"current: true means the nodes of this cluster; leave out {' and '.join(sizes)}, or current"
        raise SpecError([Problem("cluster.current", problem, "false")])
    if is_current:
        return current(name)
    return _described(name, sizes, node, known, "cluster")


def _read_nodes(path: str, document: Mapping[Any, Any], known: set[str]) -> tuple[str | None, dict[str, int]]:
    """Accelerator and sizes of nodes of one kind. Raises SpecError."""
    problems = [
        Problem(f"{path}.{key}", f"unknown key; known are {', '.join(sorted(known))}")
        for key in sorted(map(str, document.keys() - known))
    ]
    name = document.get("accelerator")
    if name is not None and not isinstance(name, str):
        problems.append(Problem(f"{path}.accelerator", f"must be a string, not {kind_of(name)}", "a100-80gb"))
    sizes = {}
    for key, most in (("nodes", MAX_NODES), ("gpus_per_node", 64)):
        value = document.get(key)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
            problems.append(Problem(f"{path}.{key}", f"must be an integer from 1 to {most}, not {kind_of(value)}", "8"))
        sizes[key] = value
    if problems:
        raise SpecError(problems)
    return name, sizes


def _described(name: str | None, sizes: dict[str, int], node: CpuNode, known: Machines, path: str) -> Cluster:
    if name == CPU:
        slots = sizes.get("gpus_per_node", node.cores)
        return Cluster(node.machine(slots), sizes.get("nodes", 1), slots)
    return _named_cluster(name, sizes, known, path)


def _unequal_cluster(document: Mapping[str, Any], node: CpuNode, known: Machines) -> Cluster:
    """Nodes of several kinds, the most powerful first. Raises SpecError."""
    groups, example = document["groups"], "[{accelerator: a100-80gb, nodes: 2}, {accelerator: v100-32gb, nodes: 4}]"
    problem = None
    if others := {key for key, value in document.items() if value not in (None, False)} - {"groups"}:
        problem = f"lists all nodes of the cluster: leave out {', '.join(sorted(map(str, others)))}"
    elif not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        problem = f"must be a list of mappings, not {kind_of(groups)}"
    elif not 1 <= len(groups) <= MAX_KINDS:
        problem = f"must list 1 to {MAX_KINDS} kinds of nodes, not {len(groups)}"
    if problem is not None:
        raise SpecError([Problem("cluster.groups", problem, example)])
    parts = []
    for number, group in enumerate(groups):
        path = f"cluster.groups.{number}"
        name, sizes = _read_nodes(path, group, _KEYS)
        if name == CPU and len(groups) > 1:
            problem = "a pipeline can only span nodes with GPUs; plan for a cluster of CPUs separately"
            raise SpecError([Problem(f"{path}.accelerator", problem, "a100-80gb")])
        parts.append(_described(name, sizes, node, known, path))
    return together(parts)


def together(parts: Sequence[Cluster]) -> Cluster:
    """One cluster of these nodes, which must have different types. Raises SpecError otherwise."""
    if len(parts) == 1:
        return parts[0]
    typed = [part if part.type else replace(part, type=ray_type(part.machine.accelerator.name)) for part in parts]
    twice = [type for type, count in Counter(part.type for part in typed).items() if count > 1]
    if twice:
        problem = (
            f"Ray reports the GPU type {twice[0]} for two groups, so no stage can be assigned to one of them: merge "
            "the groups, or leave one out"
        )
        raise SpecError([Problem("cluster.groups", problem)])
    first, *others = sorted(typed, key=lambda part: (-part.gpus * part.machine.accelerator.peak_16bit, part.type or ""))
    return replace(first, others=tuple(others))


def _named_cluster(name: str | None, sizes: dict[str, int], known: Machines, path: str = "cluster") -> Cluster:
    if name is None:
        names = ", ".join([*MACHINES, CPU])
        problem = f"must name the nodes' accelerators: {names}; or set current: true"
        raise SpecError([Problem(f"{path}.accelerator", problem, "a100-80gb")])
    try:
        machine = machine_of(name)
    except UnknownMachine as error:
        raise SpecError([Problem(f"{path}.accelerator", str(error), "a100-80gb")]) from error
    machine = known.get(machine.accelerator.name, machine)
    return Cluster(machine, sizes.get("nodes", 1), sizes.get("gpus_per_node", machine.devices))


def too_large(job: JobSpec) -> list[Problem]:
    """Problems with jobs that would take too long to plan."""
    problems = []
    if job.model.layers > MAX_LAYERS:
        problems.append(Problem("model.layers", f"plans are made for up to {MAX_LAYERS} layers", str(MAX_LAYERS)))
    if isinstance(job.parallel, str):
        return problems
    if job.layout.pipeline > MAX_STAGES:
        problems.append(Problem("parallel.pipeline", f"plans are made for up to {MAX_STAGES} stages", str(MAX_STAGES)))
    if job.micro_batches > MAX_MICRO_BATCHES:
        problem = f"plans are made for up to {MAX_MICRO_BATCHES} micro-batches a replica, not {job.micro_batches}"
        problems.append(Problem("train.global_batch_size", problem))
    return problems


def _type_of(nodes: Sequence[Mapping[str, Any]]) -> str:
    """The accelerator that most of these nodes have, by the planner's name. Raises SpecError."""
    types = Counter(node["gpu_type"] for node in nodes if node.get("gpu_type") is not None)
    if not types:
        problem = "Ray does not know the type of this cluster's GPUs: name it"
        raise SpecError([Problem("cluster.accelerator", problem, "h100-80gb")])
    called = min(types, key=lambda each: (-types[each], each))
    memory = min((node["gpu_memory_bytes"] for node in nodes if node.get("gpu_memory_bytes")), default=None)
    name = machine_name(called, memory)
    if name is None:
        problem = f"no plans can be made for this cluster's GPUs of type {called}; known are {', '.join(MACHINES)}"
        raise SpecError([Problem("cluster.accelerator", problem, "the most similar one")])
    return name


def cluster_of_nodes(
    nodes: Sequence[Mapping[str, Any]], accelerator: str | None, cpu_node: CpuNode, known: Machines = NONE_MEASURED
) -> Cluster:
    """The cluster made of `nodes` (in the form of `manta.api.schemas.Node`), as far as nodes of one type are equal: the
    size that most of them have counts. Nodes that take no new ranks are left out, and if there are GPUs, nodes without
    any. `accelerator`: the type that all GPUs are assumed to be, or `cpu` for the slots; `cpu_node`: a node without
    GPUs; `known`: machines whose GPUs were measured. Raises SpecError."""
    alive = [node for node in nodes if node.get("alive")]
    usable = [node for node in alive if not node.get("draining") and node.get("problem") is None]
    if accelerator == CPU or (accelerator is None and not any(map(_has_gpus, alive))):
        count, size = _most_frequent([node["slots_total" if _has_gpus(node) else "total"] for node in usable], "slots")
        return Cluster(cpu_node.machine(size), count, size)
    with_gpus = [node for node in usable if _has_gpus(node)]
    if accelerator is None and len(parts := _by_type(with_gpus, known)) > 1:
        return together(parts)
    count, size = _most_frequent([node["total"] for node in with_gpus], "GPUs")
    name = _type_of(with_gpus) if accelerator is None else accelerator
    return _named_cluster(name, {"nodes": count, "gpus_per_node": size}, known)


def _has_gpus(node: Mapping[str, Any]) -> bool:
    return node.get("accelerator") == "gpu"


def _by_type(nodes: Sequence[Mapping[str, Any]], known: Machines) -> list[Cluster]:
    parts = []
    for type in sorted({node["gpu_type"] for node in nodes if node.get("gpu_type") and node["total"] >= 1}):
        alike = [node for node in nodes if node.get("gpu_type") == type]
        memory = min((node["gpu_memory_bytes"] for node in alike if node.get("gpu_memory_bytes")), default=None)
        if (name := machine_name(type, memory)) is not None:
            count, size = _most_frequent([node["total"] for node in alike], "GPUs")
            parts.append(replace(_named_cluster(name, {"nodes": count, "gpus_per_node": size}, known), type=type))
    return parts


def _most_frequent(places: Sequence[float], of: str) -> tuple[int, int]:
    """How many nodes have at least the most frequent size, and that size. `places`: the size of each node; `of`: what
    it counts. Raises SpecError."""
    sizes = Counter(int(place) for place in places if int(place) > 0)
    if not sizes:
        raise SpecError([Problem("cluster.current", f"this cluster has no node with {of} for jobs", "false")])
    size = max(sizes, key=lambda each: (sizes[each] * each, each))
    return sum(number for each, number in sizes.items() if each >= size), size
