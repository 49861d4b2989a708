"""What one release stores of a spec, another one reads: with nothing changed, or not at all."""

import pytest

from manta.service.store import jobs
from manta.service.stored_specs import SpecNotUnderstood, stored_spec


@pytest.fixture
def stored(store, submit):
    """Stores a job, and lets another release have added to its spec."""

    def make(spec=None, submitted=None, not_default=None, **sections):
        job_id = submit(**sections).id

        def change(session):
            job = jobs.get(session, job_id)
            for name, more in {"spec": spec, "submitted": submitted, "not_default": not_default}.items():
                merged = {**getattr(job, name)}
                for key, value in (more or {}).items():
                    merged[key] = {**merged.get(key, {}), **value} if isinstance(value, dict) else value
                setattr(job, name, merged)
            return job

        return store.write(change)

    return make


def test_submitted_spec_is_stored_beside_the_full_one(submit):
    job = submit(recovery={"max_restarts": 20}, train={"steps": 7, "optimizer": {"learning_rate": 1}})
    assert job.submitted == {
        "name": "small",
        "model": {"layers": 2, "hidden_size": 16, "heads": 2, "sequence_length": 8},
        "data": {"source": "python-stdlib"},
        "train": {"steps": 7, "optimizer": {"learning_rate": 1.0}},
        "recovery": {"max_restarts": 20},
    }
    assert job.spec["recovery"]["max_restarts"] == 20 and job.spec["train"]["optimizer"]["beta1"] == 0.9
    assert "recovery" not in job.not_default, "20 is the default"
    assert job.not_default["train"] == {"steps": 7, "optimizer": {"learning_rate": 1.0}}


def test_stored_spec_that_is_understood_is_read_unchanged(stored):
    job = stored(spec={"recovery": {"max_restarts": 3}})  # the default of another release
    assert stored_spec(job).spec.recovery.max_restarts == 3
    assert stored_spec(job).left_out == ()


def test_stored_spec_with_a_removed_key_at_its_default_is_read_without_a_warning(stored):
    """0.2.0 stored it in every spec, and not which keys the user wrote."""
    job = stored(spec={"model": {"experts": None}})
    assert "experts" in job.spec["model"]
    job.submitted = job.not_default = None
    assert stored_spec(job).left_out == ()


@pytest.mark.parametrize(
    ("newer", "path"),
    [
        ({"newer": 3}, "newer"),
        ({"newer": {"inner": {"most": 1}}}, "newer"),
        ({"recovery": {"newer": 3}}, "recovery.newer"),
        ({"parallel": {"newer": [1]}}, "parallel.newer"),
    ],
)
def test_stored_spec_drops_an_unknown_key_with_its_default(stored, newer, path):
    job = stored(spec=newer, parallel={"tensor": 2})
    understood = stored_spec(job)
    assert understood.left_out == (path,)
    assert understood.spec.layout.tensor == 2 and understood.spec.train.steps == 10


def test_stored_spec_from_before_the_threads_setting_keeps_one_thread(store, submit):
    job_id = submit().id
    assert stored_spec(store.write(lambda s: jobs.get(s, job_id))).spec.resources.threads == "auto"

    def before(session, **sections):
        job = jobs.get(session, job_id)
        job.spec = {name: value for name, value in job.spec.items() if name != "resources"} | sections
        return job

    for sections in ({"resources": {"accelerator": "cpu"}}, {}):
        spec = stored_spec(store.write(lambda s, more=sections: before(s, **more))).spec
        assert spec.resources.threads == 1
        assert store.write(lambda s: jobs.decide_threads(s, job_id, 8)) == 1, "it is decided"


def test_stored_spec_drops_several_unknown_keys_with_their_defaults(stored):
    job = stored(spec={"newer": 1, "train": {"newer": 1}, "recovery": {"newer": 1}})
    assert sorted(stored_spec(job).left_out) == ["newer", "recovery.newer", "train.newer"]


@pytest.mark.parametrize("said", ["submitted", "not_default"])
@pytest.mark.parametrize("newer", [{"newer": 3}, {"recovery": {"newer": {"inner": 1}}}])
def test_stored_spec_with_an_unknown_key_of_the_user_is_not_understood(stored, newer, said):
    job = stored(spec=newer, **{said: newer})
    with pytest.raises(SpecNotUnderstood, match="newer: Extra inputs are not permitted; a release that does continues"):
        stored_spec(job)


@pytest.mark.parametrize("said", ["submitted", "not_default"])
def test_stored_spec_with_an_unknown_key_and_no_defaults_is_not_understood(store, stored, said):
    job_id = stored(spec={"newer": 1}).id
    job = store.write(lambda s: (setattr(jobs.get(s, job_id), said, None), jobs.get(s, job_id))[1])
    with pytest.raises(SpecNotUnderstood):
        stored_spec(job)


def test_stored_spec_with_an_unknown_value_is_not_understood(stored):
    """Our own default would make another job of it."""
    job = stored(spec={"train": {"attention": "newest"}, "newer": 1})
    with pytest.raises(SpecNotUnderstood, match=r"attention"):
        stored_spec(job)


def test_edits_are_part_of_the_submitted_spec(store, submit):
    job_id = submit().id
    job = store.write(lambda s: jobs.edit(s, job_id, name="other", priority=0))
    assert job.submitted["name"] == job.not_default["name"] == job.spec["name"] == "other"
    assert "priority" not in job.submitted


def test_stored_spec_error_counts_further_problems(stored):
    job = stored(spec={"train": {"attention": "newest", "steps": "many"}, "model": {"heads": "many"}})
    with pytest.raises(SpecNotUnderstood, match=r": model\.heads: .* and 2 more problems; a release that does"):
        stored_spec(job)
