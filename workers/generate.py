"""Text that a trained model writes: `python -m manta.workers.generate CHECKPOINT --prompt TEXT`.

CHECKPOINT may have been written under any layout; it is read by one process.
"""

from __future__ import annotations

if __name__ == "__main__":  # before anything is loaded, which takes seconds
    from manta.workers.interruption import run_command

    run_command("manta.workers.generate")

import argparse
import json
from pathlib import Path

from manta.workers.inference.chats import End, end_of_answer, question, template_of
from manta.workers.inference.command import add_template_to, checkpoint_of, loaded, options_for, run
from manta.workers.inference.generation import Sampling, generate
from manta.workers.inference.tasks import read_texts


def command_parser(called: str) -> argparse.ArgumentParser:
    """The parser of the command's options. `called`: the command, as it was typed."""
    parser = options_for(called, "Generate text with a trained model.")
    prompts = parser.add_mutually_exclusive_group(required=True)
    prompts.add_argument("--prompt", action="append", help="text to continue; may be repeated")
    prompts.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="file of prompts: JSONL with a text each, or any other file as one prompt",
    )
    parser.add_argument("--chat", action="store_true", help="treat prompts as user messages, and generate the answer")
    add_template_to(parser)
    parser.add_argument("--tokens", type=int, default=100, help="maximum number of new tokens (default: 100)")
    parser.add_argument(
        "--temperature", type=float, default=1.0, help="sampling temperature; 0: greedy decoding (default: 1)"
    )
    parser.add_argument(
        "--top-k", type=int, default=0, help="sample from this many of the likeliest tokens; 0: all (default)"
    )
    parser.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        help="sample from the likeliest tokens with this total probability (default: 1)",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampling (default: 0)")
    return parser


def main(arguments: list[str] | None = None, called: str = "python -m manta.workers.generate") -> int:
    """Entry point; returns the exit status. `called`: the command, as it was typed."""
    parser = command_parser(called)
    options = parser.parse_args(arguments)
    if options.temperature < 0 or not 0 < options.top_p <= 1 or options.top_k < 0 or options.tokens < 1:
        parser.error("--temperature and --top-k are at least 0, --top-p is above 0 and at most 1, --tokens at least 1")
    return run(_generate, options)


def _generate(options: argparse.Namespace) -> None:
    prompts = options.prompt if options.prompts is None else read_texts(options.prompts)
    sampling = Sampling(options.temperature, options.top_k, options.top_p, options.seed)
    model, tokens = loaded(options)
    asked, end = list(prompts), End(tokens.end, "")
    if options.chat:
        template = template_of(model.spec, checkpoint_of(options), options.template)
        asked, end = [question(template, prompt) for prompt in prompts], end_of_answer(template, tokens)
    ids = [tokens.encode(prompt, begins=not options.chat) for prompt in asked]
    written = generate(model, ids, options.tokens, sampling, end.token, options.batch_size)
    texts = [tokens.decode(each.tokens) for each in written]
    if end.text and end.token is None:  # an end of several tokens is found in the text alone
        texts = [text.split(end.text)[0] for text in texts]
    if options.json:
        results = zip(prompts, texts, written, strict=True)
        entries = [{"prompt": a, "text": b, "tokens": len(c.tokens), "ended": c.ended} for a, b, c in results]
        print(json.dumps(entries))
    else:
        before = [f"> {prompt}\n" if len(prompts) > 1 else "" for prompt in prompts] if options.chat else prompts
        print("\n\n".join(f"{start}{text}" for start, text in zip(before, texts, strict=True)))
