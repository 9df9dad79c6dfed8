"""A conversation with tools gives the same ids, in whatever form a data set has it."""

import copy
import json

import pytest
import tiny
from tool_chats import OBJECTS, TEMPLATES, WEATHER, write_all

from headstart.data.conversations import reading
from headstart.data.conversations.conversation import Conversation, parse
from headstart.data.rows.rendering import render


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, str]:
    return write_all(tmp_path_factory.mktemp("tools"))


TOKENIZER = tiny.byte_level()


def rendered(conversation: Conversation, template: str) -> list[tuple[list[int], list[int]]]:
    TOKENIZER.chat_template = TEMPLATES[template]
    rows = render(conversation, TOKENIZER, [TOKENIZER.eos_token_id], 10_000)
    return [(row.input_ids, row.loss_mask) for row in rows]


@pytest.mark.filterwarnings("ignore:the chat template rewrites")  # it moves the tools along
@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("form", ["strings", "sharegpt", "parquet", "table as lines"])
def test_every_form_renders_to_the_ids_of_objects(files, form, template):
    objects = [rendered(c, template) for c in reading.read(files["objects"])]
    assert len(objects) == 5 and all(any(mask) for rows in objects for _, mask in rows)
    assert [rendered(c, template) for c in reading.read(files[form])] == objects


def test_the_table_has_nulls_that_its_rows_did_not(files):
    with open(files["table as lines"]) as lines:
        assert "null" in lines.readline()
    assert "null" not in json.dumps(OBJECTS)


def test_the_templates_write_arguments_once_and_tools_as_they_are():
    [(ids, _)] = rendered(parse(OBJECTS[0], "here", "x"), "hermes")
    text = TOKENIZER.decode(ids)
    assert '{"name": "weather", "arguments": {"city": "Rome"}}' in text
    assert json.dumps(WEATHER) in text


def test_null_that_an_author_wrote_stays():
    row = copy.deepcopy(OBJECTS[0])
    row["messages"][1]["tool_calls"][0]["function"]["arguments"]["unit"] = None
    row["tools"][0]["function"]["parameters"]["properties"]["unit"]["default"] = None
    written = parse(row, "here", "x")
    assert written.tools == row["tools"]
    assert written.messages[1]["tool_calls"] == row["messages"][1]["tool_calls"]
    text = copy.deepcopy(row)
    function = text["messages"][1]["tool_calls"][0]["function"]
    function["arguments"] = json.dumps(function["arguments"])
    assert parse(text, "here", "x") == written


def test_null_in_a_list_stays_in_a_table_too():
    row = copy.deepcopy(OBJECTS[0])
    unit = row["tools"][0]["function"]["parameters"]["properties"]["unit"]
    unit["enum"] = ["C", None]
    unit["default"] = row["messages"][0]["tool_calls"] = None
    kept = parse(row, "here", "x").tools[0]["function"]["parameters"]["properties"]["unit"]
    assert kept == {"type": "string", "enum": ["C", None]}


@pytest.mark.parametrize("arguments", ["", " ", "{}"])
def test_a_call_without_arguments_has_an_empty_object(arguments):
    row = copy.deepcopy(OBJECTS[2])
    row["messages"][1]["tool_calls"][0]["function"]["arguments"] = arguments
    assert parse(row, "here", "x") == parse(OBJECTS[2], "here", "x")


def test_the_older_function_call_and_several_calls_at_once_are_calls():
    call = {"name": "clock", "arguments": "{}"}
    [said] = parse({"messages": [
        {"role": "assistant", "content": None, "function_call": call}
    ]}, "here", "x").messages  # fmt: skip
    assert said == OBJECTS[2]["messages"][1]
    [both] = parse({"conversations": [
        {"from": "function_call", "value": json.dumps([call, call])}
    ]}, "here", "x").messages  # fmt: skip
    assert both["tool_calls"] == said["tool_calls"] * 2
