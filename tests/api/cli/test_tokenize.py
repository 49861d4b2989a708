"""`manta tokenize`: a job's tokens before the job, in the home where a job of this node looks for them."""

import json

import pytest
import yaml
from tokenizer_files import TEXT, byte_level, plain_tokens
from typer.testing import CliRunner

from manta.api.cli.main import app
from manta.workers.paths import Paths


@pytest.fixture
def tokenize(tmp_path):
    """Runs the command on a job with a corpus beside it."""
    byte_level(tmp_path / "tokenizer.json")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXT[:20]))

    def run(*arguments, code=0, **data):
        data = {"source": "jsonl", "paths": ["a.jsonl"], "tokenizer": "tokenizer.json", **data}
        model = {"layers": 1, "hidden_size": 8, "heads": 1, "sequence_length": 8}
        job = {"model": model, "data": data, "train": {"steps": 1}}
        (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
        environment = {"MANTA_HOME": str(tmp_path / "home")}
        result = CliRunner().invoke(app, ["tokenize", str(tmp_path / "job.yaml"), *arguments], env=environment)
        assert result.exit_code == code, result.output
        return result.output

    return run


def test_tokenize_stores_tokens_in_the_home(tokenize, tmp_path):
    count = len(plain_tokens(tmp_path / "tokenizer.json", TEXT[:20]))
    cache = Paths.of(tmp_path / "home").token_cache
    lines = tokenize("--processes", "1").splitlines()
    assert lines[0].startswith("tokenizes 1 file (")
    assert lines[-1] == f"{count} tokens are in {cache}"
    answer = json.loads(tokenize("--json"))
    assert (answer["tokens"], answer["cache"], len(answer["digest"])) == (count, str(cache), 64)
    assert len(list(cache.glob("*/tokens.bin"))) == 1


def test_tokenize_reports_invalid_input_in_one_sentence(tokenize):
    assert "no key 'body'" in tokenize(code=2, text_key="body")
    assert "no tokenizer can be read from" in tokenize(code=2, tokenizer="gone.json")
    assert "nothing to prepare" in tokenize(code=2, source="text", tokenizer="bytes")
