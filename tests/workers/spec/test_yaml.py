"""YAML as people write it."""

import json

import pytest
import yaml
from engine_specs import spec
from yaml import YAMLError

from manta.workers.spec.problems import SpecError
from manta.workers.spec.yaml import read_yaml


@pytest.mark.parametrize(("text", "number"), [
    ("1e3", 1000.0), ("1E3", 1000.0), ("1e-3", 0.001), ("1e+3", 1000.0), ("2.5e6", 2.5e6), ("2.e2", 200.0),
    (".5e1", 5.0), ("-1e3", -1000.0), ("+1e3", 1000.0), ("1.0e-3", 0.001),
])  # fmt: skip
def test_yaml_number_with_an_exponent_is_a_number(text, number):
    value = read_yaml(f"rate: {text}")["rate"]
    assert isinstance(value, float) and value == number


@pytest.mark.parametrize("text", ["1e", "e3", "1e3x", "1e-", "--1e3", "1.2.3e4", ".e3"])
def test_malformed_yaml_number_is_read_as_text(text):
    assert read_yaml(f"name: {text}") == {"name": text}


@pytest.mark.parametrize("text", ["steps: 1\nseed: 2\nsteps: 3\n", "train: {steps: 1, seed: 2, steps: 3}"])
def test_duplicate_yaml_key_is_refused_with_its_place(text):
    with pytest.raises(yaml.YAMLError, match=r"(?s)duplicate key steps.*line [13], column"):
        read_yaml(text)


@pytest.mark.parametrize(("text", "read_as"), [
    ("010", "as octal"), ("-010", "as octal"), ("+0_17", "as octal"), ("00", "as octal"), ("1:30", "in base 60"),
    ("-1:30.5", "in base 60"), ("1" + ":59" * 300 + ".5", "in base 60"),
])  # fmt: skip
def test_ambiguous_yaml_number_is_refused_with_its_place(text, read_as):
    with pytest.raises(
        yaml.YAMLError, match=rf"(?s)^YAML reads .{{1,40}} {read_as}: write it in decimal.*line 2, column 8"
    ):
        read_yaml(f"seed: 1\nsteps: {text}")


@pytest.mark.parametrize(
    ("text", "value"),
    [("0", 0), ("1_000", 1000), ("0x10", 16), ("0b11", 3), ("00.5", 0.5), ("'010'", "010"), ("'1:30'", "1:30"),
     ("0o10", "0o10"), ("08", "08"), ("1:75", "1:75")],
)  # fmt: skip
def test_unambiguous_yaml_number_or_text_is_unchanged(text, value):
    read = read_yaml(f"- {text}")[0]
    assert (type(read), read) == (type(value), value)


@pytest.mark.parametrize("steps", ["0o10", "08", "yes", "2024-01-01", "'10'"])
def test_spec_refuses_values_that_yaml_does_not_read_as_numbers(steps):
    with pytest.raises(SpecError, match="must be an integer, not"):
        spec(train=read_yaml(f"steps: {steps}"))


def test_yaml_key_overrides_a_merged_one():
    text = "a: &a {x: 1, y: 1}\nin: {b: &b {<<: *a, x: 2}}\nc: {<<: *b, y: 3}"
    assert read_yaml(text)["c"] == {"x": 2, "y": 3}


@pytest.mark.parametrize("off", ["off", "'off'", "false"])
def test_yaml_off_is_accepted_for_settings_that_may_be_off(off):
    sections = read_yaml(f"train: {{fp8: {off}}}\ncheckpoint: {{snapshots: {off}}}")
    job = spec(**sections)
    assert (job.train.fp8, job.checkpoint.snapshots) == ("off", "off")
    assert spec(**sections) == spec(train={"fp8": "off"}, checkpoint={"snapshots": "off"})
    with pytest.raises(SpecError, match=r"must be one of off, tensorwise, rowwise, not True"):
        spec(train=read_yaml("{fp8: on}"))


def _tenfold(levels, line):
    """A few lines whose values stand for ten to the power of `levels`."""
    return "\n".join(["a0: &a0 {k: 1}", *(line(n, ",".join([f"*a{n - 1}"] * 10)) for n in range(1, levels + 1))])


@pytest.mark.parametrize(
    "line",
    [lambda n, ten: f"a{n}: &a{n} [{ten}]", lambda n, ten: f"a{n}: &a{n} {{<<: [{ten}], k{n}: 1}}"],
    ids=["lists", "merge keys"],
)
def test_yaml_aliases_are_limited_in_their_expansion(line):
    few = read_yaml(_tenfold(2, line))
    assert few["a2"] in ([[{"k": 1}] * 10] * 10, {"k": 1, "k1": 1, "k2": 1})
    with pytest.raises(YAMLError, match="aliases"):
        read_yaml(_tenfold(30, line))


@pytest.mark.parametrize("text", ["a: &a [*a]", "a: &a {b: {c: *a}}", "&a {<<: *a}"])
def test_yaml_document_that_contains_itself_is_refused(text):
    with pytest.raises(YAMLError, match="contains itself"):
        read_yaml(text)


@pytest.mark.parametrize(("text", "value"), [("", None), ("# nothing", None), ("a: &a 1\nb: *a", {"a": 1, "b": 1})])
def test_yaml_document_may_be_empty_or_repeat_itself(text, value):
    assert read_yaml(text) == value


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a: 0x" + "f" * 500_000, "a number with 500002 characters; at most 1000 are allowed"),
        ("a: 1" + ":59" * 300_000, "a number with 900001 characters"),
        ("a: 1" + ":59" * 300_000 + ".5", "a number with 900003 characters"),
        ("a: !!int '" + "7" * 5000 + "'", "a number with 5000 characters"),
        ("a: [" + "1," * 60_000 + "]", "it has more than 50000 values"),
        ("- a\n" * 60_000, "it has more than 50000 values"),
    ],
    ids=lambda text: text[:20],
)
def test_huge_yaml_numbers_and_documents_are_refused_before_computing_them(text, why):
    with pytest.raises(YAMLError, match=why):
        read_yaml(text)


def test_largest_yaml_number_read_can_be_written_as_json():
    assert len(json.dumps(read_yaml("a: 0x" + "f" * 998))) > 1000
