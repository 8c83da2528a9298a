"""What a second turn costs: OpenAI's Responses by id, and Anthropic's Messages with a tool and without the thinking.

make serve                                         # in another terminal
.venv/bin/python examples/continue_live.py         # or with another address as its argument
"""

from __future__ import annotations

import sys
from typing import Any

from anthropic import Anthropic
from openai import APIConnectionError, OpenAI

TOOL: Any = {
    "name": "get_weather",
    "description": "Get the weather of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


def responses(address: str) -> None:
    """The second request names the first answer; its hidden reasoning is still there."""
    client = OpenAI(base_url=f"{address}/v1", api_key="none")
    earlier: str | None = None
    for question in ("What is 12 + 30?", "What is 7 + 9?"):
        answer = client.responses.create(
            model="ds4", input=question, previous_response_id=earlier, temperature=0, max_output_tokens=300
        )
        earlier = answer.id
        print("responses:", question, "->", answer.output_text)
        if answer.usage is not None:
            reused = answer.usage.input_tokens_details.cached_tokens
            print("           ", answer.usage.input_tokens, "tokens before the answer,", reused, "of them reused")


def messages(address: str) -> None:
    """The call comes back without the thinking and the text around it; the state is found by the call's id."""
    client = Anthropic(base_url=address, api_key="none")
    conversation: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
    for _ in range(3):
        answer: Any = client.messages.create(
            model="ds4",
            max_tokens=300,
            messages=conversation,
            tools=[TOOL],
            thinking={"type": "enabled", "budget_tokens": 1024},
            extra_body={"temperature": 0},
        )
        usage = answer.usage
        total = usage.input_tokens + usage.cache_read_input_tokens
        print("messages:  ", total, "tokens before the answer,", usage.cache_read_input_tokens, "of them reused")
        calls = [block for block in answer.content if block.type == "tool_use"]
        if not calls:
            print("messages:  ", "".join(block.text for block in answer.content if block.type == "text"))
            return
        for call in calls:
            print("messages:  ", call.name, call.input)
        kept = [{"type": "tool_use", "id": call.id, "name": call.name, "input": call.input} for call in calls]
        results = [{"type": "tool_result", "tool_use_id": call.id, "content": "sunny, 21 degrees"} for call in calls]
        conversation += [{"role": "assistant", "content": kept}, {"role": "user", "content": results}]


def main() -> None:
    """Both, one after the other."""
    address = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
    responses(address)
    messages(address)


if __name__ == "__main__":
    try:
        main()
    except APIConnectionError:
        sys.exit("no server answers at that address: start one with `make serve`")
