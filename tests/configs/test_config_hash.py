"""The changes of a configuration that need new engines."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from swell.configs import config_hash as module
from swell.configs.config_hash import config_hash
from swell.configs.schema import Config, load

SAME = {
    "model.name": "another name",
    "model.special_tokens_in_text": "control",
    "parallel.data": 7,
    "serve.port": 0,
    "serve.ingress_replicas": 3,
    "autoscaling.enabled": True,
    "autoscaling.queue_s": 3.0,
    "cluster.max_engines": 9,
    "cluster.drain_timeout_s": 1.0,
}
OTHER = {
    "model.path": "another",
    "model.dtype": "float32",
    "model.max_model_len": 77,
    "parallel.tensor": 2,
    "parallel.expert": True,
    "cache.block_tokens": 32,
    "scheduler.max_rows": 7,
    "drafts.method": "ngram",
    "cluster.stall_timeout_s": 7.0,
}


def base(**overrides: object) -> Config:
    return load({"model": {"path": "m"}}, overrides)


@pytest.mark.parametrize("key", SAME)
def test_keys_that_no_engine_reads_keep_the_engines(key: str) -> None:
    assert config_hash(base(**{key: SAME[key]})) == config_hash(base())


@pytest.mark.parametrize("key", OTHER)
def test_keys_that_an_engine_is_built_from_need_a_new_engine(key: str) -> None:
    assert config_hash(base(**{key: OTHER[key]})) != config_hash(base())


def test_the_most_engines_that_share_experts_need_a_new_engine() -> None:
    """Workers reserve memory for the exchange between all of them."""
    sharing = {"parallel.expert": True}
    more = {"cluster.max_engines": 9}
    assert config_hash(base(**sharing)) != config_hash(base(**sharing, **more))


def test_all_keys_count_except_named_ones() -> None:
    """Every key counts, also a new one, until it is excluded by name."""
    free = {"model.name", "model.special_tokens_in_text"}
    free |= {f"parallel.{key}" for key in ("data", "prefill_engines", "prefill_min_tokens")}
    free |= {f"cluster.{key}" for key in ("max_engines", "drain_timeout_s")}
    config = base()
    for section in ("model", "parallel", "cache", "scheduler", "drafts", "cluster"):
        part = getattr(config, section)
        for key in part.__struct_fields__:
            changed = msgspec.structs.replace(part, **{key: "something else"})
            other = msgspec.structs.replace(config, **{section: changed})
            same = config_hash(other) == config_hash(config)
            assert same == (f"{section}.{key}" in free), f"{section}.{key}"


def test_excluded_keys_are_read_by_no_engine_worker_or_coordinator() -> None:
    """No engine, worker or coordinator reads an excluded key: an engine that is adopted was built
    with an earlier value."""
    root = Path(module.__file__).parents[1]
    keys = [key for part in module._NOT_OF_ENGINES.values() for key in part] + [
        "serve",
        "autoscaling",
    ]
    reads = re.compile(rf"config\.(?:\w+\.)?({'|'.join(keys)})\b")
    found = {
        (path.relative_to(root).as_posix(), match[1])
        for folder in ("engine", "worker", "coordinator", "kernels")
        for path in (root / folder).rglob("*.py")
        for match in reads.finditer(path.read_text())
    }
    shares = {
        ("engine/executor/host_shares.py", "data"),  # the number of cores for each worker
        ("worker/cache_size.py", "max_engines"),  # only of engines that share experts
    }
    assert found == shares
