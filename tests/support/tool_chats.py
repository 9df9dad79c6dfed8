"""Five conversations with tools, in the four forms that data sets have, and three templates."""

import copy
import json
from pathlib import Path
from typing import Any

HERMES = (  # tools in the system's turn, calls and results between tags; results are the user's
    "{% set own = messages[0].role == 'system' %}"
    "{% if tools or own %}<|im_start|>system\n{{ messages[0].content if own }}"
    "{% if tools %}\n\nFunctions you may call:\n<tools>"
    "{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}\n</tools>\n"
    'Answer a call as <tool_call>{"name": …, "arguments": …}</tool_call>.{% endif %}'
    "<|im_end|>\n{% endif %}"
    "{% for m in messages[own | int:] %}"
    "{% if m.role == 'tool' %}"
    "{% if loop.previtem is undefined or loop.previtem.role != 'tool' %}<|im_start|>user{% endif %}"
    "\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or loop.nextitem.role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{% set call = call.function or call %}"
    '{{ "\n" if m.content or not loop.first }}<tool_call>\n{"name": {{ call.name | tojson }}, '
    '"arguments": {{ call.arguments | tojson }}}\n</tool_call>{% endfor %}<|im_end|>\n{% endif %}'
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA = (  # tools in the first user turn, one call a turn as bare JSON, results have their own role
    "<s>{% set own = messages[0].role == 'system' %}"
    "<|im_start|>system<|h|>\n\n{% if tools %}Environment: ipython\n{% endif %}"
    "{{ messages[0].content if own }}<|im_end|>"
    "{% for m in messages[own | int:] %}"
    "{% if loop.first and tools %}"
    "{% if m.role != 'user' %}{{ raise_exception('tools need a first user turn') }}{% endif %}"
    "<|im_start|>user<|h|>\n\nGiven these functions, answer with JSON for a call.\n\n"
    "{% for tool in tools %}{{ tool | tojson(indent=4) }}\n\n{% endfor %}{{ m.content }}<|im_end|>"
    "{% elif m.tool_calls %}"
    "{% if m.tool_calls | length != 1 %}{{ raise_exception('one call at once') }}{% endif %}"
    "{% set call = m.tool_calls[0].function %}<|im_start|>assistant<|h|>\n\n"
    '{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}<|im_end|>'
    "{% elif m.role == 'tool' %}<|im_start|>ipython<|h|>\n\n"
    "{{ m.content | tojson if m.content is mapping else m.content }}<|im_end|>"
    "{% else %}<|im_start|>{{ m.role }}<|h|>\n\n{{ m.content | trim }}<|im_end|>{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant<|h|>\n\n{% endif %}"
)
MISTRAL = (  # tools before the last user turn, calls and results in brackets, the system's with it
    "<s>{% set own = messages[0].role == 'system' %}"
    "{% set turns = messages[own | int:] %}{% set place = namespace(last=-1) %}"
    "{% for m in turns %}{% if m.role == 'user' %}{% set place.last = loop.index0 %}{% endif %}"
    "{% endfor %}{% for m in turns %}"
    "{% if m.role == 'user' %}"
    "{% if tools and loop.index0 == place.last %}"
    "[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "[INST]{{ messages[0].content + '\n\n' if own and loop.first }}{{ m.content }}[/INST]"
    "{% elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]"
    "{% elif m.tool_calls %}{% for call in m.tool_calls %}"
    "[TOOL_CALLS]{{ call.function.name }}[ARGS]{{ call.function.arguments | tojson }}"
    "{% endfor %}<|im_end|>"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
)
TEMPLATES = {"hermes": HERMES, "llama": LLAMA, "mistral": MISTRAL}


def _tool(name: str, required: list[str], **properties: dict[str, Any]) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": required}
    about = {"name": name, "description": f"Does {name}.", "parameters": parameters}
    return {"type": "function", "function": about}


WEATHER = _tool(
    "weather", ["city"],
    city={"type": "string"}, unit={"type": "string", "enum": ["C", "F"]},
)  # fmt: skip
ADD = _tool("add", ["a", "b"], a={"type": "number"}, b={"type": "number"})
CLOCK = _tool("clock", [])


def _call(name: str, **arguments: Any) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _say(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


OBJECTS = [
    {"tools": [WEATHER], "messages": [
        _say("user", "Weather in Rome?"), _call("weather", city="Rome"),
        _say("tool", '{"sky": "rain"}'), _say("assistant", "It rains in Rome."),
    ]},
    {"tools": [WEATHER, ADD], "messages": [
        _say("system", "Be brief."), _say("user", "Überall warm? Oslo, °F."),
        _call("weather", city="Oslo \"Ø\"", unit="F"), _say("tool", "50"),
        _say("assistant", "50 °F."), _say("user", "And 2 + 3?"), _call("add", a=2, b=3),
        _say("tool", "5"), _say("assistant", "5."),
    ]},
    {"tools": [CLOCK], "messages": [
        _say("user", "What time is it?"), _call("clock"), _say("tool", "12:30"),
        _say("assistant", "Half past twelve."),
    ]},
    {"tools": [ADD, CLOCK], "messages": [
        _say("user", "Hi"), _say("assistant", "Hello!"), _say("user", "1 + 1, then the time"),
        _call("add", a=1, b=1), _say("tool", "2"), _call("clock"), _say("tool", "13:00"),
        _say("assistant", "2, at one."),
    ]},
    {"tools": [WEATHER], "messages": [
        _say("user", "Weather in Bonn, in C?"), _call("weather", city="Bonn", unit="C"),
    ]},
]  # fmt: skip
"""The first form, calls as objects; the fifth ends with the call itself."""


def as_strings() -> list[dict[str, Any]]:
    """As OpenAI's API writes them: a call's arguments are JSON text, its content null."""
    rows = copy.deepcopy(OBJECTS)
    for message in (m for row in rows for m in row["messages"] if "tool_calls" in m):
        message["content"] = None
        function = message["tool_calls"][0]["function"]
        function["arguments"] = json.dumps(function["arguments"])
    return rows


def as_sharegpt() -> list[dict[str, Any]]:
    names = {"user": "human", "assistant": "gpt", "tool": "observation", "system": "system"}
    rows = []
    for row in OBJECTS:
        turns = []
        for message in row["messages"]:
            turn = {"from": names[message["role"]], "value": message["content"]}
            if "tool_calls" in message:
                call = message["tool_calls"][0]["function"]
                turn = {"from": "function_call", "value": json.dumps(call)}
            turns.append(turn)
        rows.append({"tools": json.dumps(row["tools"]), "conversations": turns})
    return rows


def write_all(folder: Path) -> dict[str, str]:
    """The four files; what Parquet's rows lack is null in them."""
    import datasets

    lines = {"objects": OBJECTS, "strings": as_strings(), "sharegpt": as_sharegpt()}
    files = {}
    for name, rows in lines.items():
        files[name] = str(folder / f"{name}.jsonl")
        Path(files[name]).write_text("".join(json.dumps(row) + "\n" for row in rows))
    files["parquet"] = str(folder / "table.parquet")
    table = datasets.Dataset.from_list(OBJECTS)
    table.to_parquet(files["parquet"])
    files["table as lines"] = str(folder / "table.jsonl")
    table.to_json(files["table as lines"])
    return files
