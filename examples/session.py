"""Sends a prompt in chunks. The engine computes each chunk once: the KV cache keeps what came
before it.

    swell serve configs/demo.yaml
    python examples/session.py [URL]
"""

import sys

import httpx

CHUNKS = ("The first part of a report. ", "The second part. ", "In one sentence:")


def main(url: str = "http://127.0.0.1:8000") -> None:
    with httpx.Client(base_url=url, timeout=60) as client:
        session = client.post("/v1/sessions", json={}).raise_for_status().json()["id"]
        for number, chunk in enumerate(CHUNKS):
            is_last = number == len(CHUNKS) - 1
            request = {
                "session_id": session,
                "session_chunk": number,  # a client that repeats a request says where it belongs
                "prompt": chunk,
                "max_tokens": 20 if is_last else 0,
                "temperature": 0,
            }
            answer = client.post("/v1/completions", json=request).raise_for_status().json()
            usage = answer["usage"]
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            print(
                f"chunk {number}: {usage['prompt_tokens']} prompt tokens, {cached} from the cache"
            )
        print(answer["choices"][0]["text"])
        client.delete(f"/v1/sessions/{session}").raise_for_status()


if __name__ == "__main__":
    main(*sys.argv[1:])
