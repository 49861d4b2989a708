"""What tests of the queue do to its nodes and jobs."""

from manta.service.store import jobs, leases

LARGE = {"steps": 2, "global_batch_size": 24, "micro_batch_size": 1}
"""`train` of jobs of many replicas."""


def free(nodes):
    """Slots of the node that are free."""
    return nodes.slots["node"] - nodes.used["node"]


def has(nodes, total, free=None):
    """The node has so many slots, of which so many are free (None: all)."""
    nodes.slots["node"], nodes.used["node"] = total, total - (total if free is None else free)


def job_now(store, job):
    """The job as the database has it."""
    return store.query(jobs.get, job.id)


def cancel(store, job):
    """As its user asks for it."""
    store.write(lambda session: jobs.request_cancel(session, job.id))


def resize(store, job, replicas):
    """As its user asks for it."""
    store.write(lambda session: jobs.request_resize(session, job.id, replicas))


def owned_by(store, plane):
    """The jobs of a control plane."""
    return store.query(leases.owned, plane)
