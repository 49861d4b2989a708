"""The folders below which jobs may read data and weights. Otherwise anyone who may submit jobs could read any file that
the service's user can read, and probe for files through errors."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from manta.workers.config import DataConfig, JobSpec
from manta.workers.data.first_rows import SOURCES, check_first_rows
from manta.workers.data.read_errors import is_of_the_storage, is_there
from manta.workers.data.sources import CorpusFile, check_data, corpus_files
from manta.workers.data.tokenizer import FILE_NAME as TOKENIZER
from manta.workers.data.tokenizer import TOKENIZER_COMPANIONS, tokenizer_path
from manta.workers.errors import DataError, DataUnreadable
from manta.workers.spec.problems import Problem
from manta.workers.weights.config import ADAPTER_CONFIG
from manta.workers.weights.folder import ADAPTER, INDEX, check_weights, weight_files
from manta.workers.weights.peft import check_adapter


@dataclass(frozen=True)
class DataRoots:
    """The folders; links are followed before a path is compared with them."""

    folders: tuple[Path, ...] | None = None
    """None: everywhere that the service's user may read."""

    @property
    def names(self) -> list[str] | None:
        """The folders, in the form sent to nodes; None: any."""
        return None if self.folders is None else [str(folder) for folder in self.folders]

    def problems(self, spec: JobSpec) -> list[Problem]:
        """The spec's paths that are outside, or relative, which the next service may take for others. Reveals nothing
        about whether they exist."""
        outside = [found for where, path in named_paths(spec).items() if (found := self.problem(where, path))]
        within = f"{spec.data.tokenizer_file}/{TOKENIZER}"  # where that is a folder
        if not outside and spec.data.tokenizer_file is not None and not self._holds(within):
            outside.append(Problem("data.tokenizer", self._rule(within)))
        return outside

    def problem(self, where: str, path: str) -> Problem | None:
        """The problem of `path`, given by the key `where` of a spec; None if it is absolute and inside."""
        if not Path(path).is_absolute():
            return Problem(where, f"{path[:100]!r} is relative; name it by its absolute path on the service's machine")
        return None if self._holds(path) else Problem(where, self._rule(path))

    def check(self, spec: JobSpec, begins: bool = True) -> None:
        """Raise DataError if the spec's corpus or a validation set cannot be read, its weights do not fit its model, or
        a file of any of them is outside. `begins`: whether the job needs its initial weights and adapter, since it has
        no checkpoint."""
        for problem in self.problems(spec):
            raise DataError(f"{problem.path}: {problem.rule}")
        chats = any(each.source == "chat" for each in spec.data.corpora)
        if chats and spec.data.tokenizer_file is not None:
            folder = tokenizer_path(spec.data.tokenizer_file).parent
            self._check_links(str(folder / name) for name in TOKENIZER_COMPANIONS if is_there(folder / name))
        check_data(spec)
        for data in spec.data.corpora:
            self._check_links(file.path for file in self._files(data))
            if data.source in SOURCES:
                check_first_rows(data, corpus_files(data))
        if begins:
            self._check_initial(spec)

    def _check_initial(self, spec: JobSpec) -> None:
        if spec.model.from_ is not None:
            folder = Path(spec.model.from_)
            self._check_links([str(folder / INDEX)])
            self._check_links(map(str, weight_files(folder)))
            check_weights(spec)
        if spec.train.lora is not None and spec.train.lora.from_ is not None:
            self._check_links(f"{spec.train.lora.from_}/{name}" for name in (ADAPTER_CONFIG, ADAPTER))
            check_adapter(spec)

    def problem_of_data(self, spec: JobSpec, begins: bool = True) -> str | None:
        """The problem that `check` finds, in a sentence; None if it finds none, or if that is not known since a disk or
        mount does not work now: the ranks wait for it."""
        try:
            self.check(spec, begins)
        except DataUnreadable:
            return None
        except DataError as error:
            return str(error)
        except OSError as error:
            if not is_of_the_storage(error):
                raise
        return None

    def problem_of_first_rows(self, spec: JobSpec) -> str | None:
        """What is wrong with the first lines of the spec's files, in a sentence; None if nothing is, or if files are
        not there, may not be read, or cannot be read now: all that may change until the job starts."""
        for data in spec.data.corpora:
            try:
                files = corpus_files(data) if data.source in SOURCES else []
            except (DataError, OSError):
                return None
            try:
                check_first_rows(data, [file for file in files if self._holds(file.path)])
            except DataUnreadable:
                return None
            except DataError as error:
                return str(error)
        return None

    def _check_links(self, paths: Iterable[str]) -> None:
        for path in paths:
            if not self._holds(path):
                raise DataError(f"{path} leads elsewhere: {self._rule(path)}")

    def _files(self, data: DataConfig) -> list[CorpusFile]:
        """The files that may be anywhere, unlike those of the standard library."""
        return [] if self.folders is None or data.source == "python-stdlib" else corpus_files(data)

    def _holds(self, path: str) -> bool:
        if self.folders is None:
            return True
        real = Path(os.path.realpath(path))
        return any(real.is_relative_to(os.path.realpath(folder)) for folder in self.folders)

    def _rule(self, path: str) -> str:
        allowed = ", ".join(str(folder) for folder in self.folders or ()) or "none is set"
        return f"{path} is not below any of the folders that jobs may read (MANTA_DATA_ROOTS: {allowed})"


ANYWHERE = DataRoots()


def named_paths(spec: JobSpec) -> dict[str, str]:
    """The files and folders that a spec names, by the key that names them."""
    named = {f"data.paths.{at}": path for at, path in enumerate(spec.data.paths)}
    for number, each in enumerate(spec.data.validation):
        named |= {f"data.validation.{number}.paths.{at}": path for at, path in enumerate(each.paths)}
    if spec.model.from_ is not None:
        named["model.from"] = spec.model.from_
    if spec.train.lora is not None and spec.train.lora.from_ is not None:
        named["train.lora.from"] = spec.train.lora.from_
    if spec.data.tokenizer_file is not None:
        named["data.tokenizer"] = spec.data.tokenizer_file
    if spec.data.template_file is not None:
        named["data.template"] = spec.data.template_file
    return named
