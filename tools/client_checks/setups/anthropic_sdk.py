"""A tool loop with Anthropic's client: the model may read files of the current directory."""

import sys
from pathlib import Path

from anthropic import Anthropic


def read_file(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError as error:
        return f"Error: {error}"


client = Anthropic(base_url="http://127.0.0.1:8000", api_key="none")
schema = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
read = {"name": "read_file", "description": "Read a text file", "input_schema": schema}
messages = [{"role": "user", "content": sys.argv[1]}]
while True:
    answer = client.messages.create(model="deepseek-v4-flash", max_tokens=4096, messages=messages, tools=[read])
    messages.append({"role": "assistant", "content": answer.content})
    calls = [block for block in answer.content if block.type == "tool_use"]
    if not calls:
        break
    results = [{"type": "tool_result", "tool_use_id": call.id, "content": read_file(**call.input)} for call in calls]
    messages.append({"role": "user", "content": results})
print("".join(block.text for block in answer.content if block.type == "text"))
