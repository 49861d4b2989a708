"""Memory in the published tables: activations a layer and a GPU, model state under ZeRO."""

from __future__ import annotations

import ast
import operator
from collections.abc import Iterator, Mapping

from benchmarks.support.published.arithmetic import paper_job
from benchmarks.support.published.rows import Row
from benchmarks.support.published.tables import Tables
from tests.workers.support.papers import table2_bytes

GIB = 2**30
POLICIES = {
    "none": (False, "none"),
    "seq": (True, "none"),
    "sel": (False, "selective"),
    "seqsel": (True, "selective"),
    "full": (False, "full"),
}
"""By the name in figures 1 and 7 of arXiv:2205.05198: sequence parallelism, recomputation."""
FORMULAS = {
    "no parallelism": (1, *POLICIES["none"]),
    "tensor parallel (baseline)": (8, *POLICIES["none"]),
    "tensor + sequence parallel": (8, *POLICIES["seq"]),
    "tensor parallel + selective recompute": (8, *POLICIES["sel"]),
    "tensor + sequence parallel + selective recompute": (8, *POLICIES["seqsel"]),
    "full activation recomputation": (8, *POLICIES["full"]),
}
"""By the name in table 2: tensor-parallel size of the case, sequence parallelism, recomputation."""


def rows(tables: Tables) -> Iterator[Row]:
    """All of them."""
    yield from _layer_formulas(tables)
    yield from _per_gpu(tables)
    yield from _zero(tables)


def _layer_formulas(tables: Tables) -> Iterator[Row]:
    """Table 2, evaluated for the 175B model, and its examples."""
    name = "c_actrecomp_table2_activation_formulas"
    shape = tables.models_of_2205_05198["175B"]
    model = paper_job(shape).model
    sizes = {"s": model.sequence_length, "b": 1, "h": model.hidden_size, "a": model.heads}
    for row in tables.rows(name):
        tensor, sequence_parallel, recompute = FORMULAS[row["configuration"]]
        published = evaluated(row["bytes_per_layer"], sizes | {"t": tensor})
        ours = table2_bytes(model, 1, tensor, sequence_parallel, recompute)
        yield Row(name, f"175B, {row['configuration']}", published, ours, "bytes", "relative", 1e-12)
    for case, model_name in (("GPT-3", "175B"), ("MT-NLG", "530B")):
        example = tables.read(name)["examples"][case]
        model = paper_job(tables.models_of_2205_05198[model_name]).model
        whole, kept = table2_bytes(model, 1), table2_bytes(model, 1, recompute="selective")
        saved = (whole - kept) / (model.sequence_length * model.hidden_size)
        yield Row(name, f"{case}, 5 a s / h", example["5as/h"], saved, "bytes/element")
        yield Row(name, f"{case}, saved", example["saved_pct"], 100 * (whole - kept) / whole, "%")


def _per_gpu(tables: Tables) -> Iterator[Row]:
    """Figures 1 and 7: the first stage holds L layers' activations, and (1 + (p - 1)/(p v)) of that interleaved; 18
    bytes a parameter, of 12 L h^2 / (t p)."""
    name = "c_actrecomp_fig1_fig7_memory"
    document = tables.read(name)
    for model_name, shape in tables.models_of_2205_05198.items():
        model, t, p, v = paper_job(shape).model, shape["tp"], shape["pp"], shape["interleave_m"]
        factor = 1 + (p - 1) / (p * v) if v > 1 else 1.0
        sizes = {
            key: model.layers * factor * table2_bytes(model, shape["micro_batch"], t, *policy) / GIB
            for key, policy in POLICIES.items()
        }
        sizes["par_opt"] = 18 * 12 * model.layers * model.hidden_size**2 / (t * p) / GIB
        for key, published in document["fig1_GiB"][model_name].items():
            yield Row(name, f"figure 1, {model_name}, {key}", published, sizes[key], "GiB", "relative", 1e-9)
        for key, published in document["fig7_pct"][model_name].items():
            percent = 100 * sizes[key] / sizes["none"]
            yield Row(name, f"figure 7, {model_name}, {key}", published, percent, "%", "absolute", 0.15)


def _zero(tables: Tables) -> Iterator[Row]:
    """Table 1 of arXiv:1910.02054: 2 bytes a parameter for weights, 2 for gradients, 12 for the optimizer, each whole
    or split over the replicas."""
    name = "f_zero_table1_memory"
    document = tables.read(name)
    for row in tables.rows(name):
        for column in document["columns"][1:]:
            size, stage = column.split("_")
            parameters = float(size[:-1]) * (1000 if size.endswith("T") else 1)
            gigabytes = zero_bytes(parameters, row["dp"], stage.count("+") + 1)
            yield Row(name, f"{size}, {stage}, {row['dp']} replicas", row[column], gigabytes, "GB")


def zero_bytes(parameters: float, replicas: int, stage: int) -> float:
    """Bytes of model state a replica under ZeRO `stage` (0 to 3) with 16-bit weights and gradients."""
    weights, gradients, optimizer = (2 / replicas if stage > 2 else 2, 2 / replicas if stage > 1 else 2, 12.0)
    return parameters * (weights + gradients + (optimizer / replicas if stage > 0 else optimizer))


_OPERATORS = {ast.Add: operator.add, ast.Mult: operator.mul, ast.Div: operator.truediv}


def evaluated(formula: str, values: Mapping[str, float]) -> float:
    """The value of a formula of sums, products and quotients of names and numbers. Raises ValueError for others."""

    def of(node: ast.AST) -> float:
        if isinstance(node, ast.Expression):
            return of(node.body)
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](of(node.left), of(node.right))
        if isinstance(node, ast.Name) and node.id in values:
            return values[node.id]
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            return node.value
        raise ValueError(f"{formula!r} is not a formula of sums, products and quotients of {', '.join(values)}")

    return of(ast.parse(formula, mode="eval"))
