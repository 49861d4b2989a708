"""The number of token ids where a tokenizer's file says it: read once, when a job is submitted, and kept in its spec,
so that everything else takes it from there."""

from __future__ import annotations

from workers.config import JobSpec
from workers.data.tokenizer import file_tokenizer, tokenizer_path
from workers.errors import DataError
from workers.spec.problems import Problem, SpecError
from workers.spec.rules import find_problems


def with_vocabulary(spec: JobSpec) -> JobSpec:
    """`spec` with `data.tokenizer_vocabulary` as its tokenizer's file says. Raises SpecError where that cannot be read
    and the spec itself does not say enough, or where they contradict each other."""
    file = spec.data.tokenizer_file
    if file is None:
        return spec
    try:
        tokenizer = file_tokenizer(spec.data, tokenizer_path(file))
    except DataError as error:
        if spec.data.tokenizer_vocabulary is not None and not tokenizer_path(file).exists():
            return spec  # it may be there where the job runs, which looks again
        raise SpecError([Problem("data.tokenizer", str(error))]) from error
    said, size = spec.data.tokenizer_vocabulary, tokenizer.vocabulary
    if said not in (None, size):
        problem = f"tokenizer_vocabulary is {said}, but {file} has {size} token ids"
        raise SpecError([Problem("data.tokenizer_vocabulary", problem, str(size))])
    resolved = spec.model_copy(update={"data": spec.data.model_copy(update={"tokenizer_vocabulary": size})})
    problems = find_problems(resolved)
    if problems:
        raise SpecError(problems)
    return resolved
