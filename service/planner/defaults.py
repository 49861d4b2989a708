"""Precision and micro-batch size of a job that names none, from the devices that it is to run on. Pure Python."""

from __future__ import annotations

from manta.service.planner.candidates import micro_batch_sizes
from manta.service.planner.hardware import Cluster
from manta.service.planner.memory import Fit, tightest
from manta.service.planner.search import placement_problem
from manta.service.planner.step_time import step_model
from manta.workers.accounting.device_table import has_bf16
from manta.workers.config import JobSpec
from manta.workers.spec.rules import find_problems


def with_precision(spec: JobSpec, cluster: Cluster) -> JobSpec:
    """`spec` in bf16 if it names no precision and all GPUs of `cluster` have it."""
    if "precision" in spec.train.model_fields_set or not cluster.machine.has_gpus:
        return spec
    if not all(has_bf16(part.machine.accelerator.name) for part in cluster.parts):
        return spec
    return _with_train(spec, precision="bf16")


def with_micro_batch_size(spec: JobSpec, cluster: Cluster) -> JobSpec:
    """`spec`, whose layout is given, with the micro-batch size of the fastest step that fits on the GPUs of `cluster`,
    if it names none, there is room for the layout, and one fits."""
    named = "micro_batch_size" in spec.train.model_fields_set
    if named or not cluster.machine.has_gpus or placement_problem(spec, cluster) is not None:
        return spec
    share = -(-spec.train.global_batch_size // spec.layout.data)
    sized = [_with_train(spec, micro_batch_size=size) for size in micro_batch_sizes(spec, share)]
    fitting = [each for each in sized if not find_problems(each) and Fit(*tightest(each, cluster)).fits]
    return min(fitting, key=lambda each: step_model(each, cluster).time().seconds, default=spec)


def _with_train(spec: JobSpec, **values: object) -> JobSpec:
    return spec.model_copy(update={"train": spec.train.model_copy(update=values)})
