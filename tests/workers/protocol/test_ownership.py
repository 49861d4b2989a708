"""An agent obeys the owner that took over its job last, and nobody before."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manta.workers.protocol.remote_call import EPOCH, Ownership, StaleOwner
from manta.workers.rank.agent import Agent


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["describe", "reports", "stop", "tell fault", "tell trace"]), st.integers(1, 9) | st.none()
        )
    )
)
def test_ownership_refuses_orders_of_a_lower_epoch(calls):
    ownership, highest = Ownership(), 0
    for method, epoch in calls:
        stale = epoch is not None and epoch < highest and method not in ("describe", "tell fault")
        method, *word = method.split()
        arguments = {"request": {"do": word[0]}} if word else {}
        try:
            ownership.admit(method, arguments if epoch is None else {**arguments, EPOCH: epoch})
            assert not stale
        except StaleOwner:
            assert stale
        highest = max(highest, epoch or 0)
        assert ownership.epoch == highest


async def test_agent_refuses_a_stale_owner_and_says_whom_it_knows(tmp_path):
    agent = Agent("job_1", 0, str(tmp_path), str(tmp_path), None)
    await agent.call("stop", {EPOCH: 3})
    with pytest.raises(StaleOwner, match="stop was refused: its caller has epoch 2, and another one 3 by now"):
        await agent.call("stop", {EPOCH: 2})
    with pytest.raises(StaleOwner):
        await agent.call("reports", {"after": 5, "timeout": 0.0, EPOCH: 2})
    assert (await agent.call("describe", {EPOCH: 2}))["owner_epoch"] == 3
    await agent.call("stop", {})  # a release before, which knows of one control plane only
