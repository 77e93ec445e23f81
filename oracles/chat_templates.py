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
            for messages in CONVERSATIONS:
                for answer in (False, True):
                    case = {"template": path.name, "tokens": tokens, "messages": messages, "answer": answer}
                    try:
                        case["text"] = template.render(
                            messages=messages, tools=None, documents=None, add_generation_prompt=answer, **tokens
                        )
                    except TemplateError as error:
                        case["error"] = str(error)
                    cases.append(case)
    text = json.dumps(cases, ensure_ascii=False, indent=1)
    (folder / "expected.json").write_text(text + "\n", encoding="utf-8")
    print(f"{len(cases)} cases, {sum('error' in case for case in cases)} of them refused")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
