"""How good a trained model is: `python -m manta.workers.evaluate CHECKPOINT (--text | --last-word | --choices | --chat)
FILE`, or `--validation` on the job's own validation sets.

CHECKPOINT may have been written under any layout; it is read by one process. --text takes plain text or JSONL with
`text`; --last-word JSONL with `text`; --choices JSONL with `question`, `choices` and the number of the right `answer`;
--chat conversations as a job's data has them.
"""

from __future__ import annotations

if __name__ == "__main__":  # before anything is loaded, which takes seconds
    from manta.workers.interruption import run_command

    run_command("manta.workers.evaluate")

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from manta.workers.inference import tasks
from manta.workers.inference.chats import ChatResult, chat, read_conversations, template_of
from manta.workers.inference.command import add_template_to, checkpoint_of, loaded, options_for, positive, run
from manta.workers.inference.validation_sets import evaluate_sets


def command_parser(called: str) -> argparse.ArgumentParser:
    """The parser of the command's options. `called`: the command, as it was typed."""
    parser = options_for(called, "Evaluate a trained model.")
    kind = parser.add_mutually_exclusive_group(required=True)
    kind.add_argument("--text", type=Path, metavar="FILE", help="perplexity of a text, or of the texts of a JSONL file")
    kind.add_argument(
        "--last-word", type=Path, metavar="FILE", help="accuracy on the last words of the texts of a JSONL file"
    )
    kind.add_argument(
        "--choices", type=Path, metavar="FILE", help="accuracy on the multiple-choice questions of a JSONL file"
    )
    kind.add_argument("--chat", type=Path, metavar="FILE", help="perplexity of the answers in conversations")
    kind.add_argument("--validation", action="store_true", help="the validation sets of the job file, one by one")
    add_template_to(parser)
    parser.add_argument(
        "--stride",
        type=positive,
        metavar="N",
        help="with --text: tokens from one window to the next; default: a whole window",
    )
    return parser


def main(arguments: list[str] | None = None, called: str = "python -m manta.workers.evaluate") -> int:
    """Entry point; returns the exit status. `called`: the command, as it was typed."""
    return run(_evaluate, command_parser(called).parse_args(arguments))


def _evaluate(options: argparse.Namespace) -> None:
    if options.validation:
        model, tokens = loaded(options)
        sets = evaluate_sets(model, tokens, options.checkpoint, options.stride, options.batch_size)
        known = {name: _values(result) for name, result in sets.items()}
        if options.json:
            print(json.dumps(known))
        for name, values in {} if options.json else known.items():
            print(f"{name}:")
            _show(values, "  ")
        return
    values = _values(_result(options))
    if options.json:
        print(json.dumps(values))
    else:
        _show(values)


def _result(options: argparse.Namespace) -> tasks.TextResult | tasks.Accuracy | ChatResult:
    if options.text is not None:
        documents = tasks.read_texts(options.text)
        return tasks.text(*loaded(options), documents, options.stride, options.batch_size)
    if options.last_word is not None:
        passages = tasks.read_texts(options.last_word)
        return tasks.last_word(*loaded(options), passages, options.batch_size)
    if options.chat is not None:
        model, tokens = loaded(options)
        template = template_of(model.spec, checkpoint_of(options), options.template)
        return chat(model, tokens, read_conversations(options.chat, model.spec, template), options.batch_size)
    questions = tasks.read_questions(options.choices)
    return tasks.choices(*loaded(options), questions, options.batch_size)


def _values(result: tasks.TextResult | tasks.Accuracy | ChatResult) -> dict[str, float]:
    return {name: value for name, value in asdict(result).items() if value is not None}


def _show(values: dict[str, float], indent: str = "") -> None:
    for name, value in values.items():
        print(f"{indent}{name:14} {value:.6g}" if isinstance(value, float) else f"{indent}{name:14} {value}")
