"""The page for a GPU, rehearsed on a CPU: each part runs, one that fails is named, and verdicts follow from figures."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import step_gpu
from benchmarks.support.gpu import contestants, page
from benchmarks.support.report import Report


def rehearse(folder: Path, *more: str) -> tuple[dict[str, Any], str]:
    """The JSON and the page of a run on a CPU."""
    out = folder / "gpu.json"
    assert step_gpu.main(["--device", "cpu", "--eager", "--steps", "2", "--out", str(out), *more]) == 0
    return json.loads(out.read_text()), out.with_suffix(".txt").read_text()


def test_step_gpu_benchmark_says_that_it_needs_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(step_gpu.torch.cuda, "is_available", lambda: False)
    assert step_gpu.main([]) == 1
    assert "needs a GPU and found none" in capsys.readouterr().err


def test_step_gpu_benchmark_names_a_failed_part_and_runs_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nand more")

    def absent(*_: object) -> Any:
        raise ModuleNotFoundError("No module named 'megatron'")

    monkeypatch.setattr(contestants, "OTHERS", {"transformers": broken, "megatron_core": absent})
    monkeypatch.setattr(step_gpu.two_ranks, "measure_repair", broken)
    parts = ("--parts", "models", "fp8_rates", "fp8_losses", "repair", "snapshots", "trace")
    report, text = rehearse(tmp_path, "--sizes", "llama_1b5", *parts)
    left_out, figures = report["settings"]["left_out"], report["figures"]
    assert left_out["repair"] == "RuntimeError: CUDA error: an illegal memory access was encountered"
    assert set(left_out) == {"repair", "llama_1b5_transformers", "llama_1b5_megatron_core"}
    assert all(f"  {name}: {why}" in text for name, why in left_out.items())
    assert "A rehearsal on a CPU" in text
    assert figures["llama_1b5_manta_tokens_per_second"]["value"] > 0
    assert figures["llama_1b5_manta_memory_predicted"]["value"] > 0
    for who in ("manta_offload", "manta_offload_state"):
        assert figures[f"llama_1b5_{who}_memory_predicted"]["value"] > 0
    assert figures["snapshot_llama_1b5_copied"]["value"] > 0 and "target" in figures["snapshot_llama_1b5_stall_share"]
    for kind in ("tensorwise", "rowwise"):
        assert figures[f"llama_1b5_manta_fp8_{kind}_to_manta"]["value"] > 0
        assert 0 < figures[f"fp8_{kind}_loss_difference"]["value"] < 0.01
        assert 0.01 < figures[f"fp8_{kind}_gradient_difference"]["value"] < 0.1
        assert figures[f"fp8_product_{kind}_weight_gradient"]["value"] > 0
    assert figures["fp8_product_largest_error"]["value"] < 2**-8, "a rounding to bf16"
    assert figures["bf16_again_gradient_difference"]["value"] < 0.01
    assert "NOT MEASURED  llama_1b5: tokens a second against transformers" in text
    with gzip.open(tmp_path / "gpu-trace.json.gz", "rt") as file:
        assert json.load(file)["traceEvents"]
    assert capsys.readouterr().out.strip() == text.strip()


def test_step_gpu_benchmark_keeps_results_of_an_interrupted_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut_off(*_: object) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(contestants, "OTHERS", {"transformers": cut_off})
    with pytest.raises(KeyboardInterrupt):
        rehearse(tmp_path, "--sizes", "gpt_1b3", "--parts", "models", "--contestants", "manta", "transformers")
    report = json.loads((tmp_path / "gpu.json").read_text())
    assert report["figures"]["gpt_1b3_manta_step"]["value"] > 0
    assert "gpt_1b3 manta " in (tmp_path / "gpu.txt").read_text()


def test_step_gpu_benchmark_reports_memory_held_by_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_gpu.torch.cuda, "mem_get_info", lambda device: (60 * 2**30, 80 * 2**30))
    assert step_gpu._held_by_others(step_gpu.torch.device("cuda", 0)) == 19 * 2**30
    monkeypatch.setattr(step_gpu.torch.cuda, "mem_get_info", lambda device: (79.5 * 2**30, 80 * 2**30))
    assert step_gpu._held_by_others(step_gpu.torch.device("cuda", 0)) == 0
    report = Report("step_gpu", 1)
    report.settings = {"device": "a card", "torch": "2", "rehearsal": False, "sizes": {}, "left_out": {}}
    assert "Others held" not in page.page_of(report)
    report.settings["held_by_others"] = 19 * 2**30
    assert "Others held 20.4 GB of this card" in page.page_of(report)


@pytest.mark.soak
def test_step_gpu_benchmark_reports_the_same_bits_after_a_kill(tmp_path: Path) -> None:
    report, text = rehearse(tmp_path, "--parts", "kill")
    assert report["settings"]["left_out"] == {}
    assert report["figures"]["kill_same_bits"] == {"value": True, "unit": "bool", "target": True, "met": True}
    assert report["figures"]["kill_steps_done_again"]["value"] == 0
    assert "met           kill_same_bits (True, True)" in text


@pytest.mark.parametrize(
    ("reached", "against", "stall", "verdicts"),
    [(0.45, 1.1, 0.01, ["met"] * 3), (0.4499, 1.0999, 0.0101, ["MISSED"] * 3)],
)
def test_step_gpu_verdicts_follow_from_the_figures(
    reached: float, against: float, stall: float, verdicts: list[str]
) -> None:
    report = Report("step_gpu", 1)
    report.settings = {"device": "a card", "torch": "2", "rehearsal": False, "sizes": {}, "left_out": {}}
    report.add("llama_1b5_manta_mfu_causal", reached, "ratio")
    report.add("llama_1b5_manta_to_transformers_causal", against, "ratio")
    report.add("snapshot_llama_1b5_stall_share", stall, "ratio", 0.01)
    lines = [line.split() for line in page.page_of(report).splitlines()]
    lines_of = [
        line[0]
        for line in lines
        if line[1:2] in (["llama_1b5:"], ["snapshot_llama_1b5_stall_share"]) and "NOT" not in line
    ]
    assert lines_of == verdicts
    assert sum(line[:2] == ["NOT", "MEASURED"] for line in lines) == 8
    assert "rehearsal" not in page.page_of(report)


def test_step_gpu_memory_options_compute_the_same_bits(tmp_path: Path) -> None:
    report, text = rehearse(tmp_path, "--parts", "memory")
    assert report["settings"]["left_out"] == {}
    verdicts = {name: each["met"] for name, each in report["figures"].items() if "met" in each}
    assert all(verdicts.values()) and len(verdicts) == 13
    for name in ("offload_half", "offload_state"):
        assert f"met           memory_{name}_same_bits (True, True)" in text
    moved = (
        report["figures"]["memory_plain_predicted"]["value"]
        - report["figures"]["memory_offload_state_predicted"]["value"]
    )
    assert 0 < moved < report["figures"]["memory_offload_state_host_predicted"]["value"]


def test_step_gpu_benchmark_micro_batch_graphs_compute_the_same(tmp_path: Path) -> None:
    report, text = rehearse(tmp_path, "--parts", "graphs", "--sizes", "gpt_125m", "gpt_1b3", "--steps", "1")
    assert report["settings"]["left_out"] == {}
    assert "met           graphs_gpt_125m_same_bits (True, True)" in text
    figures = report["figures"]
    assert (
        figures["graphs_gpt_125m_with_predicted"]["value"] > figures["graphs_gpt_125m_without_predicted"]["value"] > 0
    )
    assert figures["graphs_gpt_125m_with_to_without"]["value"] > 0
    assert "graphs_gpt_1b3_same_bits" not in figures


@pytest.mark.soak
def test_step_gpu_benchmark_runs_every_part_on_a_cpu(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    assert (
        step_gpu.main(["--device", "cpu", "--steps", "1", "--sizes", "gpt_125m", "llama_1b5", "--out", str(out)]) == 0
    )
    report = json.loads(out.read_text())
    assert all(name.endswith(("torchtitan", "megatron_core")) for name in report["settings"]["left_out"])
    for name in ("gpt_125m_manta_eager_step", "gpt_125m_manta_to_transformers", "tensor_2_largest_difference"):
        assert name in report["figures"]
    assert report["figures"]["repair_in_place_works"]["value"]
