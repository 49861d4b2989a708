"""Which installed packages the models of jobs may come from: code that a job names there is run by the service's
user."""

from __future__ import annotations

from dataclasses import dataclass

from workers.config import JobSpec
from workers.spec.problems import Problem


@dataclass(frozen=True)
class ModelPackages:
    """The packages that the operator permits."""

    names: tuple[str, ...] = ()
    """Packages such as `my_models`, with everything below it, or `my_models.public`; none: no job may bring its own
    model."""

    def problems(self, spec: JobSpec) -> list[Problem]:
        """The problem of a spec whose model comes from elsewhere. Does not check what is installed."""
        entrypoint = spec.model.entrypoint
        if entrypoint is None or any(self._holds(name, entrypoint) for name in self.names):
            return []
        allowed = ", ".join(self.names) or "none is set"
        rule = f"{entrypoint} is of no package that jobs may take models from (MANTA_MODEL_PACKAGES: {allowed})"
        return [Problem("model.entrypoint", rule)]

    @staticmethod
    def _holds(name: str, entrypoint: str) -> bool:
        module = entrypoint.partition(":")[0]
        return module == name or module.startswith(f"{name}.")


NO_MODELS = ModelPackages()
