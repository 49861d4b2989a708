"""Names of files and headings that the documentation, its pictures and error messages refer to."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import reference_pages

ROOT = Path(__file__).parents[1]
HOUSE = ROOT / "src" / "manta"
PACKAGES = ("api", "service", "workers")
FOLDERS = ("benchmarks", "deploy", "docs", "examples", "helm", "src", "tests")
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FILES = {str(path.relative_to(ROOT)) for folder in FOLDERS for path in (ROOT / folder).rglob("*.*")}
FILES |= {str(path.relative_to(HOUSE)) for package in PACKAGES for path in (HOUSE / package).rglob("*.*")}
ENDINGS = {file[start:] for file in FILES for start in [0, *(at.end() for at in re.finditer("/", file))]}
"""Of their paths, from each folder on: pages leave out what the text before says."""
OF_OTHERS = {"preprocess_data.py", "benchmark/alpa/suite_auto_gpt.py"}
"""Files of Megatron-LM and of Alpa."""
by_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


def headings(page: str) -> set[str]:
    """Those of a page, given its path from the root, and the words in bold that begin a paragraph."""
    return set(re.findall(r"^(?:#+ |\*\*)(.+?)\.?(?:\*\*.*)?$", (ROOT / page).read_text(), re.MULTILINE))


@by_page
def test_links_of_a_page_lead_to_files(page):
    links = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


@by_page
def test_headings_that_links_of_a_page_lead_to_exist(page):
    links = re.findall(r"\]\((?!https?:)([^)#]*)#([^)]+)\)", page.read_text())
    found = [(link, to, headings(str((page.parent / link) if link else page))) for link, to in links]
    anchors = [
        (link, to, {re.sub(r"[^\w -]", "", each).lower().replace(" ", "-") for each in of}) for link, to, of in found
    ]
    assert [(link, to) for link, to, existing in anchors if to not in existing] == []


@by_page
def test_python_files_that_a_page_names_exist(page):
    named = set(re.findall(r"`([\w./-]+\.py)(?:::\w+)?`", page.read_text())) - OF_OTHERS
    assert named - ENDINGS == set()


@by_page
def test_headings_that_a_page_names_exist(page):
    named = re.findall(r"`(docs/[\w/]+\.md)`, ([A-Z][^);|.]+)", re.sub(r"\s+", " ", page.read_text()))
    assert [(other, heading) for other, heading in named if heading.strip() not in headings(other)] == []


def test_headings_that_messages_name_exist():
    sources = (path.read_text() for package in PACKAGES for path in (HOUSE / package).rglob("*.py"))
    whole = (re.sub(r'"\s*\n\s*f?"', "", source) for source in sources)
    named = {page for text in whole for page in re.findall(r"\((docs/[\w/]+\.md), ([A-Z][\w ]+)\)", text)}
    assert named
    assert [(page, heading) for page, heading in sorted(named) if heading not in headings(page)] == []


def test_keys_that_are_untested_on_gpus_say_so_and_stand_on_the_page():
    _, _, page = (ROOT / "docs" / "tested.md").read_text().partition("## Never run on GPUs")
    listed = set(re.findall(r"`((?:parallel|train)[.\w]+)", page.partition("\n## ")[0]))
    files = ("config/parallel.py", "config/train.py")
    says = re.compile(r"Untested\s+on\s+(?:several\s+)?GPUs\s+\(docs/tested\.md\)")
    texts = [(HOUSE / "workers" / file).read_text() for file in files]
    before = [text[: match.start()] for text in texts for match in says.finditer(text)]
    keys = {re.findall(r"^    (\w+): ", text, re.MULTILINE)[-1] for text in before}
    assert keys == {key.rpartition(".")[2] for key in listed} and len(keys) == 11


@pytest.mark.parametrize("page", reference_pages.PAGES)
def test_reference_page_is_what_the_generator_prints(page):
    assert (ROOT / "docs" / page).read_text() == reference_pages.content(page), "python -m tests.reference_pages"


def test_every_variable_that_settings_read_is_on_the_page_of_the_environment():
    settings = [(HOUSE / room / "settings.py").read_text() for room in ("service", "workers")]
    read = set(re.findall(r'"(MANTA_[A-Z_]+)"', "".join(settings)))
    assert read - set(re.findall(r"MANTA_[A-Z_]+", (ROOT / "docs" / "environment.md").read_text())) == set()


def test_index_of_the_documentation_names_every_page():
    index = (ROOT / "docs" / "README.md").read_text()
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    missing = {page for page in pages if f"]({page})" not in index and not page.startswith("decisions/")}
    assert missing == {"README.md"}


def test_modules_in_the_picture_of_the_packages_exist():
    texts = re.findall(r">([^<>]+)</text>", (ROOT / "docs" / "images" / "architecture.svg").read_text())
    modules = {word for text in texts for word in re.findall(r"[a-z]+(?:_[a-z]+)+", text)}
    assert modules - {Path(file).stem for file in FILES} == set()
