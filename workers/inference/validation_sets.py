"""The validation sets of a job (`data.validation`), as they are read to evaluate its model."""

from __future__ import annotations

from manta.workers.checkpoint.catalog import checkpoint_at
from manta.workers.config import DataConfig, JobSpec
from manta.workers.data.documents import Text, texts_of
from manta.workers.data.shards import Section
from manta.workers.data.sources import corpus_files, kind_of_file
from manta.workers.inference import tasks
from manta.workers.inference.chats import ChatResult, chat, template_of
from manta.workers.inference.loaded_model import LoadedModel, TextTokens
from manta.workers.storage.locations import Location


def evaluate_sets(
    model: LoadedModel, tokens: TextTokens, checkpoint: Location, stride: int | None, batch_size: int
) -> dict[str, tasks.TextResult | ChatResult]:
    """How well the texts of each set are predicted, or the answers in its conversations, by the name of the set. Raises
    InvalidTask, DataError."""
    results: dict[str, tasks.TextResult | ChatResult] = {}
    for each in model.spec.data.validation:
        texts = _texts(model.spec, model.spec.data.corpus_of(each), checkpoint)
        if texts and texts[0].learned is not None:
            results[each.name] = chat(model, tokens, texts, batch_size)
        else:
            results[each.name] = tasks.text(model, tokens, [text.text for text in texts], stride, batch_size)
    if not results:
        part = "its held-out part of the corpus is only measured in training (`manta metrics JOB`)"
        raise tasks.InvalidTask(f"the job has no validation sets (data.validation); {part}")
    return results


def _texts(spec: JobSpec, data: DataConfig, checkpoint: Location) -> list[Text]:
    if data.source == "megatron":
        raise tasks.InvalidTask(f"{', '.join(data.paths)} has tokens; only texts and conversations can be evaluated on")
    template = template_of(spec, checkpoint_at(checkpoint)) if data.source == "chat" else None
    sections = (
        Section(file.path, 0, -1 if kind_of_file(file.path, data.source) == "parquet" else file.size, file.size)
        for file in corpus_files(data)
    )
    return [text for section in sections for text in texts_of(section, data, cuts_are_exact=False, template=template)]
