"""`python -m manta.workers.evaluate` and `manta.workers.generate`, as a user calls them."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
from checkpoint_programs import job, lone, save

from manta.workers import evaluate, generate
from manta.workers.checkpoint.catalog import complete_checkpoints
from manta.workers.checkpoint.pruning import remove
from manta.workers.inference import loaded_model
from manta.workers.protocol.messages import Resume
from manta.workers.weights.export import export


@pytest.fixture(scope="module")
def checkpoints(corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    trainer = lone(job(corpus, {}, model={"family": "qwen"}), folder)
    trainer.restore(Resume())
    save(trainer)
    return folder


def said(command, capsys, *arguments, code=0) -> str:
    assert command.main([str(each) for each in arguments]) == code
    out, err = capsys.readouterr()
    return err if code else out


def test_a_text_is_evaluated_by_the_newest_checkpoint_of_a_folder(checkpoints, tmp_path, capsys):
    (tmp_path / "text.txt").write_text("to be or not to be")
    evaluation = json.loads(said(evaluate, capsys, checkpoints, "--text", tmp_path / "text.txt", "--json"))
    assert evaluation["tokens"] == 17
    assert evaluation["loss"] == pytest.approx(math.log(257), rel=0.05), "it has not learned anything"
    assert evaluation["perplexity"] == pytest.approx(math.exp(evaluation["loss"]))
    table = said(evaluate, capsys, checkpoints, "--text", tmp_path / "text.txt", "--stride", 2)
    assert table.split()[0] == "loss"


def test_export_with_the_bytes_tokenizer_is_evaluated_like_its_checkpoint(corpus, tmp_path, capsys):
    pytest.importorskip("tokenizers")
    moe = {"experts": 4, "per_token": 2, "ffn_hidden_size": 16}
    trainer = lone(job(corpus, {}, model={"family": "llama", "moe": moe}), tmp_path / "in")
    trainer.restore(Resume())
    save(trainer)
    export(str(complete_checkpoints(tmp_path / "in")[-1][0]), tmp_path / "out")
    (tmp_path / "text.txt").write_text("to be or not to be")
    both = [
        said(evaluate, capsys, tmp_path / each, "--text", tmp_path / "text.txt", "--json") for each in ("in", "out")
    ]
    assert both[0] == both[1]
    config = json.loads((tmp_path / "out/config.json").read_text())
    (tmp_path / "out/config.json").write_text(json.dumps(config | {"eos_token_id": ord("!")}))
    spec = loaded_model.spec_of_weights(tmp_path / "out")
    assert (spec.data.end_of_document, loaded_model.text_tokens_of(spec, None).end) == ("!", ord("!"))


def test_model_is_evaluated_on_the_validation_sets_of_its_job(corpus, checkpoints, tmp_path, capsys):
    (tmp_path / "lines.jsonl").write_text('{"text": "to be or"}\n{"text": "not to be"}\n')
    (tmp_path / "text.txt").write_text("to be or not")
    sets = [{"name": name, "paths": [str(tmp_path / file)], "source": source} for name, file, source in SETS]
    made = job(corpus, {}, model={"family": "qwen"}, train={"validate_every": 4})
    made["data"]["validation"] = sets
    trainer = lone(made, tmp_path / "checkpoints", token_cache=tmp_path)
    trainer.restore(Resume())
    save(trainer)
    known = json.loads(said(evaluate, capsys, tmp_path / "checkpoints", "--validation", "--json"))
    assert {name: values["tokens"] for name, values in known.items()} == {"prose": 11, "lines": 15}
    assert said(evaluate, capsys, tmp_path / "checkpoints", "--validation").startswith("prose:\n  loss ")
    assert "has no validation sets (data.validation)" in said(evaluate, capsys, checkpoints, "--validation", code=2)


SETS = [("prose", "text.txt", "text"), ("lines", "lines.jsonl", "jsonl")]


def test_prompts_are_continued(checkpoints, tmp_path, capsys):
    options = ("--prompt", "to", "--prompt", "be", "--tokens", 3, "--json")
    both = json.loads(said(generate, capsys, checkpoints, *options))
    assert [(each["prompt"], each["tokens"], each["ended"]) for each in both] == [("to", 3, False), ("be", 3, False)]
    assert json.loads(said(generate, capsys, checkpoints, *options)) == both
    said(generate, capsys, checkpoints, *options, "--seed", 10**18)
    assert said(generate, capsys, checkpoints, "--prompt", "to", "--tokens", 2).startswith("to")


def test_answers_in_a_chat_are_printed_without_a_lone_prompt(checkpoints, capsys, monkeypatch):
    monkeypatch.setattr(generate, "question", lambda template, text: text)  # the model reads too few tokens for more
    options = ("--tokens", 2, "--template", "chatml", "--prompt", "to")
    (answer,) = json.loads(said(generate, capsys, checkpoints, "--chat", *options, "--json"))
    assert said(generate, capsys, checkpoints, "--chat", *options) == f"{answer['text']}\n"
    both = said(generate, capsys, checkpoints, "--chat", *options, "--prompt", "be")
    assert both.startswith(f"> to\n{answer['text']}\n\n> be\n")


def test_generate_and_evaluate_errors_are_one_sentence(checkpoints, tmp_path, capsys):
    sentence = said(generate, capsys, tmp_path / "none", "--prompt", "to", code=2)
    assert sentence == f"there is no complete checkpoint at {tmp_path / 'none'}\n"
    sentence = said(generate, capsys, checkpoints, "--prompt", "to", "--tokens", 100, code=2)
    assert "with 100 more is longer than the model's 8" in sentence
    sentence = said(evaluate, capsys, checkpoints, "--choices", tmp_path / "none.jsonl", code=2)
    assert sentence.startswith("cannot be read: ")
    with pytest.raises(SystemExit):
        evaluate.main([str(checkpoints), "--text", "a", "--stride", "0"])
    assert "must be a number above 0, not '0'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        generate.main([str(checkpoints), "--prompt", "to", "--top-p", "2"])
    assert "--top-p is above 0 and at most 1" in capsys.readouterr().err


def test_checkpoint_removed_while_it_is_loaded_is_reported(checkpoints, tmp_path, capsys, monkeypatch):
    shutil.copytree(checkpoints, tmp_path / "checkpoints")
    load = loaded_model.load

    def remove_and_load(path, *wanted):
        remove(Path(path))
        return load(path, *wanted)

    monkeypatch.setattr(loaded_model, "load", remove_and_load)
    sentence = said(generate, capsys, tmp_path / "checkpoints", "--prompt", "to", code=2)
    assert "is not there any more: it was removed while it was read" in sentence


@pytest.mark.parametrize(
    ("device", "sentence"),
    [
        ("foo", "--device: must be cpu, cuda or such as cuda:1, not 'foo'"),
        ("meta", "--device: must be cpu, cuda or such as cuda:1, not 'meta'"),
        ("", "--device: must be cpu, cuda or such as cuda:1, not ''"),
        ("cuda:99", "--device: is cuda:99, and torch finds "),
    ],
)
def test_invalid_inference_device_is_refused_before_anything_is_read(tmp_path, capsys, device, sentence):
    with pytest.raises(SystemExit):
        generate.main([str(tmp_path), "--prompt", "to", "--device", device])
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize("threads", ["0", "-3", "all"])
def test_a_number_of_threads_that_cannot_be_is_refused(checkpoints, capsys, threads):
    with pytest.raises(SystemExit) as ended:
        generate.main([str(checkpoints), "--prompt", "to be", f"--threads={threads}"])
    assert ended.value.code == 2
    assert f"--threads: must be a number above 0, not '{threads}'" in capsys.readouterr().err
