"""What the lm-evaluation-harness asks of a model. The library itself is not installed where tests run: a class with its
three methods stands for its own (that a real run works was tried by hand)."""

from __future__ import annotations

import abc
import importlib
import sys
import types
from dataclasses import dataclass

import pytest
from checkpoint_programs import job, lone, save

from manta.workers.inference.tasks import score, text_log_likelihood
from manta.workers.protocol.messages import Resume


class LM(abc.ABC):
    """lm_eval.api.model.LM."""

    @abc.abstractmethod
    def loglikelihood(self, requests): ...

    @abc.abstractmethod
    def loglikelihood_rolling(self, requests): ...

    @abc.abstractmethod
    def generate_until(self, requests): ...


@dataclass
class Instance:
    args: tuple


@pytest.fixture
def adapter(monkeypatch):
    modules = {name: types.ModuleType(name) for name in ("lm_eval", "lm_eval.api", "lm_eval.api.model")}
    modules["lm_eval.api.model"].LM = LM
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "manta.workers.integrations.lm_evaluation", raising=False)
    yield importlib.import_module("manta.workers.integrations.lm_evaluation")
    sys.modules.pop("manta.workers.integrations.lm_evaluation", None)


@pytest.fixture(scope="module")
def checkpoints(corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    trainer = lone(job(corpus, {}, model={"sequence_length": 32}), folder)
    trainer.restore(Resume())
    save(trainer)
    return str(folder)


@pytest.fixture
def model(adapter, checkpoints):
    return adapter.MantaModel(checkpoints)


def test_lm_evaluation_scores_continuations_after_their_contexts(model):
    requests = [Instance(("a question", " answer")), Instance(("ends with a space ", "x")), Instance(("", "alone"))]
    scores = model.loglikelihood(requests)
    pairs = [(b"a question", b" answer"), (b"ends with a space", b" x"), (b"", b"alone")]
    expected = score(model._model, [(list(a), list(b)) for a, b in pairs])
    assert scores == [(pytest.approx(each.log_likelihood), each.is_greedy) for each in expected]


def test_lm_evaluation_scores_whole_texts_in_windows(model):
    text = "to be or not to be " * 5
    (log_likelihood,) = model.loglikelihood_rolling([Instance((text,))])
    assert log_likelihood == pytest.approx(text_log_likelihood(model._model, list(text.encode()))[0])


def test_lm_evaluation_cuts_generated_text_before_its_first_stop_text(model, adapter, monkeypatch):
    prompts, write = [], adapter.generate
    monkeypatch.setattr(adapter, "generate", lambda *all: prompts.append(all[1][0]) or write(*all))
    whole = model.generate_until([Instance(("to be", {"max_gen_toks": 12, "until": []}))])[0]
    assert whole
    end = whole[4:6]
    cut = model.generate_until([Instance(("to be", {"max_gen_toks": 12, "until": [end, "\0\0"]}))])
    assert cut == [whole[: whole.find(end)]]
    for asked in (200, 31):
        said = model.generate_until([Instance(("to be or not to", {"max_gen_toks": asked, "until": []}))])[0]
        assert len(prompts[-1]) == 15 and said, "a context that fits is read, however much may be written"
    long = Instance(("x" * 500, {"max_gen_toks": 12, "until": "never"}))
    assert len(model.generate_until([long])[0].encode()) > 0, "of a context that is too long the end counts"
    assert len(prompts[-1]) == 20
