"""What is learned of a conversation is what the assistant said, under every template, as `transformers` has it."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from chat_files import CONVERSATIONS, TEMPLATES, chat_file, plain, said, tokenizer_folder

from manta.workers.config import DataConfig
from manta.workers.data.chat_template import ChatTemplate, as_text, conversation_in, open_template
from manta.workers.data.documents import texts_of
from manta.workers.data.shards import Section
from manta.workers.data.tokenizer import open_tokenizer
from manta.workers.errors import DataError


def section(path: Path) -> Section:
    size = path.stat().st_size
    return Section(str(path), 0, -1 if path.suffix == ".parquet" else size, size)


def texts(path: Path, opened=None, **data):
    config = DataConfig(source="chat", paths=[str(path)], **{"template": "chatml", **data})
    return list(texts_of(section(path), config, False, opened))


def learned(path: Path, **data) -> list[str]:
    """What is learned, in words."""
    return ["|".join(each.text[a:b] for a, b in each.learned) for each in texts(path, **data)]


@pytest.mark.parametrize("marked", [True, False], ids=["generation blocks", "beginnings compared"])
@pytest.mark.parametrize("in_settings", [True, False], ids=["in settings", "a file"])
@pytest.mark.parametrize("kind", TEMPLATES)
def test_conversation_texts_tokens_and_answer_marks_equal_those_of_transformers(tmp_path, kind, in_settings, marked):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(tokenizer_folder(tmp_path / "theirs", kind))
    template = TEMPLATES[kind] if marked else plain(TEMPLATES[kind])
    folder = tokenizer_folder(tmp_path / "ours", kind, template, in_settings)
    assert ChatTemplate(template).marks_answers == marked
    data = {"tokenizer": str(folder), "template": None}
    conversations = texts(chat_file(tmp_path / "a.jsonl"), **data)
    tokenizer = open_tokenizer(DataConfig(source="chat", paths=["a"], **data))
    encoded = tokenizer.encode_marked([each.text for each in conversations], [each.learned for each in conversations])
    for messages, each, (ids, marks) in zip(CONVERSATIONS, conversations, encoded, strict=True):
        expected = theirs.apply_chat_template(
            messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        assert each.text == theirs.apply_chat_template(messages, tokenize=False)
        assert ids == expected["input_ids"]
        assert marks.astype(int).tolist() == expected["assistant_masks"]
        assert 0 < sum(marks) < len(marks)


def test_the_tools_of_a_row_reach_the_template_as_they_do_in_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    folder = tokenizer_folder(tmp_path / "t", "qwen")
    tools = [{"type": "function", "function": {"name": "add", "description": "a < b & 'ü'"}}]
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"messages": CONVERSATIONS[0], "tools": tools}))
    (conversation,) = texts(path, tokenizer=str(folder), template=None)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    assert conversation.text == theirs.apply_chat_template(CONVERSATIONS[0], tools=tools, tokenize=False)
    assert "a < b & 'ü'" in conversation.text


def test_built_in_chatml_template_learns_answers_and_their_end_tokens(tmp_path):
    path = chat_file(tmp_path / "a.jsonl", [said("a", "b", "c", "d", system="s")])
    (conversation,) = texts(path)
    assert conversation.text == (
        "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"
        "<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\nd<|im_end|>\n"
    )
    assert learned(path) == ["b<|im_end|>|d<|im_end|>"]


def test_byte_tokens_of_answers_are_marked():
    text, spans = "é|Größe|🙂", ((2, 7), (8, 9))
    ((ids, marks),) = open_tokenizer(DataConfig(source="chat", paths=["a"])).encode_marked([text], [spans])
    assert bytes(ids) == text.encode()
    assert bytes(id for id, mark in zip(ids, marks, strict=True) if mark).decode() == "Größe🙂"


def test_whole_conversation_is_learned_with_loss_all(tmp_path):
    path = chat_file(tmp_path / "a.jsonl", [said("a", "b"), said("nobody answers")])
    assert learned(path, loss="all") == [each.text for each in texts(path)]


def test_nothing_of_a_conversation_without_an_answer_is_learned(tmp_path):
    assert learned(chat_file(tmp_path / "a.jsonl", [said("nobody answers")])) == [""]


def test_conversations_in_sharegpt_format_give_the_same_texts(tmp_path):
    rows = [[{"from": "system", "value": "s"}, {"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]]
    theirs = chat_file(tmp_path / "a.jsonl", rows, "conversations")
    ours = chat_file(tmp_path / "b.jsonl", [said("a", "b", system="s")])
    assert [each.text for each in texts(theirs, text_key="conversations")] == [each.text for each in texts(ours)]


def test_rows_of_parquet_are_the_lines_of_jsonl(tmp_path):
    table = pyarrow.table({"id": range(len(CONVERSATIONS)), "messages": CONVERSATIONS})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    ours = texts(chat_file(tmp_path / "a.jsonl"))
    assert [(each.text, each.learned) for each in texts(tmp_path / "a.parquet")] == [
        (each.text, each.learned) for each in ours
    ]
    with pytest.raises(DataError, match=r"a\.parquet: no column 'chat', only 'id', 'messages': set data.text_key"):
        texts(tmp_path / "a.parquet", text_key="chat")


WRONG = [
    ('{"messages": [', "not valid JSON ("),
    ("[]", 'not an object such as {"messages": ...}'),
    ('{"text": "a"}', "no key 'messages', only 'text': set data.text_key"),
    ('{"messages": "hello"}', "'messages' holds a text, not a list of messages"),
    ('{"messages": null}', "'messages' holds null, not a list of messages"),
    ('{"messages": []}', "'messages' has no messages"),
    ('{"messages": ["a"]}', "message 1 of 'messages' is a text, not an object with 'role' and 'content'"),
    ('{"messages": [{"content": "a"}]}', "message 1 of 'messages' has no 'role'"),
    ('{"messages": [{"role": 3, "content": "a"}]}', "message 1 of 'messages': 'role' is a number, not text"),
    ('{"messages": [{"role": "user"}]}', "message 1 of 'messages' (user) has no 'content'"),
    (
        '{"messages": [{"role": "user", "content": [{"type": "image"}]}]}',
        "message 1 of 'messages' (user): 'content' is a list, not text, and only text is read",
    ),
    ('{"messages": [{"role": "user", "content": "\\ufdd0"}]}', "'content' holds U+FDD0 or U+FDD1"),
    ('{"messages": [{"role": "user", "content": "a\\ud800"}]}', "is half of a surrogate pair"),
    (
        '{"messages": [{"role": "assistant", "tool_calls": [{"name": "add"}]}]}',
        "the chat template (chatml) makes no text of it: chatml has no calls of tools",
    ),
]


@pytest.mark.parametrize(("line", "problem"), WRONG, ids=[str(n) for n in range(len(WRONG))])
def test_row_that_is_not_a_conversation_is_refused_with_file_line_and_byte(tmp_path, line, problem):
    path = chat_file(tmp_path / "a.jsonl", CONVERSATIONS[:1])
    start = path.stat().st_size
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(DataError) as error:
        texts(path)
    assert str(error.value).startswith(f"{path}, line 2 (byte {start}): ")
    assert problem in str(error.value)


def test_conversation_that_a_template_rejects_is_refused_with_its_message(tmp_path):
    folder = tokenizer_folder(tmp_path / "t", "mistral")
    path = chat_file(tmp_path / "a.jsonl", [CONVERSATIONS[0], [*said("a"), *said("b", "c")]])
    with pytest.raises(DataError, match=r"line 2 .*makes no text of it: roles must alternate user/assistant"):
        texts(path, tokenizer=str(folder), template=None)


SYSTEM_LAST = """{%- for message in messages if message.role != 'system' %}
{{- '[INST]' ~ (messages[0].content if loop.last or loop.revindex == 2 and message.role == 'user' else '') }}
{{- message.content ~ '[/INST]' }}
{%- endfor %}"""


def test_template_that_rewrites_earlier_messages_when_more_follow_is_refused(tmp_path):
    """It writes what the system says beside the last question alone."""
    path = chat_file(tmp_path / "a.jsonl", [said("a", "b", "c", "d", system="s")])
    with pytest.raises(DataError, match=r"line 1 .*writes message 3 or those before it in another way once more"):
        texts(path, ChatTemplate(SYSTEM_LAST))
    assert texts(path, ChatTemplate(SYSTEM_LAST), loss="all"), "what is to be learned need not be found there"


@pytest.mark.parametrize("own", ["answer", "think", "x", ">", "im_end", " padded \n", ""])
def test_answers_are_marked_in_a_rendered_conversation_whatever_text_they_contain(own):
    template = ChatTemplate(plain(TEMPLATES["qwen"]))
    conversation = conversation_in({"messages": said("q", own, "q", own)}, "messages", "here")
    text, spans = as_text(conversation, template, True)
    assert [text[a:b] for a, b in spans] == [f"{own}<|im_end|>", f"<think>\n\n</think>\n\n{own}<|im_end|>"]


def test_template_is_taken_from_the_spec_the_tokenizers_folder_or_its_config(tmp_path):
    folder = tokenizer_folder(tmp_path / "t", "qwen", "from the file")
    data = DataConfig(source="chat", paths=["a"], tokenizer=str(folder))
    assert open_template(data).source == "from the file"
    assert dict(open_template(data).tokens) == {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    (tmp_path / "mine.jinja").write_text("mine")
    named = data.model_copy(update={"template": str(tmp_path / "mine.jinja")})
    assert open_template(named).source == "mine"
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(DataError, match=r"t has no chat template \(looked for chat_template\.jinja.*or to chatml"):
        open_template(data)
    several = [{"name": "default", "template": "one of several"}, {"name": "tool_use", "template": "other"}]
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": several, "bos_token": {"content": "<s>"}})
    )
    assert open_template(data).source == "one of several"
    assert open_template(data).tokens == (("bos_token", "<s>"),)
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": several[1:]}))
    with pytest.raises(DataError, match="has no template called 'default', only 'tool_use'"):
        open_template(data)
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(DataError, match=r"tokenizer_config\.json is not valid JSON"):
        open_template(data)
