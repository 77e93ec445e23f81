"""What jinja2 makes of chat templates, set up as transformers does: python oracles/chat_templates.py FOLDER.

FOLDER has templates (*.jinja); expected.json is written there: for each template, conversation and choice of what comes after it
the text, or the error of a template that refuses. Needs jinja2, of which requirements.txt names the version.
"""

import json
import pathlib
import sys

from jinja2 import nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment


class Generation(Extension):
    """The mark of what an assistant wrote, which writes nothing by itself."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return nodes.CallBlock(self.call_method("written"), [], [], body).set_lineno(line)

    def written(self, caller):
        return caller()


def refuse(message):
    raise TemplateError(message)


def to_json(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def told(message):
    """What transformers tells a template of a message: no fields of None, and reasoning under the names that templates read."""
    message = {name: value for name, value in message.items() if value is not None}
    names = [name for name in ("reasoning_content", "thinking", "reasoning") if name in message]
    return {"thinking": message[names[0]], **message, "reasoning_content": message[names[0]]} if names else message


def turns(*contents, system=None):
    messages = [] if system is None else [{"role": "system", "content": system}]
    roles = ["user", "assistant"]
    return messages + [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]


CONVERSATIONS = [
    turns("Hello"),
    turns("Hello", system="Be brief."),
    turns("  What is 2 + 2?\n", "\n4 <b>\"four\"</b> & more\\\n", "Why?", system="  You know é, 世界 and \U0001f980.\n"),
    turns("Think.", "<think>\nOne.\nTwo.\n</think>\n\nDone.", "", "<think>\nStill?\n</think>\n\nYes.\t\u0001"),
    turns("a") + [{"role": "tool", "content": "{\"x\": 1}\n"}],
    [{"role": "assistant", "content": "I begin."}, {"role": "user", "content": "Do not."}],
]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tells the weather of a \"place\"",
        "parameters": {
            "type": "object",
            "properties": {
                "place": {"type": "string", "enum": ["Zürich", "東京"]},
                "days": {"type": "integer", "default": 3, "minimum": -1},
                "detail": {"type": "number", "default": 0.5},
            },
            "required": ["place"],
            "additionalProperties": False,
        },
        "return": None,
    },
}
CLOCK = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}


def call(name, arguments, number="abcdef123"):
    return {"type": "function", "id": number, "function": {"name": name, "arguments": arguments}}


ASKED = turns("What is the weather in Zürich?", system="Use tools.")
CALLED = ASKED + [
    {"role": "assistant", "content": "", "tool_calls": [call("get_weather", {"place": "Zürich", "days": 2, "detail": 1.0})]},
    {"role": "tool", "tool_call_id": "abcdef123", "name": "get_weather", "content": "{\"rain\": true}"},
]
TWICE = turns("Both?") + [
    {"role": "assistant", "content": None, "tool_calls": [call("clock", {}), call("get_weather", {"place": "東京"}, "xyz")]},
    {"role": "tool", "content": "12:00"},
    {"role": "tool", "content": "dry"},
    {"role": "assistant", "content": "Noon, and dry."},
    {"role": "user", "content": "Thanks."},
]
DOCUMENTS = [{"title": "A", "text": "One.", "year": 1999, "tags": ["x", None]}, {"text": "Two."}]
# Conversations with what templates are told besides: tools, documents.
TOLD = [
    (ASKED, [WEATHER], None),
    (CALLED, [CLOCK, WEATHER], None),
    (CALLED, None, DOCUMENTS),
    (TWICE, [WEATHER], None),
    (turns("Hello"), [], []),
]
REASONED = [
    turns("a") + [{"role": "assistant", "content": "b", name: "c"} | more]
    for name in ("reasoning_content", "thinking", "reasoning")
    for more in ({}, {"reasoning_content": None}, {"thinking": "d", "tool_calls": None}, {"content": None})
]
TOKENS = [{"bos_token": "<s>", "eos_token": "</s>"}, {"bos_token": "<bos>"}]


def main(folder):
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    cases = []
    for path in sorted(folder.glob("*.jinja")):
        template = environment.from_string(path.read_text(encoding="utf-8"))
        for tokens in TOKENS:
            of_all = [(messages, None, None) for messages in CONVERSATIONS]
            more = TOLD if path.stem.startswith(("tools", "documents")) else []
            more += [(messages, None, None) for messages in REASONED] if path.stem == "reasoning" else []
            for messages, tools, documents in of_all + more:
                for answer in (False, True):
                    case = {"template": path.name, "tokens": tokens, "messages": messages, "answer": answer}
                    given = {"tools": tools, "documents": documents}
                    case |= {name: value for name, value in given.items() if value is not None}
                    try:
                        case["text"] = template.render(
                            messages=[told(message) for message in messages], add_generation_prompt=answer, **given, **tokens
                        )
                    except TemplateError as error:
                        case["error"] = str(error)
                    cases.append(case)
    text = json.dumps(cases, ensure_ascii=False, indent=1)
    (folder / "expected.json").write_text(text + "\n", encoding="utf-8")
    print(f"{len(cases)} cases, {sum('error' in case for case in cases)} of them refused")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
