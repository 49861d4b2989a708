"""Values that take the place of those in a document."""

import copy

import pytest

from manta.workers.spec.changes import changes_in, combinations_in, with_changes
from manta.workers.spec.problems import SpecError
from manta.workers.spec.reading import parse_job_spec

DOCUMENT = {
    "name": "a",
    "model": {"layers": 2, "hidden_size": 16, "heads": 2, "sequence_length": 8},
    "data": {"source": "python-stdlib", "validation": [{"name": "one"}, {"name": "two"}]},
    "train": {"steps": 10, "optimizer": {"beta1": 0.8}},
    "parallel": "auto",
}


def test_spec_changes_are_parsed_as_in_a_file():
    before = copy.deepcopy(DOCUMENT)
    texts = "train.steps=7 train.optimizer.learning_rate=1e-3 elastic.min_data=1 parallel.data=2 data.validation=[]"
    changed = with_changes(DOCUMENT, changes_in([*texts.split(), "name=b=c", "labels={a: b}", "name=b"]))
    assert before == DOCUMENT
    assert changed["train"] == {"steps": 7, "optimizer": {"beta1": 0.8, "learning_rate": 0.001}}
    assert (changed["elastic"], changed["parallel"]) == ({"min_data": 1}, {"data": 2})
    assert (changed["name"], changed["labels"]) == ("b", {"a": "b"})
    assert parse_job_spec(changed).train.steps == 7


def test_number_in_a_spec_change_is_an_index_of_a_list():
    changed = with_changes(DOCUMENT, {"data.validation.1.name": "three"})
    assert changed["data"]["validation"] == [{"name": "one"}, {"name": "three"}]
    for key in ("2", "x", "-1"):
        with pytest.raises(SpecError, match=rf"^data.validation.{key}.name: {key} is not an index of a list of 2"):
            with_changes(DOCUMENT, {f"data.validation.{key}.name": "three"})


def test_spec_change_of_an_unknown_key_is_refused_as_in_a_file():
    with pytest.raises(SpecError, match=r"^train.stepps: unknown key \(try: steps\)$"):
        parse_job_spec(with_changes(DOCUMENT, changes_in(["parallel={}", "data.validation=[]", "train.stepps=3"])))


@pytest.mark.parametrize("text", ["train.steps", "=3", "train..steps=3", ".=3", ""])
def test_malformed_spec_change_is_refused(text):
    with pytest.raises(SpecError, match=r"is not KEY=VALUE \(try: train.steps=100\)"):
        changes_in([text])


@pytest.mark.parametrize("value", ["[", "2020-13-45", "a: b: c", "'"])
def test_invalid_value_of_a_spec_change_is_reported_with_its_key(value):
    with pytest.raises(SpecError, match=r"^train.steps: .* is not a valid YAML value"):
        changes_in([f"train.steps={value}"])


@pytest.mark.parametrize("document", [None, [], "text"])
def test_spec_changes_leave_a_document_that_is_no_mapping_unchanged(document):
    assert with_changes(document, {"train.steps": 3}) == document


def test_sweep_is_every_combination_of_its_values():
    changes = combinations_in(["train.steps=1,2", "data.paths=[a, b],[c]"])
    steps, paths = [1, 1, 2, 2], [["a", "b"], ["c"]] * 2
    assert changes == [{"train.steps": a, "data.paths": b} for a, b in zip(steps, paths, strict=True)]


@pytest.mark.parametrize(
    ("texts", "why"),
    [
        (["a=1,2", "a=3"], "a: is swept twice"),
        (["a="], "a: has no values to sweep over"),
        (["a=1,[2"], "a: .* is not a valid YAML value"),
        ([f"{key}={','.join(map(str, range(11)))}" for key in "ab"], "121 combinations; .* at most 100"),
        (["a"], "is not KEY=VALUE"),
    ],
)
def test_malformed_sweep_is_refused_with_a_reason(texts, why):
    with pytest.raises(SpecError, match=why):
        combinations_in(texts)
