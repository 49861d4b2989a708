"""The number of token ids according to a tokenizer's file: read once, when a job is submitted, and stored in its spec,
which everything else reads."""

from __future__ import annotations

from workers.config import JobSpec
from workers.data.read_errors import at_submission, is_there
from workers.data.tokenizer import file_tokenizer, tokenizer_path
from workers.errors import DataError, DataUnreadable
from workers.spec.problems import Problem, SpecError
from workers.spec.rules import find_problems


def with_vocabulary(spec: JobSpec) -> JobSpec:
    """`spec` with `data.tokenizer_vocabulary` from its tokenizer's file. Raises SpecError if that cannot be read and
    the spec itself does not say enough, or if they contradict each other."""
    file = spec.data.tokenizer_file
    if file is None:
        return spec
    try:
        tokenizer = file_tokenizer(spec.data, tokenizer_path(file))
    except DataError as error:
        if spec.data.tokenizer_vocabulary is not None and _is_elsewhere(file, error):
            return spec  # it may be readable where the job runs, which tries again
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


def _is_elsewhere(file: str, error: DataError) -> bool:
    """Whether `error` says nothing about the tokenizer's content."""
    return isinstance(error, DataUnreadable) or not is_there(tokenizer_path(file))
