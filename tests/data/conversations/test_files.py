import json
from itertools import islice

import pytest

from headstart.data.conversations.conversation import parse
from headstart.data.conversations.files import rows_of
from headstart.data.conversations.law import Law
from headstart.data.conversations.reading import Reader, read

TURNS = [{"role": "user", "content": "hello"}]
ROWS = [{"id": "a", "prompt": "one, two"}, {"id": "b", "messages": TURNS}]
DOCUMENTS = {
    "array.json": json.dumps(ROWS),
    "marked.json": "\ufeff" + json.dumps(ROWS),
    "indented.json": json.dumps(ROWS, indent=2),
    "indented.jsonl": json.dumps(ROWS, indent=2),
    "objects.json": "\n".join(json.dumps(row, indent=2) for row in ROWS),
    "objects.jsonl": "\n".join(json.dumps(row, indent=2) for row in ROWS),
    "opened.json": json.dumps(ROWS[0]).replace(", ", ",\n", 1) + "\n" + json.dumps(ROWS[1]),
    "lines.json": "".join(json.dumps(row) + "\n" for row in ROWS),
    "cells.csv": 'id,prompt,messages,tools\na,"one, two",,\nb,,"'
    + json.dumps(TURNS).replace('"', '""')
    + '",\n',
}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_json_documents_and_csv_are_read_as_their_lines_would_be(tmp_path, name):
    (tmp_path / name).write_text(DOCUMENTS[name], encoding="utf-8")
    source = str(tmp_path / name)
    expected = [parse(row, "here", "x") for row in ROWS]
    assert list(read(source)) == expected
    for stop in range(3):
        begun, resumed = Reader(source), Reader(source)
        first = list(islice(begun, stop))
        resumed.load_state_dict(json.loads(json.dumps(begun.state_dict())))
        assert first + list(resumed) == expected
        assert resumed.number == 2
    assert list(read(str(tmp_path))) == expected, "a folder of such files"


def test_a_row_of_a_document_is_named_by_its_number(tmp_path):
    file = tmp_path / "rows.json"
    file.write_text(json.dumps([{"prompt": "a"}, {"a": 1}]))
    with pytest.raises(ValueError, match=r"rows\.json, row 2: no messages"):
        list(read(str(file)))
    file.write_text('[{"prompt": "a"},\n {"prompt": }]')
    with pytest.raises(ValueError, match=r"rows\.json, line 2: broken JSON \(Expecting value"):
        list(read(str(file)))


def test_cells_of_a_csv_have_the_kinds_that_rows_need(tmp_path):
    file = tmp_path / "rows.csv"
    file.write_text('prompt,temperature,category\n12,0.5,7\n"two\nlines ""x""",,\n')
    first, second = read(str(file))
    assert first.messages[0]["content"] == "12"
    assert (first.law, first.category, first.id) == (Law(0.5), "7", "rows-000001")
    assert second.messages[0]["content"] == 'two\nlines "x"' and second.law is None


def test_lines_go_on_from_a_place_and_keep_their_numbers(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"n": 1}\n\n{"n": 3}\n{"n": 4}')
    whole = list(rows_of(file))
    assert [(line, row["n"]) for line, _, _, row in whole] == [(1, 1), (3, 3), (4, 4)]
    assert [where for _, _, where, _ in whole] == [f"{file}, line {n}" for n in (1, 3, 4)]
    for place, (line, offset, _, _) in enumerate(whole):
        assert list(rows_of(file, line, offset)) == whole[place + 1 :]
