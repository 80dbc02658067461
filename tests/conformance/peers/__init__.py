"""What the API tests of vLLM, SGLang and Ray Serve LLM ask of a server, asked of ours. Every test
here is our own; its docstring names the peers' test that asks for the same. What we do differently
fails here too, by `differs`, with the reason: `docs/compatibility.md` lists these."""
