"""Whether the data of jobs is there, and below which folders it may be."""

import asyncio
from pathlib import Path

import pytest
from tokenizer_files import byte_level

from manta.service.control import data_checks
from manta.service.control.data_checks import DataChecks, DataTimeout
from manta.service.control.options import roots_of
from manta.workers.data.roots import DataRoots
from manta.workers.errors import DataError

AWAY = {"source": "text", "paths": ["/away"]}


async def test_data_check_result_is_not_cached(make_spec):
    answers = iter([None, "it is gone", None])

    async def check(_spec, _begins):
        return next(answers)

    looks = DataChecks(check)
    assert [await looks.problem("job", make_spec()) for _ in range(3)] == [None, "it is gone", None]


async def test_data_checks_of_jobs_that_left_the_queue_are_cancelled(make_spec, monkeypatch):
    monkeypatch.setattr(data_checks, "POLL_SECONDS", 0.0)
    ended = []

    async def check(spec, _begins):
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(spec.name)

    looks = DataChecks(check)
    for name in ("kept", "gone"):
        with pytest.raises(DataTimeout):
            await looks.problem(name, make_spec(name=name, data={"source": "text", "paths": [f"/{name}"]}))
        await asyncio.sleep(0)
    looks.keep_only(["kept"])
    await asyncio.sleep(0)
    assert list(ended) == ["gone"]


def test_second_check_on_a_silent_file_system_loses_its_turn(make_spec, monkeypatch):
    monkeypatch.setattr(data_checks, "POLL_SECONDS", 0.0)

    async def check(_spec, _begins):
        await asyncio.Event().wait()

    async def keeps_turn(looks, job, **data):
        with pytest.raises(DataTimeout) as silent:
            await looks.problem(job, make_spec(data=AWAY | data))
        return silent.value.keeps_turn

    async def body():
        looks = DataChecks(check)
        turns = [await keeps_turn(looks, "first")]
        looks._under_way["first"].began -= data_checks.TURN_SECONDS
        return [*turns, await keeps_turn(looks, "first"), await keeps_turn(looks, "second", paths=["/beside"])]

    assert asyncio.run(body()) == [True, False, False]


TRAIN = {"steps": 5, "validate_every": 5}


@pytest.fixture
def folders(tmp_path):
    """A folder that may be read, and one beside it whose name begins alike."""
    for name in ("data", "data-of-others"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "text.txt").write_text("words " * 100)
    return tmp_path / "data", tmp_path / "data-of-others"


def spec_of(make_spec, *paths):
    return make_spec(data={"source": "text", "paths": [str(path) for path in paths]})


def test_paths_below_the_data_roots_are_allowed(folders, make_spec):
    data, others = folders
    roots = DataRoots((others, data))
    for path in (data, data / "text.txt", data / "." / "text.txt"):
        spec = spec_of(make_spec, path)
        assert roots.problems(spec) == []
        roots.check(spec)


@pytest.mark.parametrize(
    "outside", ["../data-of-others", "../data-of-others/text.txt", "..", "../nowhere", "/etc/passwd"]
)
def test_paths_outside_the_data_roots_are_refused_whether_or_not_they_exist(folders, make_spec, outside):
    data, _ = folders
    spec = spec_of(make_spec, data, data / outside)
    (problem,) = DataRoots((data,)).problems(spec)
    assert problem.path == "data.paths.1"
    assert (
        problem.rule
        == f"{data / outside} is not below any of the folders that jobs may read (MANTA_DATA_ROOTS: {data})"
    )
    with pytest.raises(DataError, match=r"data\.paths\.1: .* is not below"):
        DataRoots((data,)).check(spec)


GOOD = '{"text": "a"}\n'


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (GOOD, None),
        (GOOD * 9000 + "{", None),  # which is found while it is tokenized
        (GOOD + "{", "line 2 (byte 14): not valid JSON"),
        (GOOD + '{"words": "a"}', "no key 'text', only 'words': set data.text_key"),
        (None, None),  # the file may appear until the job starts
    ],
)
def test_mistake_in_the_first_lines_of_a_file_is_found_at_submission(tmp_path, make_spec, content, problem):
    file = tmp_path / "a.jsonl"
    if content is not None:
        file.write_text(content)
    spec = make_spec(data={"source": "jsonl", "paths": [str(file)], "tokenizer": "bytes"})
    found = DataRoots((tmp_path,)).problem_of_first_rows(spec)
    assert found is None if problem is None else (str(file) in found and problem in found)
    assert content is None or DataRoots().problem_of_data(spec) == found, "it is also found when the job is to start"
    assert DataRoots((tmp_path / "elsewhere",)).problem_of_first_rows(spec) is None, "nothing outside is read"


@pytest.mark.parametrize("roots", [DataRoots(), DataRoots((Path.cwd(),))])
def test_data_roots_refuse_relative_paths(make_spec, roots):
    (problem,) = roots.problems(spec_of(make_spec, "pyproject.toml"))
    assert problem.path == "data.paths.0"
    assert problem.rule == "'pyproject.toml' is relative; name it by its absolute path on the service's machine"


def test_data_roots_apply_to_validation_sets(folders, make_spec):
    data, others = folders
    sets = [
        {"name": "one", "paths": [str(data / "text.txt")]},
        {"name": "two", "paths": [str(data), str(others / "text.txt")]},
    ]
    corpus = {"source": "text", "paths": [str(data)], "validation": sets}
    spec = make_spec(data=corpus, train=TRAIN)
    (problem,) = DataRoots((data,)).problems(spec)
    assert problem.path == "data.validation.1.paths.1"
    with pytest.raises(DataError, match=r"data\.validation\.1\.paths\.1: .* is not below"):
        DataRoots((data,)).check(spec)
    DataRoots((data, others)).check(spec)
    (data / "way-out.txt").symlink_to(others / "text.txt")
    inside = {"source": "python-stdlib", "validation": [{"name": "one", "paths": [str(data)]}]}
    with pytest.raises(DataError, match=r"way-out\.txt leads elsewhere"):
        DataRoots((data,)).check(make_spec(data=inside, train=TRAIN))


def test_data_roots_are_checked_after_following_links(folders, make_spec):
    data, others = folders
    (data / "way-out").symlink_to(others)
    (data / "file.txt").symlink_to(others / "text.txt")
    assert DataRoots((data,)).problems(spec_of(make_spec, data / "way-out"))
    with pytest.raises(DataError, match="way-out is a link to a folder elsewhere"):
        DataRoots((data,)).check(spec_of(make_spec, data))
    (data / "way-out").unlink()
    with pytest.raises(DataError, match=r"file\.txt leads elsewhere"):
        DataRoots((data,)).check(spec_of(make_spec, data))
    linked = data.parent / "linked"
    linked.symlink_to(data)
    assert DataRoots((linked,)).problems(spec_of(make_spec, data / "text.txt")) == []


def test_data_roots_always_allow_the_standard_library(make_spec):
    spec = make_spec(data={"source": "python-stdlib"})
    assert DataRoots(()).problems(spec) == []
    DataRoots(()).check(spec)


@pytest.mark.parametrize(
    ("set_to", "host", "folders"),
    [
        (None, "127.0.0.1", None), (None, "localhost", None), (None, "0.0.0.0", ()), (None, "10.1.2.3", ()),
        ((Path("/data"),), "127.0.0.1", (Path("/data"),)), ((Path("/data"),), "0.0.0.0", (Path("/data"),)),
    ],
)  # fmt: skip
def test_default_data_roots_are_everything_on_loopback_and_nothing_elsewhere(set_to, host, folders):
    assert roots_of(set_to, host).folders == folders


def test_refusal_without_data_roots_says_that_none_is_set(make_spec):
    (problem,) = DataRoots(()).problems(spec_of(make_spec, "/data"))
    assert problem.rule.endswith("(MANTA_DATA_ROOTS: none is set)")


def test_data_roots_apply_to_chat_templates_and_tokenizer_folders(folders, make_spec):
    data, others = folders
    (data / "chats.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}]}')
    for folder in folders:
        (folder / "mine.jinja").write_text("{{ messages }}")
    chats = {"source": "chat", "paths": [str(data / "chats.jsonl")], "template": str(data / "mine.jinja")}
    DataRoots((data,)).check(make_spec(data=chats))
    (problem,) = DataRoots((data,)).problems(make_spec(data={**chats, "template": str(others / "mine.jinja")}))
    assert problem.path == "data.template"
    assert "is not below any of the folders" in problem.rule
    byte_level(data / "tokenizer.json")
    (data / "tokenizer_config.json").symlink_to(others / "text.txt")
    named = {**chats, "template": None, "tokenizer": str(data), "tokenizer_vocabulary": 400}
    with pytest.raises(DataError, match=r"tokenizer_config\.json leads elsewhere"):
        DataRoots((data,)).check(make_spec(data=named))


def test_data_roots_apply_to_links_in_a_tokenizer_folder(folders, make_spec):
    data, others = folders
    byte_level(others / "tokenizer.json")
    (data / "tokenizer.json").symlink_to(others / "tokenizer.json")
    corpus = {"source": "text", "paths": [str(data / "text.txt")], "tokenizer": str(data), "tokenizer_vocabulary": 400}
    (problem,) = DataRoots((data,)).problems(make_spec(data=corpus))
    assert problem.path == "data.tokenizer" and problem.rule.startswith(f"{data}/tokenizer.json is not below")
    assert DataRoots((data, others)).problems(make_spec(data=corpus)) == []
