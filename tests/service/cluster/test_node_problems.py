"""Why nothing is placed on a node is a sentence that says what to do."""

import pytest

from manta.service.cluster.errors import problem_of, problem_of_start
from manta.workers.protocol.messages import NodeDescription


def test_node_description_without_problems_has_no_problem_text():
    assert problem_of(NodeDescription("n", "host-1", "10.0.0.7", 1, 2), other_code=False) is None


def test_node_that_does_not_share_the_checkpoint_folder_is_named_with_the_folder():
    about = NodeDescription("n", "host-1", "10.0.0.7", 1, 2, unshared=("/home/u/.manta",))
    problem = problem_of(about, other_code=False)
    assert problem.startswith("node host-1 (10.0.0.7) does not share /home/u/.manta, where the checkpoints would be: ")
    assert "MANTA_CHECKPOINTS" in problem


def test_node_with_another_version_of_the_code_is_named():
    about = NodeDescription("n", "host-1", "10.0.0.7", 1, 2)
    problem = problem_of(about, other_code=True)
    assert problem.startswith("node host-1 (10.0.0.7) runs another Manta") and "MANTA_SHIP_CODE=1" in problem


@pytest.mark.parametrize(("error", "words"), [
    ("ModuleNotFoundError: No module named 'manta'", "node 0123456789ab has no Manta: install the same"),
    ("ModuleNotFoundError: No module named 'manta.workers.node'", "has no Manta"),
    ("No module named 'psutil'", "lacks the Python package 'psutil', which Manta needs there: install it"),
    ("the disk is full", "the daemon of node 0123456789ab does not start: the disk is full"),
])  # fmt: skip
def test_daemon_start_error_says_what_is_missing(error, words):
    assert words in problem_of_start("0123456789abcdef", error)
