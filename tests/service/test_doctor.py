"""Whether a machine, its packages, its database and the place of its checkpoints are suitable, check by check."""

import importlib.metadata
import resource
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from manta.service import doctor
from manta.service.cluster.ray_private import TRIED_WITH
from manta.service.doctor import Finding, checks, findings
from manta.service.planner import torch_facts
from manta.service.settings import Settings
from manta.service.store import Store
from manta.service.store.location import sqlite_url
from manta.service.words import byte_count
from manta.workers.accounting.activation_bytes import host_bytes_of_rank
from manta.workers.accounting.flops import rank_parameters
from manta.workers.accounting.state_costs import checkpoint_bytes, copies_bytes, host_state_bytes, snapshot_bytes
from manta.workers.paths import Paths
from manta.workers.spec.reading import parse_job_spec
from manta.workers.storage.locations import ObjectPath

GIB = 1 << 30


def job(keeps="shared_memory", **parallel):
    return parse_job_spec(
        {
            "name": "big",
            "model": {"layers": 2, "hidden_size": 512, "heads": 8, "sequence_length": 64},
            "data": {"source": "python-stdlib"},
            "train": {"steps": 10, "global_batch_size": 8, "micro_batch_size": 1},
            "parallel": parallel,
            "checkpoint": {"snapshots": keeps},
        }
    )


@pytest.fixture
def room(monkeypatch):
    """Sets what a file system has, in all and free."""

    def is_there(total, free, available=1 << 60):
        monkeypatch.setattr(doctor.shutil, "disk_usage", lambda folder: SimpleNamespace(total=total, free=free))
        monkeypatch.setattr(doctor, "memory_available", lambda: available)

    return is_there


def verdicts(findings):
    return [(each.verdict, each.message) for each in findings]


def test_doctor_accepts_this_python_version():
    (seen,) = doctor.python()
    assert seen.verdict == "ok" and seen.message.startswith("Python 3.")


@pytest.mark.parametrize("version", [(3, 10), (3, 14)])
def test_doctor_reports_an_unsupported_python_version(monkeypatch, version):
    monkeypatch.setattr(doctor, "sys", SimpleNamespace(version_info=(*version, 0), version="3.x", executable="/python"))
    (seen,) = doctor.python()
    assert seen.verdict == "problem" and "3.11, 3.12 or 3.13" in seen.advice


def test_doctor_warns_of_the_small_shared_memory_of_containers(room):
    room(64 << 20, 64 << 20)
    (seen,) = doctor.shared_memory(None)
    assert seen.verdict == "warning" and "64.0 MiB free of 64.0 MiB" in seen.message and "--shm-size" in seen.advice
    room(8 * GIB, 8 * GIB)
    assert [each.verdict for each in doctor.shared_memory(None)] == ["ok"]


def test_doctor_compares_shared_memory_with_the_snapshots_of_a_job(room):
    needed = snapshot_bytes(job())
    room(8 * GIB, needed - 1)
    (seen,) = doctor.shared_memory(job())
    assert seen.verdict == "problem" and f"the snapshots of big need {byte_count(needed)}" in seen.message
    room(8 * GIB, needed)
    assert [each.verdict for each in doctor.shared_memory(job())] == ["ok"]
    room(8 * GIB, 8 * GIB, available=needed - 1)
    assert [each.verdict for each in doctor.shared_memory(job())] == ["problem"], (
        "it may be promised more than there is"
    )


@pytest.mark.parametrize(("had", "verdict"), [(10**12, "ok"), (10**6, "problem")])
def test_doctor_compares_offloaded_activations_with_available_memory(monkeypatch, had, verdict):
    monkeypatch.setattr(doctor, "memory_available", lambda: had)
    large = job("off", offload_layers=2)
    large = large.model_copy(update={"model": large.model.model_copy(update={"sequence_length": 8192})})
    (seen,) = doctor.offloaded(large)
    assert seen.verdict == verdict and " for activations and " in seen.message
    assert verdict == "ok" or "fewer parallel.offload_layers" in seen.advice
    assert list(doctor.offloaded(job())) == list(doctor.offloaded(None)) == []
    nothing = large.model_copy(update={"train": large.train.model_copy(update={"frozen": ("embedding", "layers.0-1")})})
    assert all("takes ," not in seen.message for seen in doctor.offloaded(nothing))


@pytest.mark.parametrize(
    ("keeps", "policy", "copies", "advice"),
    [("auto", "roll_back", 24, "another policy than roll_back"), ("off", "fail", 12, "checkpoint.snapshots: auto")],
)
def test_doctor_compares_roll_back_copies_with_available_memory(monkeypatch, keeps, policy, copies, advice):
    spec = job(keeps)
    spec = spec.model_copy(update={"recovery": spec.recovery.model_copy(update={"nonfinite": policy})})
    needed = copies * sum(rank_parameters(spec)) + snapshot_bytes(spec)
    for had, verdict in ((needed, "ok"), (needed - 1, "problem")):
        monkeypatch.setattr(doctor, "memory_available", lambda had=had: had)
        (seen,) = doctor.offloaded(spec, 1)
        assert seen.verdict == verdict
        assert f" for copies of its state, 1 of them {byte_count(needed)}" in seen.message
    assert advice in seen.advice


def with_state_on_the_host(spec):
    optimizer = spec.train.optimizer.model_copy(update={"offload": True})
    return spec.model_copy(update={"train": spec.train.model_copy(update={"optimizer": optimizer})})


@pytest.mark.parametrize(("gpus", "ranks"), [(0, 4), (2, 2), (8, 4)])
def test_doctor_compares_offloaded_optimizer_states_with_available_memory(monkeypatch, gpus, ranks):
    there = with_state_on_the_host(job(data=4))
    needed = ranks * host_state_bytes(there, 0) + snapshot_bytes(there) * ranks // 4
    for had, verdict in ((needed, "ok"), (needed - 1, "problem")):
        monkeypatch.setattr(doctor, "memory_available", lambda had=had: had)
        (seen,) = doctor.offloaded(there, gpus)
        assert seen.verdict == verdict
        assert f"for the optimizer's state, {ranks} of them {byte_count(needed)}, with " in seen.message
    assert "train.optimizer.offload: false" in seen.advice


def test_doctor_counts_host_memory_of_the_largest_rank_not_of_two_stages(monkeypatch):
    """Most activations are on another stage than most of the state."""
    spec = with_state_on_the_host(job("off", pipeline=2, offload_layers=2))
    model = spec.model.model_copy(update={"layers": 4})
    spec = spec.model_copy(update={"model": model, "parallel": spec.layout.model_copy(update={"stage_layers": (1, 3)})})
    (seen,) = doctor.offloaded(spec, 1)
    each = [
        host_bytes_of_rank(spec, stage, spec.micro_batches) + host_state_bytes(spec, stage) + copies_bytes(spec, stage)
        for stage in (0, 1)
    ]
    assert f"1 of them {byte_count(max(each))};" in seen.message


def test_doctor_accepts_snapshots_outside_shared_memory(room):
    needed = snapshot_bytes(job())
    room(64 << 20, needed - 1)
    (seen,) = doctor.shared_memory(job("auto"))
    assert seen.verdict == "ok" and "in the memory of the nodes' daemons" in seen.message
    room(64 << 20, 64 << 20, available=needed - 1)
    for keeps in ("auto", "node_memory"):
        (seen,) = doctor.shared_memory(job(keeps))
        assert seen.verdict == "problem" and "checkpoint.snapshots: off" in seen.advice
    (seen,) = doctor.shared_memory(job("off"))
    assert seen.verdict == "warning" and "take" not in seen.message


def test_doctor_reports_missing_shared_memory_as_a_problem(tmp_path):
    (seen,) = doctor.shared_memory(None, tmp_path / "none")
    assert seen.verdict == "problem" and "mount a tmpfs" in seen.advice


@pytest.mark.parametrize(("soft", "hard", "verdict", "advice"), [
    (1024, 1 << 20, "warning", "ulimit -n 4096"), (1024, 1024, "warning", "nofile"), (4096, 4096, "ok", ""),
])  # fmt: skip
def test_doctor_warns_of_a_low_limit_of_open_files(monkeypatch, soft, hard, verdict, advice):
    given = {resource.RLIMIT_NOFILE: (soft, hard), resource.RLIMIT_MEMLOCK: (-1, -1)}
    monkeypatch.setattr(doctor.resource, "getrlimit", given.__getitem__)
    (seen,) = doctor.limits()
    assert seen.verdict == verdict and advice in seen.advice


def test_doctor_compares_the_disk_with_the_checkpoints_of_a_job(room, tmp_path):
    kept = (job().checkpoint.keep + 1) * checkpoint_bytes(job())
    room(100 * GIB, GIB + kept - 1)
    home = tmp_path / "not" / "yet"
    assert [each.verdict for each in doctor.disk(home, job(), False)] == ["warning"]
    assert [each.verdict for each in doctor.disk(home, job(), True)] == ["ok"]
    room(100 * GIB, GIB + kept)
    (seen,) = doctor.disk(home, job(), False)
    assert seen.verdict == "ok" and seen.message.startswith(f"{tmp_path} has ")


def test_doctor_ignores_folders_that_do_not_exist_yet(tmp_path):
    assert list(doctor.folders(Paths.of(tmp_path / "home"))) == []


def test_doctor_reports_folders_that_others_can_access(tmp_path, monkeypatch):
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    assert verdicts(doctor.folders(Paths.of(home))) == [("ok", f"{home} (home) is accessible to this user only")]
    home.chmod(0o755)
    (seen,) = doctor.folders(Paths.of(home))
    assert (seen.verdict, seen.advice) == ("warning", f"chmod 700 {home}") and "mode 755" in seen.message
    uid = doctor.os.getuid()
    monkeypatch.setattr(doctor.os, "getuid", lambda: uid + 1)
    assert [each.verdict for each in doctor.folders(Paths.of(home))] == ["problem"]


def test_doctor_warns_of_a_machine_without_a_network(monkeypatch):
    monkeypatch.setattr(doctor, "outward_address", lambda: "127.0.0.1")
    assert [each.verdict for each in doctor.network()] == ["warning"]
    monkeypatch.setattr(doctor, "outward_address", lambda: "192.0.2.7")
    assert verdicts(doctor.network()) == [("ok", "other machines reach this one at 192.0.2.7")]


def test_doctor_check_that_raises_is_reported_and_hides_no_other():
    def broken():
        raise RuntimeError("no")

    good = Finding("b", "ok", "fine")
    seen = list(findings({"a": broken, "b": lambda: [good]}))
    assert seen == [Finding("a", "problem", "could not be checked: RuntimeError: no"), good]


def test_doctor_checks_the_data_of_a_job(tmp_path):
    (tmp_path / "here").write_text("text")
    document = {
        "model": {"layers": 1, "hidden_size": 8, "heads": 1, "sequence_length": 8},
        "data": {
            "source": "text",
            "paths": [str(tmp_path / "here"), str(tmp_path / "gone")],
            "validation": [{"name": "held_out", "paths": [str(tmp_path / "gone too")]}],
        },
        "train": {"steps": 1, "validate_every": 1},
    }
    job = parse_job_spec(document)
    data = checks(Settings(tmp_path), job)["data"]
    assert [each.verdict for each in data()] == ["ok", "problem", "problem"]
    elsewhere = checks(Settings(tmp_path, data_roots=(tmp_path / "roots",)), job)["data"]
    assert {each.verdict for each in elsewhere()} == {"problem"}
    in_one_of_them = checks(Settings(tmp_path, data_roots=(tmp_path / "roots", tmp_path)), job)["data"]
    assert [each.verdict for each in in_one_of_them()] == ["ok", "problem", "problem"]
    assert list(checks(Settings(tmp_path), None)["data"]()) == []


CPU = {"version": "2.13.0+cpu", "cuda": None, "nccl": None, "devices": []}
CUDA = {"version": "2.14.1", "cuda": "13.0", "nccl": "2.29.1", "devices": ["H100", "H100"]}


def test_doctor_finds_all_required_packages_of_this_environment():
    (seen,) = doctor.requirements()
    assert seen.verdict == "ok" and seen.message.startswith("manta-train ")
    (seen,) = doctor.ray()
    assert seen.verdict == "ok"


def test_doctor_names_missing_and_outdated_packages(monkeypatch):
    wanted = ["numpy>=99", "no-such-package>=1", "pydantic>=2", "moto>=99; extra == 'dev'"]
    monkeypatch.setattr(doctor.importlib.metadata, "requires", lambda name: wanted)
    seen = list(doctor.requirements())
    numpy = importlib.metadata.version("numpy")
    assert [each.message for each in seen] == [f"numpy is {numpy}, not >=99", "no-such-package is not installed"]
    assert {each.verdict for each in seen} == {"problem"}


def test_doctor_warns_of_a_source_folder_without_an_installation(monkeypatch):
    monkeypatch.setattr(
        doctor.importlib.metadata, "requires", Mock(side_effect=importlib.metadata.PackageNotFoundError)
    )
    assert [each.verdict for each in doctor.requirements()] == ["warning"]


@pytest.mark.parametrize(
    ("version", "verdict"),
    [("2.51.9", "warning"), (TRIED_WITH[0], "ok"), ("2.55.1", "ok"), (TRIED_WITH[1], "ok"), ("2.99.0", "warning")],
)
def test_doctor_warns_of_an_untested_ray_version(monkeypatch, version, verdict):
    monkeypatch.setattr(doctor.importlib.metadata, "version", lambda name: version)
    (seen,) = doctor.ray()
    assert seen.verdict == verdict
    assert (verdict == "warning") == all(each in seen.advice for each in TRIED_WITH)


@pytest.mark.parametrize(("about", "gpus", "verdict", "said"), [
    (CPU, 0, "ok", "ranks use CPU slots"),
    (CPU, 2, "problem", "is a CPU build, and this machine has 2 GPUs"),
    (CUDA, 2, "ok", "CUDA 13.0, driver 570.1, NCCL 2.29.1; GPUs: H100, H100"),
    (CUDA, 3, "problem", "it sees 2 of 3 GPUs"),
    ({**CUDA, "devices": []}, 1, "problem", "it sees 0 of 1 GPUs"),
    (CUDA, 0, "ok", "this machine has no GPU"),
])  # fmt: skip
def test_torch_has_to_see_the_gpus_of_the_machine(about, gpus, verdict, said):
    seen = doctor.judge_torch(about, gpus, "570.1")
    assert seen.verdict == verdict and said in seen.message


TORCH = """
__version__ = "2.13.0+cpu"
class version:
    cuda = None
class cuda:
    is_available = staticmethod(lambda: False)
"""
"""As much of it as is asked, in milliseconds."""


def test_doctor_imports_torch_in_a_separate_process(tmp_path, monkeypatch):
    (tmp_path / "torch.py").write_text(TORCH)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (seen,) = doctor.torch(gpus=0)
    assert seen == doctor.judge_torch(CPU, 0, None)


@pytest.mark.soak
def test_doctor_accepts_the_torch_of_this_environment():
    (seen,) = doctor.torch(gpus=0)
    assert seen.verdict == "ok" and seen.message.startswith("torch 2.")


def test_a_torch_that_cannot_be_imported_is_quoted(monkeypatch):
    monkeypatch.setattr(torch_facts, "_ASK", "raise ImportError('libcudart.so.13: no such file')")
    (seen,) = doctor.torch(gpus=0)
    assert seen.verdict == "problem" and seen.message.endswith("ImportError: libcudart.so.13: no such file")


def test_a_control_plane_needs_no_torch(monkeypatch):
    version = importlib.metadata.version

    def without_torch(name):
        if name == "torch":
            raise importlib.metadata.PackageNotFoundError
        return version(name)

    monkeypatch.setattr(doctor.importlib.metadata, "version", without_torch)
    (requirements,), (torch,) = doctor.requirements(), doctor.torch(gpus=8)
    assert (requirements.verdict, torch.verdict) == ("ok", "warning")
    assert "but no ranks" in torch.message


def test_doctor_reads_the_version_of_the_gpu_driver(tmp_path):
    file = tmp_path / "version"
    file.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.124.06  Wed Feb 26 2026\nGCC version: 12\n")
    assert doctor.driver_version(file) == "570.124.06"
    assert doctor.driver_version(tmp_path / "none") is None


def test_doctor_accepts_a_database_that_does_not_exist_yet(tmp_path):
    (seen,) = doctor.database(Settings(tmp_path / "home"))
    assert seen.verdict == "ok" and "is empty; the first `manta up` creates its tables" in seen.message
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize(("kind", "verdicts"), [("nfs4", ["warning", "ok"]), ("ext4", ["ok"])])
def test_doctor_warns_of_a_database_file_on_a_network_file_system(tmp_path, monkeypatch, kind, verdicts):
    (tmp_path / "a b").mkdir()
    mounts = tmp_path / "mounts"
    at = str(tmp_path / "a b").replace(" ", "\\040")
    mounts.write_text(f"overlay / overlay rw 0 0\nserver:/x {at} {kind} rw 0 0\ntmpfs {at}/c tmpfs rw 0 0\n")
    monkeypatch.setattr(doctor, "MOUNTS", mounts)
    assert [each.verdict for each in doctor.database(Settings(home=tmp_path / "a b"))] == verdicts


def test_doctor_accepts_an_empty_database(tmp_path):
    (tmp_path / "manta.db").touch()
    (seen,) = doctor.database(Settings(tmp_path))
    assert seen.verdict == "ok" and "is empty" in seen.message


def test_doctor_reports_a_home_whose_database_was_not_named(tmp_path):
    (tmp_path / "database").write_text("postgresql://me:***@there/manta")
    (seen,) = doctor.database(Settings(tmp_path))
    assert seen.verdict == "problem" and "are in another database, postgresql://me:***@there/manta" in seen.message
    assert seen.advice == "name it with --database or MANTA_DATABASE_URL"
    (tmp_path / "database").write_text(sqlite_url(tmp_path / "manta.db"))
    assert [each.verdict for each in doctor.database(Settings(tmp_path))] == ["ok"]


def test_a_database_of_this_release_answers(database_url, tmp_path):
    seen = list(doctor.database(Settings(tmp_path, database_url=database_url)))
    assert {each.verdict for each in seen} == {"ok"}
    assert [each.subject for each in seen] == ["database", "clock"][: len(seen)]
    assert seen[0].message.endswith("revision " + Store(database_url).revision)


def test_doctor_warns_of_a_database_of_another_release(store, database_url, tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "newest_revision", lambda: "9999")
    assert next(iter(doctor.database(Settings(tmp_path, database_url=database_url)))).verdict == "warning"


def test_doctor_reports_an_unreachable_database_without_its_password(tmp_path):
    url = "postgresql://me:secret@127.0.0.1:9/manta"
    (seen,) = doctor.database(Settings(tmp_path, database_url=url))
    assert seen.verdict == "problem" and "secret" not in seen.message


@pytest.mark.parametrize(("seconds", "verdict"), [(0.2, "ok"), (-6.0, "warning"), (3600.0, "warning")])
def test_doctor_reports_clocks_that_differ_too_much(seconds, verdict):
    assert doctor._skew("the database", seconds).verdict == verdict


def test_doctor_tests_the_checkpoint_folder_and_leaves_nothing_there(tmp_path):
    assert [each.verdict for each in doctor.checkpoints(None)] == ["ok"]
    (seen,) = doctor.checkpoints(tmp_path / "checkpoints")
    assert seen.verdict == "ok" and list((tmp_path / "checkpoints").iterdir()) == []


def test_doctor_reports_a_checkpoint_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    (seen,) = doctor.checkpoints(tmp_path / "file" / "below")
    assert seen.verdict == "problem" and "Not a directory" in seen.message


def test_doctor_reports_an_object_store_that_does_not_answer(monkeypatch):
    class Away:
        def make_folder(self, folder):
            pass

        def write_atomically(self, file, content):
            raise OSError("s3://bucket: no answer")

    monkeypatch.setattr(doctor, "files_of", lambda place: Away())
    (seen,) = doctor.checkpoints(ObjectPath("s3", "bucket"))
    assert seen.verdict == "problem" and "no answer" in seen.message and "credentials" in seen.advice


def test_doctor_checks_the_log_folder_unless_it_is_that_of_checkpoints(tmp_path):
    settings = Settings(tmp_path, checkpoints=tmp_path / "there", logs=tmp_path / "there")
    assert [each.message for each in doctor.logs(settings)] == [f"in {tmp_path}/there, with the checkpoints"]
    (seen,) = doctor.logs(replace(settings, logs=tmp_path / "logs"))
    assert (seen.subject, seen.verdict) == ("logs", "ok")
    (tmp_path / "file").touch()
    (seen,) = doctor.logs(replace(settings, logs=tmp_path / "file" / "below"))
    assert (seen.subject, seen.verdict) == ("logs", "problem")
    assert "home only" in next(doctor.logs(Settings(tmp_path))).message
