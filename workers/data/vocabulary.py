"""The number of token ids according to a tokenizer's file: read once, when a job is submitted, and stored in its spec,
which everything else reads."""

from __future__ import annotations

import errno

from workers.config import JobSpec
from workers.data.read_errors import at_submission
from workers.data.tokenizer import file_tokenizer, tokenizer_path
from workers.errors import DataError, DataUnreadable
from workers.spec.problems import Problem, SpecError
from workers.spec.rules import find_problems

_SAID_OF_THIS_MACHINE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EACCES, errno.EPERM})
"""Errors in reading a file that another machine, or another user, may not have."""


def with_vocabulary(spec: JobSpec) -> JobSpec:
    """`spec` with `data.tokenizer_vocabulary` from its tokenizer's file. Raises SpecError if that cannot be read and
    the spec itself does not say enough, or if they contradict each other."""
    file = spec.data.tokenizer_file
    if file is None:
        return spec
    try:
        tokenizer = file_tokenizer(spec.data, tokenizer_path(file))
    except DataError as error:
        if spec.data.tokenizer_vocabulary is not None and _may_be_readable_elsewhere(error):
            return spec  # where the job runs it is tried again
        raise SpecError([Problem("data.tokenizer", at_submission(error))]) from error
    said, size = spec.data.tokenizer_vocabulary, tokenizer.vocabulary
    if said not in (None, size):
        problem = f"tokenizer_vocabulary is {said}, but {file} has {size} token ids"
        raise SpecError([Problem("data.tokenizer_vocabulary", problem, str(size))])
    resolved = spec.model_copy(update={"data": spec.data.model_copy(update={"tokenizer_vocabulary": size})})
    problems = find_problems(resolved)
    if problems:
        raise SpecError(problems)
    return resolved


def _may_be_readable_elsewhere(error: DataError) -> bool:
    """Whether `error` says nothing about the tokenizer's content, nor about its name."""
    cause = error.__cause__
    return isinstance(error, DataUnreadable) or (isinstance(cause, OSError) and cause.errno in _SAID_OF_THIS_MACHINE)
