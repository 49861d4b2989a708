"""Parameters, FLOPs, rates and training days of the published tables, from `manta.workers.accounting`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

from benchmarks.support.published.rows import Row, printed_range
from benchmarks.support.published.tables import Tables, gpt
from manta.workers.accounting.flops import parameter_count, step_flops
from manta.workers.config import JobSpec

A100_PEAK = 312e12
"""FLOP/s that all MFU of arXiv:2205.05198 relate to."""
DAY = 86_400.0

README_TP, README_DP = "a2_megatron_readme_sep2020_tp_weak_scaling", "a2_megatron_readme_sep2020_dp_weak_scaling"


def rows(tables: Tables) -> Iterator[Row]:
    """All of them."""
    yield from _parameters(tables)
    yield from _readme_rates(tables)
    yield from _megatron_turing_rates(tables)
    yield from _days(tables)
    yield from _utilisation(tables)
    yield from _selective_recomputation(tables)


def from_inputs(
    reference: str, case: str, published: float, unit: str, formula: Callable[..., float], *printed: float
) -> Row:
    """A row whose formula takes numbers that were printed: what their rounding leaves open is its tolerance."""
    value = formula(*printed)
    corners = [formula(*corner) for corner in product(*map(printed_range, printed))]
    return Row(reference, case, published, value, unit, "inputs", max(abs(corner - value) for corner in corners))


def _parameters(tables: Tables) -> Iterator[Row]:
    name = "a_megatron2019_table1_configs"
    for row in tables.rows(name):
        spec = gpt(row["num_layers"], row["hidden_size"], row["attention_heads"], sequence=1024)
        yield Row(name, f"{row['params_billion']}B", row["params_billion"], parameter_count(spec) / 1e9, "1e9")
    name = "a_megatron2019_table4_bert_configs"
    for row in tables.rows(name):
        millions = row["params"].endswith("M")
        unit = 1e6 if millions else 1e9
        printed = int(row["params"][:-1]) if millions else float(row["params"][:-1])
        yield Row(name, row["params"], printed, bert_parameters(row["layers"], row["hidden"]) / unit, f"{unit:.0e}")
    for row in tables.rows(README_TP):
        yield Row(README_TP, row["case"], row["params_billion"], parameter_count(readme_model(row)) / 1e9, "1e9")
    name = "b_ptdp_table2_vs_zero3"
    for layers, hidden, heads, printed in ((96, 12288, 96, 174.6), (105, 20480, 128, 529.6)):
        yield Row(name, f"{printed}B", printed, parameter_count(gpt(layers, hidden, heads)) / 1e9, "1e9")
    name = "b_ptdp_figures_7_to_18"
    for case, layers, hidden, heads, printed in (
        ("figure 13", 32, 20480, 128, 162.2),
        ("figure 14", 32, 3840, 32, 5.9),
        ("figure 16", 32, 15360, 128, 91),
        ("figure 17", 80, 12288, 96, 145),
    ):
        # The caption's 145 billion are 145.9: cut.
        yield Row(name, f"{case}, parameters", printed, parameter_count(gpt(layers, hidden, heads)) / 1e9, "1e9")
    yield Row("d_mtnlg_config_and_throughput", "530B", 530, parameter_count(gpt(105, 20480, 128)) / 1e9, "1e9")


def bert_parameters(layers: int, hidden: int) -> int:
    """Parameters of a BERT as arXiv:1909.08053 trains it: a GPT's layers over 512 positions and 30,592 padded token
    ids, two token types, the norm of the heads' transformation, and one matrix each for that, the pooler and the
    order of sentences."""
    body = parameter_count(gpt(layers, hidden, hidden // 64, sequence=512, vocabulary=30592))
    return body + 2 * hidden + 2 * (hidden * hidden + hidden) + 2 * hidden + 2 * (hidden + 1) + 30592


def readme_model(row: dict[str, int], batch: int = 1, **parallel: Any) -> JobSpec:
    """A model of the README's tables, with a batch that is one micro-batch of each replica."""
    micro_batch = batch // parallel.get("data", 1)
    shape = row["layers"], row["hidden"], row["heads"]
    return gpt(*shape, batch=batch, micro_batch=micro_batch, sequence=1024, **parallel)


def _computed(spec: JobSpec) -> int:
    """FLOPs of a step with full recomputation: arXiv:2104.04473, eq. 3."""
    again = spec.layout.model_copy(update={"recompute": "full", "recompute_every": 1, "recompute_keep": 0})
    return step_flops(spec.model_copy(update={"parallel": again})).hardware_full


def _readme_rates(tables: Tables) -> Iterator[Row]:
    """Rates from the iteration times, and how far they are from linear in the parameters a GPU."""
    models = {row["case"]: row for row in tables.rows(README_TP)}
    one = models["1B"]

    def rate(row: dict[str, int], batch: int) -> Callable[[float], float]:
        return lambda milliseconds: _computed(readme_model(row, batch)) / row["tp"] / milliseconds / 1e9

    def scaling(row: dict[str, int]) -> Callable[[float, float], float]:
        work = parameter_count(readme_model(row)) / row["tp"] / parameter_count(readme_model(one))
        return lambda single, milliseconds: 100 * work * single / milliseconds

    for case, row in models.items():
        for device, batch in (("v100_batch8", 8), ("a100_batch16", 16)):
            short = device.split("_")[0]
            time, single = row[f"{device}_iter_ms"], one[f"{device}_iter_ms"]
            published = row[f"{short}_TFLOPs_per_gpu"]
            yield from_inputs(README_TP, f"{short} {case}", published, "TFLOP/s", rate(row, batch), time)
            published = row[f"{short}_scaling_pct"]
            yield from_inputs(README_TP, f"{short} {case}, scaling", published, "%", scaling(row), single, time)
    for row in tables.rows(README_DP):
        model, case = models[row["case"]], row["case"]
        yield from_inputs(README_DP, case, row["TFLOPs_per_gpu"], "TFLOP/s", rate(model, 16), row["iter_ms"])
        single = one["a100_batch16_iter_ms"]
        published = row["scaling_pct_vs_1xA100"]
        yield from_inputs(README_DP, f"{case}, scaling", published, "%", scaling(model), single, row["iter_ms"])


def _megatron_turing_rates(tables: Tables) -> Iterator[Row]:
    name = "d_mtnlg_config_and_throughput"
    flops = _computed(gpt(105, 20480, 128, batch=1920))
    for row in tables.rows(name):

        def rate(seconds: float, gpus: int = row["gpus"]) -> float:
            return flops / gpus / seconds / 1e12

        yield from_inputs(name, f"{row['gpus']} GPUs", row["TFLOPs_per_gpu"], "TFLOP/s", rate, row["iter_time_s"])


def _days(tables: Tables) -> Iterator[Row]:
    """Training days: eq. 4 of arXiv:2104.04473 with the exact FLOPs in its table, with 8 T P in its text."""
    name, shapes = "b_ptdp_table2_vs_zero3", {174.6: (96, 12288, 96), 529.6: (105, 20480, 128)}
    for row in tables.rows(name):
        work = _computed(gpt(*shapes[row["params_billion"]])) / 2048 * 300e9

        def days(teraflops: float, gpus: int = row["gpus"], work: float = work) -> float:
            return work / (gpus * teraflops * 1e12) / DAY

        case = f"{row['scheme']} {row['params_billion']}B on {row['gpus']}, days"
        yield from_inputs(name, case, row["days_for_300B_tokens"], "days", days, row["TFLOPs_per_gpu"])
    name = "b_ptdp_text_numbers"
    values = tables.read(name)["values"]
    for case, key, parameters in (("GPT-3", "gpt3", 175e9), ("1T", "oneT", parameter_count(gpt(128, 25600, 160)))):

        def time(rate: float, key: str = key, parameters: float = parameters) -> float:
            return 8 * values[f"{key}_tokens"] * parameters / (values[f"{key}_n"] * rate * 1e12) / DAY

        yield from_inputs(name, f"{case}, days", values[f"{key}_time_days"], "days", time, values[f"{key}_X_TF"])


def _utilisation(tables: Tables) -> Iterator[Row]:
    """MFU and HFU from the iteration times; HFU as the paper counts recomputation."""
    name = "c_actrecomp_table5_end_to_end"
    document = tables.read(name)
    for row in tables.rows(name):
        shape = tables.models_of_2205_05198[row["model"]]
        spec = paper_job(shape)
        flops, gpus = step_flops(spec), shape["gpus"]
        full, present = row["full_recompute_s"], row["present_work_s"]
        for kind, work in (("mfu", flops.model_full), ("hfu", flops.hardware_paper)):

            def percent(seconds: float, work: int = work, gpus: int = gpus) -> float:
                return 100 * work / (gpus * A100_PEAK * seconds)

            yield from_inputs(name, f"{row['model']} {kind}", row[f"{kind}_pct"], "%", percent, present)
        published = row["throughput_increase_pct"]
        case = f"{row['model']}, throughput"
        yield from_inputs(name, case, published, "%", lambda old, new: 100 * (old / new - 1), full, present)
    extra = document["extra"]["530B_dp8_2240gpus"]
    spec = paper_job(tables.models_of_2205_05198["530B"] | {"global_batch": extra["global_batch"]})
    work = step_flops(spec).model_full
    yield from_inputs(
        name,
        "530B on 2240 GPUs mfu",
        extra["mfu_pct"],
        "%",
        lambda seconds: 100 * work / (2240 * A100_PEAK * seconds),
        extra["iter_s"],
    )


def paper_job(shape: dict[str, int], **parallel: Any) -> JobSpec:
    """A model of table 3 of arXiv:2205.05198 under its layout, by default with sequence parallelism and selective
    recomputation."""
    layout: dict[str, Any] = {"tensor": shape["tp"], "pipeline": shape["pp"], "virtual_stages": shape["interleave_m"]}
    layout |= {"schedule": "interleaved" if shape["interleave_m"] > 1 else "1f1b", "recompute": "selective"}
    return gpt(
        shape["layers"],
        shape["hidden"],
        shape["heads"],
        batch=shape["global_batch"],
        micro_batch=shape["micro_batch"],
        **(layout | parallel),
    )


def _selective_recomputation(tables: Tables) -> Iterator[Row]:
    name = "c_actrecomp_table2_activation_formulas"
    examples = tables.read(name)["examples"]
    for case, model in (("GPT-3", "175B"), ("MT-NLG", "530B")):
        spec = paper_job(tables.models_of_2205_05198[model])
        flops, published = step_flops(spec), examples[case]["flops_overhead_pct"]
        # Without the logits, as the paper approximates: 1 + s/(6h).
        overhead = 100 * spec.model.sequence_length / (6 * spec.model.hidden_size)
        yield Row(name, f"{case}, FLOPs of recomputation", published, overhead, "%")
        again = 100 * (flops.hardware_paper / flops.model_full - 1)
        yield Row(name, f"{case}, the same of a whole step", published, again, "%", "absolute", 0.1)
