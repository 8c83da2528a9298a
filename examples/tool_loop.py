"""A tool loop through the official OpenAI client: the model calls a tool, gets its result and answers.

make serve                                    # in another terminal
.venv/bin/python examples/tool_loop.py        # or with another question, and another address, as its arguments
"""

from __future__ import annotations

import json
import sys
from typing import Any

from openai import APIConnectionError, OpenAI

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Get the weather of a city",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]


def get_weather(city: str) -> str:
    """What a real program would ask a weather service."""
    return json.dumps({"temperature": 21, "condition": "sunny" if city == "Paris" else "cloudy"})


def main() -> None:
    """Ask until the model answers without calling a tool."""
    address = sys.argv[2] if len(sys.argv) > 2 else "http://127.0.0.1:8000"
    client = OpenAI(base_url=f"{address}/v1", api_key="none")
    question = sys.argv[1] if len(sys.argv) > 1 else "What is the weather in Paris?"
    messages: list[Any] = [{"role": "user", "content": question}]
    print("user:     ", question)
    for _ in range(5):
        answer = client.chat.completions.create(model="ds4", messages=messages, tools=TOOLS, temperature=0)
        message, usage = answer.choices[0].message, answer.usage
        messages.append(message.model_dump(exclude_none=True))
        print("thinking: ", getattr(message, "reasoning_content", None))
        if usage is not None and usage.prompt_tokens_details is not None:
            print(
                "tokens:   ", usage.prompt_tokens, "of the prompt,", usage.prompt_tokens_details.cached_tokens, "reused"
            )
        if not message.tool_calls:
            print("assistant:", message.content)
            return
        for call in message.tool_calls:
            assert call.type == "function"
            print("call:     ", call.function.name, call.function.arguments)
            result = get_weather(**json.loads(call.function.arguments))
            print("result:   ", result)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


if __name__ == "__main__":
    try:
        main()
    except APIConnectionError:
        sys.exit("no server answers at that address: start one with `make serve`")
