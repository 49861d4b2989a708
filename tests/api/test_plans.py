"""`POST /v1/plans`, and jobs that leave their layout to the service."""

from dataclasses import replace

import pytest

from manta.service.planner import machines
from manta.service.planner.hardware import HOPPER, MACHINES, Cluster, Core, Gpu, Links
from manta.service.planner.machines import Calibrated, save
from manta.service.planner.refinement import MIN_JOBS
from manta.workers.paths import Paths
from manta.workers.spec.reading import parse_job_spec
from manta.workers.system.resources import node_type
from tests.api.conftest import DOCUMENT
from tests.service.support.measured_jobs import train_on

PLAN = {
    "model": {"layers": 4, "hidden_size": 256, "heads": 4, "sequence_length": 128, "vocabulary_size": 1000},
    "train": {"global_batch_size": 16},
    "cluster": {"accelerator": "a100-80gb", "nodes": 1, "gpus_per_node": 4},
}


@pytest.fixture
def calibrated(service):
    """Stores a calibration in the service's home as long as the test runs; its file."""
    made = []

    def store(calibration):
        made.append(save(Paths.of(service.control.home).machines, calibration))
        return made[-1]

    yield store
    for path in made:
        path.unlink()


def test_plans_come_best_first(service):
    answer = service.http.post("/v1/plans", json=PLAN)
    assert answer.status_code == 200
    plans = answer.json()["plans"]
    assert [plan["step_seconds"] for plan in plans] == sorted(plan["step_seconds"] for plan in plans)
    assert all(plan["parallel"]["tensor"] <= 4 for plan in plans)
    assert service.http.get("/v1/jobs").json()["items"] == []


def test_the_current_cluster_is_that_of_the_service(service):
    answer = service.http.post("/v1/plans", json=PLAN | {"cluster": {"current": True}})
    assert max(plan["gpus"] for plan in answer.json()["plans"]) <= 16


def test_plans_use_the_cpu_calibration_of_the_home(service, calibrated):
    core = Core(9e10, 1.8e11, 30.0, 2e10, 2e-5, 2e9, 4e-5, 0.9)
    asked = PLAN | {"cluster": {"current": True}}
    assert service.http.post("/v1/plans", json=asked).json()["note"] is not None
    path = calibrated(Calibrated(node_type(), "Abacus", 2, core))
    assert service.http.post("/v1/plans", json=asked).json()["note"] is None
    (machine,) = service.http.get("/v1/machines").json()["items"]
    assert (machine["name"], machine["device"], machine["cores"]) == (node_type(), "Abacus", 2)
    assert (machine["this_node"], machine["problem"], machine["constants"]["all_busy"]) == (True, None, 0.9)
    path.write_text("{}")
    (machine,) = service.http.get("/v1/machines").json()["items"]
    assert machine["constants"] is None and "calibrate again" in machine["problem"]
    answer = service.http.post("/v1/plans", json=asked)
    assert answer.status_code == 422 and "calibrate again" in answer.json()["errors"][0]["rule"]


def test_plans_use_the_calibration_of_their_gpu_type(service, calibrated):
    asked = PLAN | {"cluster": {"accelerator": "h100", "nodes": 1, "gpus_per_node": 1}}
    before = service.http.post("/v1/plans", json=asked).json()
    gpu = Gpu(6.8e14, 5e13, 5.5e14, 2.7e12, 2e12, 2.3e-6, 7e-6, 5e10)
    calibration = Calibrated("h100-80gb", "NVIDIA H100", 16, gpu=gpu)
    path = calibrated(calibration)
    after = service.http.post("/v1/plans", json=asked).json()
    assert before["note"] is not None and after["note"] is None
    assert after["plans"][0]["step_seconds"] != before["plans"][0]["step_seconds"]
    (machine,) = service.http.get("/v1/machines").json()["items"]
    assert (machine["name"], machine["this_node"], len(machine["constants"])) == ("h100-80gb", False, 8)
    assert (machine["links"], machine["links_note"]) == (None, None)
    save(path.parent, replace(calibration, links=Links(3.6e11, 3e-6, 0.1), links_problem="NCCL error"))
    (machine,) = service.http.get("/v1/machines").json()["items"]
    assert machine["links"] == {"bandwidth": 3.6e11, "hop_seconds": 3e-6, "error": 0.1}
    assert "not measured (NCCL error): the earlier measurement stays" in machine["links_note"]
    path.write_text("{}")
    assert "calibrate again" in service.http.post("/v1/plans", json=asked).json()["errors"][0]["rule"]


SHAPE = {"layers": 8, "hidden_size": 4096, "heads": 32, "sequence_length": 2048, "vocabulary_size": 51200}
FOR_H100 = {"model": SHAPE, "train": {"global_batch_size": 16, "micro_batch_size": 1, "precision": "bf16"}}
H100 = {"accelerator": "h100", "nodes": 1, "gpus_per_node": 8}


def test_jobs_that_ran_refine_the_plans_for_their_machines(service):
    asked = FOR_H100 | {"cluster": H100, "parallel": {"tensor": 8}}
    before = service.http.post("/v1/plans", json=asked).json()
    assert "default efficiency" in before["note"]
    assert service.http.get("/v1/machines").json()["items"] == []
    document = DOCUMENT | FOR_H100 | {"parallel": {"tensor": 8}}
    spec = parse_job_spec(document | {"train": FOR_H100["train"] | {"steps": 10}})
    for _ in range(MIN_JOBS):
        train_on(service.store, service.submit()["id"], spec, Cluster(MACHINES["h100-80gb"], 1, 8))
    after = service.http.post("/v1/plans", json=asked).json()
    assert after["plans"][0]["step_seconds"] == pytest.approx(2 * before["plans"][0]["step_seconds"], rel=0.15)
    assert f"refined by {MIN_JOBS} jobs" in after["note"] and "product x 0." in after["note"]
    (machine,) = service.http.get("/v1/machines").json()["items"]
    assert (machine["name"], machine["device"], machine["refined_by_jobs"]) == ("h100-80gb", None, MIN_JOBS)
    assert machine["refined"]["product"] == pytest.approx(machine["constants"]["product"] / HOPPER.product)
    assert (len(machine["constants"]), machine["this_node"], machine["warning"]) == (8, False, None)


def test_plan_warns_of_a_disturbed_calibration(service, calibrated):
    gpu = Gpu(6.8e14, 5e13, 5.5e14, 2.7e12, 2e12, 2.3e-6, 7e-6, 5e10)
    calibration = Calibrated("h100-80gb", "NVIDIA H100", 16, gpu=gpu, other_cores=3.2, spread=0.01)
    calibrated(calibration)
    (machine,) = service.http.get("/v1/machines").json()["items"]
    assert machine["warning"].startswith("other processes kept 3.2 of its cores busy") and machine["refined"] == {}


def test_plan_answer_includes_smaller_sizes_on_request(service):
    answer = service.http.post("/v1/plans", json=PLAN | {"sizes": True}).json()
    sizes = answer["sizes"]
    assert (sizes[0]["up_to"], sizes[-1]["gpus"]) == (4, 1)
    assert sizes[0]["step_seconds"] == answer["plans"][0]["step_seconds"]
    assert service.http.post("/v1/plans", json=PLAN).json()["sizes"] is None
    layout = PLAN | {"parallel": {"data": 4}, "elastic": {"min_data": 2}, "sizes": True}
    fixed = service.http.post("/v1/plans", json=layout).json()["sizes"]
    assert [each["parallel"]["data"] for each in fixed] == [4, 3, 2]
    wrong = service.http.post("/v1/plans", json=PLAN | {"sizes": "yes"})
    assert wrong.json()["errors"][0]["path"] == "sizes"


def test_invalid_plan_request_is_refused_with_the_path_of_the_bad_field(service):
    answer = service.http.post("/v1/plans", json=PLAN | {"cluster": {"accelerator": "abacus"}})
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid_spec")
    (error,) = answer.json()["errors"]
    assert error["path"] == "cluster.accelerator" and "known are" in error["rule"]
    theirs = PLAN["model"] | {"family": "custom", "entrypoint": "theirs:build"}
    answer = service.http.post("/v1/plans", json=PLAN | {"model": theirs})
    assert answer.json()["code"] == "unsupported"
    assert service.http.post("/v1/plans", json=[]).status_code == 422


def test_job_with_layout_auto_gets_a_layout_before_it_is_stored(service):
    document = DOCUMENT | {"parallel": "auto"}
    dry = service.http.post("/v1/jobs", params={"dry_run": "true"}, json=document).json()
    assert dry["spec"]["parallel"]["tensor"] >= 1
    job = service.http.post("/v1/jobs", json=document)
    assert job.status_code == 201
    parallel = job.json()["spec"]["parallel"]
    assert parallel["tensor"] * parallel["pipeline"] * parallel["data"] <= 16
    assert parallel == dry["spec"]["parallel"]


def test_job_on_cpu_is_laid_out_for_slots_on_a_gpu_cluster(service, monkeypatch):
    nodes = [
        {
            "alive": True,
            "accelerator": "gpu",
            "total": 8,
            "free": 8,
            "gpu_type": "H100",
            "slots_total": 2,
            "slots_free": 2,
        },
        {"alive": True, "accelerator": "cpu", "total": 2, "free": 2, "slots_total": 2, "slots_free": 2},
    ]
    monkeypatch.setattr(service.control, "cluster", lambda: {"nodes": nodes})
    monkeypatch.setattr(machines, "usable_cores", lambda: 2)  # the peak is that of all cores of a node

    def laid_out(accelerator):
        document = DOCUMENT | {"parallel": "auto", "resources": {"accelerator": accelerator}}
        return service.http.post("/v1/jobs", params={"dry_run": "true"}, json=document).json()

    on_slots, on_gpus = laid_out("cpu"), laid_out("auto")
    parallel = on_slots["spec"]["parallel"]
    assert parallel["tensor"] <= 2 and parallel["tensor"] * parallel["pipeline"] * parallel["data"] <= 4
    assert on_slots["plan"]["mfu_causal"] > 10 * on_gpus["plan"]["mfu_causal"], "of a core's peak, not of an H100's"


LEFT_OUT = {key: DOCUMENT[key] for key in ("name", "model", "data", "train")}


def test_submission_stores_what_was_written_and_says_what_was_decided(service, monkeypatch):
    node = {"alive": True, "accelerator": "gpu", "total": 8, "free": 2, "gpu_type": "H100"}
    monkeypatch.setattr(
        service.control, "cluster", lambda: {"nodes": [node | {"slots_total": 0, "slots_free": 0}], "totals": {}}
    )
    job = service.http.post("/v1/jobs", json=LEFT_OUT).json()
    assert job["spec"]["train"]["precision"] == "bf16" and job["parallel"]["world_size"] <= 2
    assert "2 free GPUs" in job["notes"][0] and "train.precision: bf16" in job["notes"][1]
    assert service.http.get(f"/v1/jobs/{job['id']}/spec").json()["written"] == LEFT_OUT
    (event,) = service.http.get(f"/v1/jobs/{job['id']}/events?type=submitted").json()["items"]
    assert all(note in event["message"] for note in job["notes"])


def test_dry_run_decides_for_the_cluster_that_it_describes_which_a_submission_refuses(service):
    described = LEFT_OUT | {"cluster": {"accelerator": "v100-32gb", "nodes": 1, "gpus_per_node": 4}}
    dry = service.http.post("/v1/jobs?dry_run=true", json=described).json()
    assert "fits on 4 GPUs" in dry["notes"][0] and dry["spec"]["train"]["precision"] == "fp32"
    assert dry["plan"]["gpus"] == dry["layout"]["world_size"]
    here = service.http.post("/v1/jobs?dry_run=true", json=LEFT_OUT).json()
    assert here["layout"]["world_size"] == 1 and here["notes"][0].startswith("1 of 16 slots used")
    (error,) = service.http.post("/v1/jobs", json=described).json()["errors"]
    assert error["path"] == "cluster" and "leave it out" in error["rule"]


def test_plans_use_the_accelerator_that_the_job_asks_for_and_refuse_missing_gpus(service, monkeypatch):
    job = PLAN | {"cluster": {"current": True}, "resources": {"accelerator": "gpu"}}
    on_current = [("/v1/plans", job), ("/v1/jobs", DOCUMENT | {"parallel": "auto", "resources": job["resources"]})]
    for path, document in on_current:
        answer = service.http.post(path, json=document)
        assert answer.status_code == 422
        (error,) = answer.json()["errors"]
        assert error["path"] == "resources.accelerator"
        assert "the job needs GPUs, and this cluster has none" in error["rule"]
    assert service.http.post("/v1/plans", json=job | {"cluster": PLAN["cluster"]}).status_code == 200
    nodes = [{"alive": True, "accelerator": "gpu", "total": 8, "gpu_type": "H100", "slots_total": 2}]
    monkeypatch.setattr(service.control, "cluster", lambda: {"nodes": nodes})
    most = {
        wanted: max(plan["gpus"] for plan in service.http.post("/v1/plans", json=asked).json()["plans"])
        for wanted, asked in (("cpu", job | {"resources": {"accelerator": "cpu"}}), ("gpu", job))
    }
    assert most["cpu"] <= 2 < most["gpu"]


def test_job_that_fits_nowhere_is_refused_with_the_reason(service):
    large = {"layers": 96, "hidden_size": 12288, "heads": 96, "sequence_length": 2048}
    answer = service.http.post("/v1/jobs", json=DOCUMENT | {"model": large, "parallel": "auto"})
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid_spec")
    (error,) = answer.json()["errors"]
    assert error["path"] == "parallel" and "GiB more than" in error["rule"]
