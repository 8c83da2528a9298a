"""A tool loop with OpenAI's client: the model may read files of the current directory."""

import json
import sys
from pathlib import Path

from openai import OpenAI


def read_file(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError as error:
        return f"Error: {error}"


client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
parameters = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
read = {"name": "read_file", "description": "Read a text file", "parameters": parameters}
messages = [{"role": "user", "content": sys.argv[1]}]
while True:
    answer = client.chat.completions.create(
        model="deepseek-v4-flash", messages=messages, tools=[{"type": "function", "function": read}]
    )
    message = answer.choices[0].message
    messages.append(message.model_dump(exclude_none=True))  # with its reasoning, if there was any
    if not message.tool_calls:
        break
    for call in message.tool_calls:
        text = read_file(**json.loads(call.function.arguments))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": text})
print(message.content)
