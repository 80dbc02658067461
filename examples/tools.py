"""Requires the model to call a tool, and prints the call. The arguments of any model fit the
schema of the tool, because a grammar restricts the tokens that are sampled.

    swell serve configs/demo.yaml
    python examples/tools.py [URL]
"""

import json
import sys

from openai import OpenAI

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Returns the weather of a city.",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"enum": ["Oslo", "Lima", "Pune"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 7},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}


def main(url: str = "http://127.0.0.1:8000") -> None:
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    answer = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": "How is the weather in Oslo?"}],
        tools=[WEATHER],
        tool_choice={"type": "function", "function": {"name": "get_weather"}},
        temperature=0,
    )
    call = answer.choices[0].message.tool_calls[0].function
    print(call.name, json.loads(call.arguments))


if __name__ == "__main__":
    main(*sys.argv[1:])
