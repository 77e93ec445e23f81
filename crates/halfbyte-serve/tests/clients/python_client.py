"""The official client for Python against a server: python_client.py URL KEY. Says "ok" or fails."""

import base64
import json
import struct
import sys
import threading

import openai

url, key = sys.argv[1:3]
client = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=60)

names = [model.id for model in client.models.list()]
assert "chat" in names and "plain" in names, names
assert client.models.retrieve("chat").id == "chat"

ask = dict(model="chat", messages=[{"role": "user", "content": "read a file"}], max_completion_tokens=24, temperature=0)
whole = client.chat.completions.create(**ask)
text = whole.choices[0].message.content
assert text and whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens, whole
assert whole.choices[0].finish_reason in ("length", "stop"), whole

# Streamed: the same text, with what was read and written at the end.
stream = client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True})
pieces, usage = [], None
for chunk in stream:
    pieces += [choice.delta.content or "" for choice in chunk.choices]
    usage = chunk.usage or usage
assert "".join(pieces) == text, (pieces, text)
assert usage == whole.usage, (usage, whole.usage)

# Stop strings, choices, logarithms, seeds.
stop = text[len(text) // 2 :][:3]
stopped = client.chat.completions.create(**ask, stop=[stop])
assert stopped.choices[0].message.content == text.split(stop)[0] and stopped.choices[0].finish_reason == "stop", stopped
warm = ask | dict(temperature=1.0, n=3, seed=7, logprobs=True, top_logprobs=2)
one, two = client.chat.completions.create(**warm), client.chat.completions.create(**warm)
assert [c.message.content for c in one.choices] == [c.message.content for c in two.choices]
assert len(one.choices) == 3 and len(one.choices[0].logprobs.content[0].top_logprobs) == 2

# JSON that follows a schema, parsed by the client's own means.
schema = {"type": "object", "properties": {"ok": {"type": "boolean"}, "n": {"type": "integer", "minimum": 0, "maximum": 9}},
          "required": ["ok", "n"], "additionalProperties": False}
form = {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": schema}}
answer = json.loads(client.chat.completions.create(**(ask | dict(max_completion_tokens=100)), response_format=form).choices[0].message.content)
assert isinstance(answer["ok"], bool) and 0 <= answer["n"] <= 9, answer

# A tool that must be called.
tool = {"type": "function", "function": {"name": "look", "parameters": schema}}
called = client.chat.completions.create(**(ask | dict(model="tools", max_completion_tokens=100)), tools=[tool], tool_choice="required")
call = called.choices[0].message.tool_calls[0]
assert call.function.name == "look" and set(json.loads(call.function.arguments)) == {"ok", "n"}, called

# Completions and embeddings; the client asks for base64 and unpacks it.
assert client.completions.create(model="plain", prompt="import ", max_tokens=8, temperature=0).choices[0].text
vector = client.embeddings.create(model="plain", input="import os").data[0].embedding
assert len(vector) == 384 and abs(sum(x * x for x in vector) - 1) < 1e-3
packed = client.embeddings.create(model="plain", input="import os", encoding_format="base64").data[0].embedding
assert list(struct.unpack("<384f", base64.b64decode(packed))) == vector

# Errors are those that the client knows.
def refused(kind, status, **more):
    try:
        client.chat.completions.create(**(ask | more))
    except kind as error:
        assert error.status_code == status and error.body["message"], error
        return error
    raise AssertionError(f"{more} was taken")

assert refused(openai.NotFoundError, 404, model="other").code == "model_not_found"
assert refused(openai.BadRequestError, 400, model="plain").code == "no_chat_template"
assert refused(openai.BadRequestError, 400, temperature=9).param == "temperature"
assert refused(openai.BadRequestError, 400, extra_body={"colour": "red"}).code == "unknown_parameter"
assert refused(openai.BadRequestError, 400, messages=[{"role": "user", "content": "word " * 3000}]).code == "context_length_exceeded"
try:
    openai.OpenAI(base_url=f"{url}/v1", api_key="not-the-key-of-anybody", max_retries=0).models.list()
    raise AssertionError("a wrong key was taken")
except openai.AuthenticationError as error:
    assert error.code == "invalid_api_key"

# Cancellation: a stream that is closed ends its text.
long = client.completions.create(model="plain", prompt="def ", max_tokens=900, stream=True, extra_body={"ignore_eos": True})
next(iter(long))
long.close()

# Several at once, each as alone.
results = [None] * 12
def work(at):
    results[at] = client.chat.completions.create(**ask).choices[0].message.content
threads = [threading.Thread(target=work, args=(at,)) for at in range(len(results))]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
assert all(result == text for result in results), (results, text)
print("ok")
