"""What the API tests of vLLM, SGLang and Ray Serve LLM check on a server, checked on ours. Every
test here is our own; its docstring names the peers' test that checks the same. What we do
differently fails here too, by `differs`, with the reason: `docs/compatibility.md` lists these."""
