"""Changes the number of engines while answers stream: no request fails.

swell serve configs/demo.yaml
python examples/rescale.py [URL] [ENGINES]
"""

import asyncio
import sys
from collections import Counter

import httpx

CLIENTS = 8
CHANGE_S = 300.0
"""Limit of one change: a new engine starts processes and loads the model."""


async def ask(client: httpx.AsyncClient, model: str, served: Counter[str]) -> None:
    """Sends one prompt and counts the engines that served it."""
    request = {
        "model": model,
        "messages": [{"role": "user", "content": "count from 12 to 30"}],
        "temperature": 0,
    }
    answer = await client.post("/v1/chat/completions", json=request)
    answer.raise_for_status()
    served[answer.headers["x-swell-engine"]] += 1


async def scale(client: httpx.AsyncClient, engines: int) -> None:
    """Requests this number of engines and waits until the cluster has it."""
    answer = await client.post("/admin/scale", json={"engines": engines})
    answer.raise_for_status()
    async with asyncio.timeout(CHANGE_S):
        while True:
            state = (await client.get("/admin/cluster")).json()
            if len(state["engines"]) == engines and state["rescale"]["phase"] == "idle":
                return
            await asyncio.sleep(0.2)


async def main(url: str = "http://127.0.0.1:8000", engines: str = "2") -> None:
    served: Counter[str] = Counter()
    is_finished = asyncio.Event()

    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        before = len((await client.get("/admin/cluster")).json()["engines"])

        async def ask_until_finished() -> None:
            while not is_finished.is_set():
                await ask(client, model, served)

        async with asyncio.TaskGroup() as group:
            for _ in range(CLIENTS):
                group.create_task(ask_until_finished())
            for count in (int(engines), before):
                await scale(client, count)
                print(f"{count} engines after {served.total()} answers, none failed")
            is_finished.set()
    for engine, answers in sorted(served.items()):
        print(f"engine {engine}: {answers} answers")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
