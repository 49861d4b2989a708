"""What is learned of a conversation is what the assistant said, under every template, as `transformers` has it."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from chat_files import CONVERSATIONS, TEMPLATES, chat_file, plain, said, tokenizer_folder

from manta.workers.config import DataConfig
from manta.workers.data.chat_template import ChatTemplate, open_template
from manta.workers.data.conversations import as_text, conversation_in
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


@pytest.mark.parametrize("messages", [None, [], [{"role": "user", "content": [{"type": "text", "text": "x"}, "y"]}]])
def test_row_without_messages_is_an_empty_conversation_and_text_parts_are_joined(tmp_path, messages):
    (conversation,) = texts(chat_file(tmp_path / "a.jsonl", [messages]))
    assert conversation.text == ("<|im_start|>user\nxy<|im_end|>\n" if messages else "")
    assert conversation.learned == ()


TOOLS = [{"type": "function", "function": {"name": "add"}}]
SEES_ALL = (
    "{% for each in [tools, documents] if each %}{{ each | tojson }}{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{{ (m.reasoning_content or '') ~ m.content }}\n{% endfor %}"
)


def row_text(template: str = SEES_ALL, **columns) -> str:
    conversation = conversation_in({"messages": said("a", "b"), **columns}, "messages", "here")
    return as_text(conversation, ChatTemplate(template), False)[0]


USED_COLUMNS = [
    ({"system": "s"}, "<system>s\n<user>a\n<assistant>b\n"),
    ({"system_prompt": "s", "id": 3, "source": "x", "score": 0.5}, "<system>s\n<user>a\n<assistant>b\n"),
    ({"system": "s", "messages": said("a", system="s")}, "<system>s\n<user>a\n"),
    ({"system": "", "tools": "", "documents": [], "images": [], "functions": None}, "<user>a\n<assistant>b\n"),
    ({"tools": "[]", "weight": 1}, "<user>a\n<assistant>b\n"),
    ({"tools": TOOLS}, f"{json.dumps(TOOLS)}<user>a\n<assistant>b\n"),
    ({"tools": json.dumps(TOOLS, indent=1)}, f"{json.dumps(TOOLS)}<user>a\n<assistant>b\n"),
    ({"documents": [{"title": "t"}]}, '[{"title": "t"}]<user>a\n<assistant>b\n'),
    (
        {"messages": [{"role": "assistant", "content": "b", "reasoning_content": "so: ", "name": "n"}]},
        "<assistant>so: b\n",
    ),
]


@pytest.mark.parametrize(("columns", "text"), USED_COLUMNS, ids=[str(n) for n in range(len(USED_COLUMNS))])
def test_columns_and_fields_that_belong_to_a_conversation_are_used(columns, text):
    assert row_text(**columns) == text


REFUSED_COLUMNS = [
    ({"system": ["s"]}, "'system' holds a list, not text"),
    ({"system": "s", "messages": said("a", system="t")}, "'system' is not what the system says in the first message"),
    ({"tools": "none"}, "'tools' is a text that is not JSON (Expecting value"),
    ({"tools": {"name": "add"}}, "'tools' is not a list of objects, nor JSON text of one"),
    ({"tools": ["add"]}, "'tools' is not a list of objects, nor JSON text of one"),
    *(
        ({name: value}, f"{name!r}, beside 'messages', cannot be used in training: leave it out of the file")
        for name, value in [
            ("functions", TOOLS), ("images", ["a.png"]), ("audios", ["a"]), ("chosen", "c"), ("rejected", said("a")),
            ("weight", 0), ("weight", 0.5),
        ]
    ),
    *(
        ({"messages": [{"role": "assistant", "content": "b", name: "x"}]}, f"message 1 has {name!r}, which the chat")
        for name in ("tool_calls", "function_call", "thinking", "refusal", "audio")
    ),
]  # fmt: skip


@pytest.mark.parametrize(("columns", "problem"), REFUSED_COLUMNS, ids=[str(n) for n in range(len(REFUSED_COLUMNS))])
def test_columns_and_fields_that_cannot_be_used_are_refused_by_name(columns, problem):
    with pytest.raises(DataError) as error:
        row_text(**columns)
    assert str(error.value).startswith(f"here: {problem}")


@pytest.mark.parametrize("columns", [{"tools": TOOLS}, {"documents": TOOLS}], ids=str)
def test_tools_and_documents_that_the_template_does_not_write_are_refused_by_name(columns):
    with pytest.raises(DataError, match=rf"here: it has '{next(iter(columns))}', which the chat template .*not write"):
        row_text("{{ messages[0].content }}", **columns)


@pytest.mark.parametrize("marked", [True, False], ids=["generation blocks", "beginnings compared"])
@pytest.mark.parametrize("own", [{"weight": 0}, {"train": False}, {"weight": 1, "train": 0}], ids=str)
def test_answers_of_weight_zero_are_read_and_not_learned(marked, own):
    template = ChatTemplate(TEMPLATES["llama 3"] if marked else plain(TEMPLATES["llama 3"]))
    for answers in ([0], [2], [0, 1], [0, 1, 2]):
        messages = [dict(each) for each in said("q", "0", "q", "1", "q", "2")]
        for number, message in enumerate(messages):
            message |= own if number // 2 in answers and number % 2 else {"weight": number % 2}
        text, spans = as_text(conversation_in({"messages": messages}, "messages", "here"), template, True)
        assert [text[a:b] for a, b in spans] == [f"{n}<|eot_id|>" for n in range(3) if n not in answers]
        assert text == template.render(said("q", "0", "q", "1", "q", "2"))[0]


@pytest.mark.parametrize(
    ("fields", "answers_only", "problem"),
    [
        ({"weight": 0.5}, True, "message 2 of 'messages': 'weight' is 0.5, and can only be 0 or 1, false or true"),
        ({"train": "no"}, True, """message 2 of 'messages': 'train' is "no", and can only be"""),
        ({"role": "user", "weight": 1}, True, "message 2 of 'messages': 'weight' is set, but only what the assistant"),
        ({"weight": 0}, False, "message 2 is not to be learned (weight or train), but with data.loss: all"),
        ({"weight": 0}, True, "the chat template (chatml) has 1 generation blocks for 2 answers, so nothing tells"),
    ],
)
def test_weights_of_messages_that_cannot_be_followed_are_refused(fields, answers_only, problem):
    messages = [*said("a", "b", "c", "")]
    messages[1] |= fields
    block = "{% generation %}{% for m in messages %}{{ m.content }}{% endfor %}{% endgeneration %}"
    with pytest.raises(DataError) as error:
        as_text(conversation_in({"messages": messages}, "messages", "here"), ChatTemplate(block), answers_only)
    assert str(error.value).startswith(f"here: {problem}")


def test_parquet_arguments_have_no_nulls_of_other_rows_columns(tmp_path):
    calls = [{"city": "Rome", "days": [1, 2]}, {"deep": {"a": "bytes"}, "n": 3}, {"city": "Oslo"}]
    rows = [[*said("q"), {"role": "assistant", "tool_calls": [{"arguments": each}]}] for each in calls]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"messages": row} for row in rows]), tmp_path / "a.parquet")
    template = ChatTemplate("{{ messages[1].tool_calls[0].arguments | tojson }}")
    found = [json.loads(each.text) for each in texts(tmp_path / "a.parquet", template, loss="all")]
    assert found == calls


def test_nothing_of_a_conversation_without_an_answer_is_learned(tmp_path):
    assert learned(chat_file(tmp_path / "a.jsonl", [said("nobody answers")])) == [""]


def test_conversations_in_sharegpt_format_give_the_same_texts(tmp_path):
    rows = [[{"from": "system", "value": "s"}, {"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]]
    theirs = chat_file(tmp_path / "a.jsonl", rows, "conversations")
    ours = chat_file(tmp_path / "b.jsonl", [said("a", "b", system="s")])
    assert [each.text for each in texts(theirs, text_key="conversations")] == [each.text for each in texts(ours)]


SHAREGPT_CALLS = [
    ('{"name": "f", "arguments": {"n": 1}}', ["f"]),
    ([{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}], ["f", "g"]),
    ("f(1)", "message 1 of 'c' (function_call) is a text that is not JSON"),
    ("{}", "message 1 of 'c' (function_call): 'value' names no function"),
]


@pytest.mark.parametrize(("value", "outcome"), SHAREGPT_CALLS, ids=str)
def test_function_calls_of_sharegpt_are_answers_that_call_tools_or_refused(value, outcome):
    rows = [{"from": "function_call", "value": value}, {"from": "observation", "value": "1"}]
    if isinstance(outcome, str):
        with pytest.raises(DataError) as error:
            conversation_in({"c": rows}, "c", "here")
        assert str(error.value).startswith(f"here: {outcome}")
        return
    call, answer = conversation_in({"c": rows}, "c", "here").messages
    assert (call["role"], answer["role"]) == ("assistant", "tool")
    assert [each["function"]["name"] for each in call["tool_calls"]] == outcome


ARGUMENTS = [("{{ a | tojson }}", '{"n": 1}'), ("{{ '' + a }}", '{"n":1}'), ("{{ a | items | list }}", "[('n', 1)]")]


@pytest.mark.parametrize(("writes", "text"), ARGUMENTS, ids=["JSON", "text", "pairs"])
def test_arguments_that_are_json_text_reach_a_template_as_it_takes_them(writes, text):
    call = {"type": "function", "function": {"name": "f", "arguments": '{"n":1}'}}
    template = ChatTemplate(f"{{% set a = messages[0].tool_calls[0].function.arguments %}}{writes}")
    row = {"messages": [{"role": "assistant", "tool_calls": [call]}]}
    assert as_text(conversation_in(row, "messages", "here"), template, False)[0] == text


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
    ('{"text": []}', "no key 'messages', only 'text': set data.text_key"),
    ('{"input": "a", "output": "b"}', "no key 'messages', only 'input', 'output': a conversation is a list of"),
    ('{"messages": "hello"}', "'messages' holds a text, not a list of messages"),
    ('{"messages": ["a"]}', "message 1 of 'messages' is a text, not an object with 'role' and 'content'"),
    ('{"messages": [{"content": "a"}]}', "message 1 of 'messages' has no 'role'"),
    ('{"messages": [{"role": 3, "content": "a"}]}', "message 1 of 'messages': 'role' is a number, not text"),
    ('{"messages": [{"role": "user"}]}', "message 1 of 'messages' (user) has no 'content'"),
    (
        '{"messages": [{"role": "user", "content": [{"type": "image"}]}]}',
        "message 1 of 'messages' (user): part 1 of 'content' is of type 'image', and only text is read",
    ),
    (
        '{"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, 3]}]}',
        "message 1 of 'messages' (user): part 2 of 'content' is a number, and only text is read",
    ),
    ('{"messages": [{"role": "user", "content": {}}]}', "'content' is an object, not text"),
    ('{"messages": [{"role": "user", "content": "\\ufdd2"}]}', "'content' holds one of U+FDD0 to U+FDD2"),
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


OPENS_THOUGHT = (
    "{% for m in messages %}{% if m.role == 'user' %}[U]{{ m.content }}{% else %}"
    "[A]{{ '<think>\\n\\n</think>\\n' if loop.last and late else '' }}{{ m.content.split('</think>')[-1] }}<|im_end|>"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '[A]<think>\\n' }}{% endif %}"
)


@pytest.mark.parametrize("late", ["", "{% set late = true %}"], ids=["never", "in the last answer"])
@pytest.mark.parametrize("own", ["hello", "<", "[A]", "A", "<think", "<|im_end|>", "", "th\n"])
def test_answers_are_found_though_the_prompt_for_one_opens_a_thought(own, late):
    conversation = conversation_in({"messages": said("q", own, "q", own)}, "messages", "here")
    text, spans = as_text(conversation, ChatTemplate(late + OPENS_THOUGHT), True)
    last = f"\n</think>\n{own}<|im_end|>" if late else f"{own}<|im_end|>"
    assert [text[a:b] for a, b in spans] == [f"{own}<|im_end|>", last]


@pytest.mark.parametrize(
    ("template", "what"),
    [
        (OPENS_THOUGHT, "does not write message 2 as it is in the file"),
        ("{{ 'B' if add_generation_prompt }}{{ messages | tojson }}", "writes message 2, or those before it, in anoth"),
    ],
)
def test_answer_that_a_template_writes_otherwise_is_refused_with_what_differs(template, what):
    own = "<think>no</think>yes" if template == OPENS_THOUGHT else "b"
    conversation = conversation_in({"messages": said("q", own)}, "messages", "here")
    with pytest.raises(DataError, match=rf"here: the chat template \(chatml\) {what}"):
        as_text(conversation, ChatTemplate(template), True)


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
