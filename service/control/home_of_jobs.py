"""The home of the jobs: the folder of their files, which all control planes of one database share."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path

from manta.service.store import Store, installation_tables
from manta.workers.errors import MantaError
from manta.workers.node.folders import mark
from manta.workers.paths import Paths
from manta.workers.storage.locations import Location
from manta.workers.system.daemon_threads import answered_within

log = logging.getLogger(__name__)

MARK_SECONDS = 10.0
"""How long a start waits for each folder; it was most likely marked by an earlier one."""


class JobsElsewhere(MantaError):
    """The files of this database's jobs are not here."""

    def __init__(self, folder: Path):
        super().__init__(
            f"the files of the jobs of this database (checkpoints, logs) are in {folder}, which is not there: mount it "
            "at that path, let a link at that path lead to it, or have checkpoints and logs in an object store "
            "(MANTA_CHECKPOINTS; docs/operations.md, Several control planes)"
        )


class HomeOfJobs:
    """The home of the jobs as seen by one control plane: its own home, until `find` says otherwise."""

    def __init__(self, own: Path, checkpoints: Location | None, logs: Location | None):
        """`own`: the control plane's home; `checkpoints`, `logs`: where these are stored, None: in the home only."""
        self._own, self._checkpoints, self._logs = own, checkpoints, logs
        self._installation = ""
        self.folder = own
        """If no files of jobs are in it, it only serves to name what jobs have on the nodes, and need not exist."""

    @property
    def paths(self) -> Paths:
        """The paths of all jobs."""
        return Paths.of(self.folder, self._checkpoints, self._installation, self._logs)

    def find(self, store: Store) -> None:
        """If the database is shared, the home is that of the control plane that used it first. Raises JobsElsewhere."""
        own = str(Paths.of(self._own).home)
        self.folder = Path(store.write(lambda session: installation_tables.home_of_jobs(session, own)))
        if not self.folder.is_dir() and None in (self._checkpoints, self._logs):
            raise JobsElsewhere(self.folder)

    def mark(self, installation: str) -> None:
        """Let nodes see whether they share the files of this `installation`."""
        self._installation = installation
        paths = self.paths
        is_here = self.folder == self._own or self.folder.is_dir()
        for folder in {paths.home, paths.checkpoint_root}:
            if isinstance(folder, Path) and (folder != paths.home or is_here):
                try:
                    answered_within(MARK_SECONDS, "mark", partial(mark, folder, installation))
                except OSError as error:  # nodes do without what they do not share
                    log.warning(
                        "%s cannot be marked as belonging to this service: %s", folder, str(error) or "no answer"
                    )
