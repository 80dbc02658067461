"""The checks of the API tests of vLLM, SGLang and Ray Serve LLM, on a server of ours. Every
test here is our own; its docstring names the peers' test that checks the same. A behaviour that
differs fails here too, by `differs`, with the reason: `docs/lab/compatibility.md` lists these."""
