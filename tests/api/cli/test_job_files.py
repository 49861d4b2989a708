"""`manta init` and `manta schema`: what they write is what jobs are submitted with."""

import json

import pytest
import yaml

from manta.api.cli import job_files
from manta.workers.config import JobSpec
from manta.workers.spec.reading import load_job_spec


def test_file_written_by_init_is_a_job_and_is_never_overwritten(manta, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert manta("init").stdout == "wrote job.yaml; submit it with `manta submit job.yaml`\n"
    assert load_job_spec(tmp_path / "job.yaml").name == "job"
    assert "exists already" in manta("init", code=2).stderr
    manta("init", "_a b.yaml")
    assert load_job_spec(tmp_path / "_a b.yaml").name == "a-b"
    assert manta("init", "none/job.yaml", code=2).stderr == "cannot write none/job.yaml: No such file or directory\n"


@pytest.mark.parametrize("start", ["# parallel: {", "  # from: "])
def test_keys_that_init_leaves_commented_out_are_known(start, tmp_path):
    text = job_files.TEMPLATE.format(file="job.yaml", name="job")
    assert start in text
    document = yaml.safe_load(text.replace(start, start.replace("# ", "")))
    JobSpec.model_validate(document)


def test_schema_describes_every_key_of_a_job_file(manta):
    document = json.loads(manta("schema").stdout)
    sections = {"JobSpec": document, **document["$defs"]}
    assert document["properties"].keys() == JobSpec.model_fields.keys() and len(sections) > 10
    silent = [key for each in sections.values() for key, said in each["properties"].items() if not said["description"]]
    assert silent == []
