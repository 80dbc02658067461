"""The checks of the API tests of vLLM, SGLang and Ray Serve LLM, on our server. Every test here is
our own; its docstring names the peers' test that checks the same. A behaviour that differs fails
here too, is marked by `differs`, and has a reason: `docs/lab/compatibility.md` lists these."""
