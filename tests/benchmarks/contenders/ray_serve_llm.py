"""Runs Ray Serve LLM over vLLM: `MODEL PORT FOLDER`, until it is stopped. Ray's own files go to
FOLDER."""

import importlib.metadata
import os
import sys
import threading

ENGINE = {"dtype": "float32", "max_model_len": 2048, "enable_prefix_caching": False}
ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "2", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}


def patch_vllm_version():
    """Makes Ray find vLLM's version: vLLM's CPU build has another distribution name."""
    known = importlib.metadata.version

    def version(name):
        try:
            return known(name)
        except importlib.metadata.PackageNotFoundError:
            return known(f"{name}-cpu")

    importlib.metadata.version = version


def main(model, port, folder):
    patch_vllm_version()
    os.environ.update(ENVIRONMENT, RAY_AUTH_MODE="disabled", RAY_USAGE_STATS_ENABLED="0")
    import ray
    from ray import serve
    from ray.serve.llm import LLMConfig, build_openai_app

    ray.init(address="local", num_cpus=6, include_dashboard=False, _temp_dir=folder)
    serve.start(http_options={"host": "127.0.0.1", "port": int(port)})
    config = LLMConfig(
        model_loading_config={"model_id": "m", "model_source": model},
        deployment_config={"num_replicas": 1, "max_ongoing_requests": 256},
        engine_kwargs=ENGINE,
        placement_group_config={"bundles": [{"CPU": 1}]},
        runtime_env={"env_vars": ENVIRONMENT},
    )
    serve.run(build_openai_app({"llm_configs": [config]}))
    try:
        threading.Event().wait()
    finally:
        serve.shutdown()  # otherwise its engine leaks shared memory


if __name__ == "__main__":
    main(*sys.argv[1:])
