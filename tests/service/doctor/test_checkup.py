"""Everything is looked at, and a look that fails is a finding."""

from manta.service.doctor import Finding
from manta.service.doctor.checkup import checks, findings
from manta.service.settings import Settings
from manta.workers.spec.reading import parse_job_spec


def test_doctor_check_that_raises_is_reported_and_hides_no_other():
    def broken():
        raise RuntimeError("no")

    good = Finding("b", "ok", "fine")
    seen = list(findings({"a": broken, "b": lambda: [good]}))
    assert seen == [Finding("a", "problem", "could not be looked at: RuntimeError: no"), good]


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
