import json
import sys
import types
from itertools import islice
from pathlib import Path

import pytest

from headstart.data.conversations.conversation import Conversation, parse
from headstart.data.conversations.law import Law
from headstart.data.conversations.reading import Reader, read


def one(row) -> Conversation:
    return parse(row, "here", "default")


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def hello(i=0):
    return {"id": f"c{i}", "messages": [{"role": "user", "content": f"hello {i}"}]}


def test_openai_and_sharegpt_shapes_give_the_same_conversation():
    openai = one(
        {
            "messages": [
                {"role": "system", "content": "be brief"},
                {"role": "user", "content": "hi"},
                {"role": "assistant", "content": "hello"},
            ]
        }
    )
    sharegpt = one(
        {
            "system": "be brief",
            "conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}],
        }
    )
    assert openai == sharegpt
    assert [m["role"] for m in openai.messages] == ["system", "user", "assistant"]


def test_tool_roles_and_tool_calls_are_kept():
    call = {"name": "weather", "arguments": {"city": "Oslo"}}
    tools = [{"type": "function", "function": {"name": "weather"}}]
    sharegpt = one(
        {
            "tools": json.dumps(tools),
            "conversations": [
                {"from": "human", "value": "weather?"},
                {"from": "function_call", "value": json.dumps(call)},
                {"from": "observation", "value": "rain"},
                {"from": "gpt", "value": "It rains."},
            ],
        }
    )
    openai = one(
        {
            "tools": tools,
            "messages": [
                {"role": "user", "content": "weather?"},
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [{"type": "function", "function": call}],
                },
                {"role": "tool", "content": "rain"},
                {"role": "assistant", "content": "It rains."},
            ],
        }
    )
    assert sharegpt == openai
    assert openai.tools == tools
    assert openai.messages[1] == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": call}],
    }


def test_content_parts_are_joined():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}, "c"]
    assert one({"messages": [{"role": "user", "content": parts}]}).messages[0]["content"] == "abc"


def test_prompt_turns_and_text_are_understood():
    assert one({"prompt": "hi"}).messages == [{"role": "user", "content": "hi"}]
    assert len(one({"turns": ["a", "b"]}).messages) == 2
    assert one({"text": "once"}).text == "once"


def test_a_conversation_survives_writing_and_reading():
    conversation = Conversation(
        "x",
        [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b", "token_ids": [1, 2], "truncated": True},
        ],
        tools=[{"name": "t"}],
        category="chat",
        law=Law(0.7, top_k=3, min_p=0.1, left_to_server=("presence_penalty",)),
        chat_template_kwargs={"enable_thinking": False},
    )
    assert one(json.loads(json.dumps(conversation.to_json()))) == conversation


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ([1], "a row must be a JSON object, got list"),
        ({"a": 1}, r"no messages, .* \(the row's fields: a\)"),
        ({"prompt": 5}, "prompt must be a string, got int"),
        ({"text": ["a"]}, "text must be a string, got list"),
        ({"turns": "hi"}, "turns must be a list, got str"),
        ({"messages": {"role": "user"}}, "messages must be a list, got dict"),
        ({"conversations": 1.5, "messages": None}, "conversations must be a list, got float"),
        ({"messages": []}, "no turns"),
        ({"messages": ["hi"]}, "a turn must be an object"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "unknown role 'wizard'"),
        ({"messages": [{"role": "user"}]}, "content must be a string"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "only text"),
        ({"prompt": "x", "temperature": -1}, "temperature must be a number ≥ 0, got -1"),
        ({"prompt": "x", "tools": "{"}, "tools is not JSON"),
        ({"prompt": "x", "tools": {"a": 1}}, "tools must be a list"),
        ({"prompt": "x", "chat_template_kwargs": 3}, "chat_template_kwargs must be an object"),
        (
            {"messages": [{"role": "assistant", "content": "x", "token_ids": [1.5]}]},
            "token_ids must be a list",
        ),
        (
            {"conversations": [{"from": "function_call", "value": "{"}]},
            "function_call is not JSON",
        ),
    ],
)
def test_a_row_that_cannot_be_read_is_named(row, complaint):
    with pytest.raises(ValueError, match=f"^here: .*{complaint}"):
        one(row)


def test_a_field_of_another_kind_does_not_hide_one_that_can_be_read():
    assert one({"turns": 2, "prompt": "hi"}).messages == [{"role": "user", "content": "hi"}]


def test_a_broken_line_is_named_by_file_and_line(tmp_path):
    file = tmp_path / "chats.jsonl"
    file.write_text('{"prompt": "a"}\n\n{"prompt": "b"\n')
    with pytest.raises(ValueError, match=r"chats\.jsonl, line 3: broken JSON .* column"):
        list(read(str(file)))
    file.write_bytes(b'{"prompt": "a"}\n{"prompt": "\xff"}\n')
    with pytest.raises(ValueError, match=r"chats\.jsonl, line 2: not UTF-8"):
        list(read(str(file)))


def test_reading_is_lazy(tmp_path):
    file = tmp_path / "chats.jsonl"
    file.write_text('{"prompt": "a"}\n{"prompt": "b"}\nnot json\n')
    rows = read(str(file))
    assert next(rows).messages[0]["content"] == "a"
    assert len(list(read(str(file), limit=2))) == 2


def test_a_folder_is_read_in_name_order_and_ids_say_where_a_row_stood(tmp_path):
    write(tmp_path / "b.jsonl", [{"prompt": "3"}])
    write(tmp_path / "a.jsonl", [{"prompt": "1"}, {"prompt": "2"}])
    rows = list(read(str(tmp_path)))
    assert [c.messages[0]["content"] for c in rows] == ["1", "2", "3"]
    assert [c.id for c in rows] == ["a-000001", "a-000002", "b-000001"]


@pytest.mark.parametrize("row", [{"id": None}, {}, {"id": ""}, {"id": None, "question_id": None}])
def test_a_row_without_an_id_is_named_by_where_it_stands(tmp_path, row):
    source = write(tmp_path / "a.jsonl", [row | {"prompt": "x"}] * 2)
    assert [c.id for c in read(source)] == ["a-000001", "a-000002"]


def test_ids_that_are_there_stay_as_they_are():
    assert [one({"prompt": "x"} | ids).id for ids in ({"id": 0}, {"question_id": 7})] == ["0", "7"]
    assert one({"prompt": "x", "id": None, "question_id": 7}).id == "7"


def test_the_same_file_name_in_two_folders_gives_other_ids(tmp_path):
    for folder in ("x", "y"):
        (tmp_path / folder).mkdir()
        write(tmp_path / folder / "a.jsonl", [{"prompt": folder}] * 2)
    write(tmp_path / "y" / "b.jsonl", [{"prompt": "y"}])
    ids = ["a-000001", "a-000002", "y/a-000001", "y/a-000002", "b-000001"]
    assert [c.id for c in read(str(tmp_path))] == ids
    begun = Reader(str(tmp_path))
    assert [c.id for c in islice(begun, 3)] == ids[:3]
    resumed = Reader(str(tmp_path))
    resumed.load_state_dict(begun.state_dict())
    assert [c.id for c in resumed] == ids[3:]


def test_an_id_that_came_before_is_preceded_by_where_its_row_stands(tmp_path):
    (tmp_path / "x").mkdir()
    write(tmp_path / "b.jsonl", [hello(0), hello(1), hello(0)])
    write(tmp_path / "x" / "b.jsonl", [hello(1), hello(2)])
    ids = ["c0", "c1", "b-000003:c0", "x/b-000001:c1", "c2"]
    assert [c.id for c in read(str(tmp_path))] == ids
    assert [c.id for c in read(str(tmp_path), limit=3)] == ids[:3]
    rows = write_parquet(tmp_path / "c.parquet", [hello(0), hello(0)])
    assert [c.id for c in read(rows)] == ["c0", "train-000001:c0"]


def test_turns_may_be_keyed_as_the_other_shape():
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    others = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]
    for name in ("messages", "conversations"):
        assert one({name: turns}).messages == turns
        assert one({name: others}).messages == turns
        assert one({name: json.dumps(turns)}).messages == turns
        with pytest.raises(ValueError, match=r"unknown (from|role) 'wizard'"):
            one({name: [{"role": "wizard", "content": "x"}]})


def test_rows_that_cannot_be_read_are_handed_over_where_that_is_asked_for(tmp_path):
    file = tmp_path / "chats.jsonl"
    file.write_bytes(b'{"prompt": "a"}\n{broken\n\xff\n[1]\n{"prompt": "b"}\n{"prompt": 5}\n')
    refused = []
    rows = list(read(str(file), refuse=refused.append))
    assert [c.id for c in rows] == ["chats-000001", "chats-000005"]
    assert [bad.reason for bad in refused] == [
        "broken JSON", "not UTF-8 text", "a row must be a JSON object", "prompt must be a string",
    ]  # fmt: skip
    assert "chats.jsonl, line 2: broken JSON" in str(refused[0])
    assert len(list(read(str(file), limit=2, refuse=refused.append))) == 2


def test_all_rows_are_read_unless_limited(tmp_path):
    source = write(tmp_path / "many.jsonl", [hello(i) for i in range(250)])
    assert len(list(read(source))) == 250
    assert len(list(read(source, limit=7))) == 7


def test_a_limit_may_be_spread_over_the_source(tmp_path):
    source = write(tmp_path / "many.jsonl", [hello(i) for i in range(10)])
    numbers = [int(c.id[1:]) for c in read(source, limit=4, spread=True)]
    assert numbers == [0, 2, 5, 7]
    assert len(list(read(source, limit=99, spread=True))) == 10
    assert len(list(read(source, spread=True))) == 10


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path):
    source = write(tmp_path / "plain.jsonl", [hello(0)])
    marked = tmp_path / "marked.jsonl"
    marked.write_bytes(b"\xef\xbb\xbf" + Path(source).read_bytes())
    assert [c.messages for c in read(str(marked))] == [c.messages for c in read(source)]


def test_missing_sources_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"^'nowhere\.jsonl': no such file"):
        list(read("nowhere.jsonl"))
    with pytest.raises(ValueError, match="the folder holds no"):
        list(read(str(tmp_path)))


def test_a_hub_data_set_is_streamed(monkeypatch):
    asked = {}

    class Rows(list):
        def state_dict(self):
            return {}

        def load_state_dict(self, state):
            pass

    def load_dataset(name, **kwargs):
        asked.update(kwargs, name=name)
        return Rows([{"messages": hello()["messages"]}, {"bad": 1}])

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    rows = read("someone/chats", split="train_sft")
    assert next(rows).id == "train_sft-000000"
    assert asked == {"name": "someone/chats", "split": "train_sft", "streaming": True}
    with pytest.raises(ValueError, match="someone/chats, row 1: no messages"):
        next(rows)


def test_a_hub_data_set_that_does_not_exist_is_named(monkeypatch):
    def load_dataset(name, **kwargs):
        raise FileNotFoundError("Dataset 'someone/none' doesn't exist")

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    with pytest.raises(ValueError, match=r"^'someone/none': neither a local file nor"):
        list(read("someone/none"))


def write_parquet(file, rows):
    import datasets

    datasets.Dataset.from_list(rows).to_parquet(file, batch_size=7)
    return str(file)


@pytest.mark.parametrize("kind", ["file", "folder", "parquet", "parquet folder"])
@pytest.mark.parametrize("stop", [0, 1, 6, 7, 13, 19, 20])
def test_reading_goes_on_where_the_state_was_taken(tmp_path, kind, stop):
    rows = [hello(i) for i in range(20)]
    if kind == "file":
        source = write(tmp_path / "a.jsonl", rows)
        (tmp_path / "a.jsonl").write_text((tmp_path / "a.jsonl").read_text().replace("\n", "\n\n"))
    elif kind == "folder":
        write(tmp_path / "a.jsonl", rows[:6])
        write(tmp_path / "b.jsonl", rows[6:])
        source = str(tmp_path)
    elif kind == "parquet":
        source = write_parquet(tmp_path / "a.parquet", rows)
    else:
        write_parquet(tmp_path / "a.parquet", rows[:6])
        write_parquet(tmp_path / "b.parquet", rows[6:])
        source = str(tmp_path)
    begun = Reader(source)
    first = [c.id for c in islice(begun, stop)]
    state = json.loads(json.dumps(begun.state_dict()))
    assert state["number"] == stop
    resumed = Reader(source)
    resumed.load_state_dict(state)
    assert first + [c.id for c in resumed] == [f"c{i}" for i in range(20)]
    assert not list(resumed), "the end is the end"
    resumed.restart()
    assert [c.id for c in resumed] == [f"c{i}" for i in range(20)]


def test_a_line_is_named_by_its_own_number_after_a_resume(tmp_path):
    file = tmp_path / "chats.jsonl"
    file.write_text('{"prompt": "a"}\n\n{"prompt": "b"}\n{"prompt": 3}\n')
    begun = Reader(str(file))
    next(iter(begun))
    resumed = Reader(str(file))
    resumed.load_state_dict(begun.state_dict())
    rows = iter(resumed)
    assert next(rows).id == "chats-000003"
    assert "chats.jsonl, line 4: prompt must be a string" in str(next(rows))


def test_a_source_that_has_changed_is_not_resumed(tmp_path):
    file = tmp_path / "chats.jsonl"
    file.write_text('{"prompt": "a"}\n')
    state = Reader(str(file)).state_dict()
    file.write_text('{"prompt": "aa"}\n')
    with pytest.raises(ValueError, match=r"of 17 bytes was .* of 16 bytes when the run was begun"):
        Reader(str(file)).load_state_dict(state)


def test_optional_fields_of_some_parquet_rows_stay_away_from_the_others(tmp_path):
    answer = {"role": "assistant", "content": "x", "token_ids": [4, 2]}
    turns = [{"role": "user", "content": "hi"}, answer]
    rows = [hello(0) | {"tools": None}, {"id": "c1", "messages": turns, "tools": [{"name": "t"}]}]
    first, second = read(write_parquet(tmp_path / "a.parquet", rows))
    assert first == one(hello(0))
    assert second.messages == turns and second.tools == [{"name": "t"}]


def test_a_broken_parquet_file_is_named(tmp_path):
    (tmp_path / "a.parquet").write_text("no")
    with pytest.raises(ValueError, match=r"a\.parquet'"):
        list(read(str(tmp_path / "a.parquet")))
