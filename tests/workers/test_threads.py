"""How many threads a rank computes with: decided once, and kept with the job."""

import pytest
from engine_specs import spec

from manta.workers.config import JobSpec
from manta.workers.system.threads import decided_threads, stored_threads, threads_of, with_threads


@pytest.mark.parametrize(
    ("nodes", "threads"),
    [
        ([(2, 1)], 2),
        ([(2, 8)], 1),
        ([(16, 3)], 5),
        ([(16, 4), (6, 2)], 3),  # all ranks compute alike
        ([(0, 1)], 1),  # an agent of a release that does not say
        ([], 1),  # all ranks are on GPUs
    ],
)
def test_each_rank_has_cores_of_its_own(nodes, threads):
    assert decided_threads(spec(), nodes) == threads


def test_thread_count_set_by_the_user_is_used_everywhere():
    assert decided_threads(spec(resources={"threads": 3}), [(64, 1)]) == 3
    assert decided_threads(spec(resources={"threads": 3}, train={"deterministic": "elastic"}), []) == 3


def test_jobs_whose_bits_do_not_depend_on_their_replicas_decide_alike_with_few_and_many():
    assert decided_threads(spec(train={"deterministic": "elastic"}), [(64, 1)]) == 1


def test_a_decided_number_is_part_of_the_spec():
    decided = with_threads(spec(), 4)
    assert (decided.resources.threads, threads_of(decided)) == (4, 4)
    assert stored_threads(decided.model_dump(mode="json")) == 4
    assert JobSpec.model_validate(decided.model_dump(mode="json")) == decided
    hash(decided)


@pytest.mark.parametrize("resources", [{"threads": "auto"}, {"accelerator": "cpu"}, {}, None, "what"])
def test_stored_spec_from_before_the_threads_setting_has_one_thread(resources):
    assert threads_of(spec()) == 1
    assert stored_threads({"resources": resources}) == stored_threads({}) == 1
