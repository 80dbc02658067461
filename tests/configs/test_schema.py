"""A configuration is frozen, unknown keys are refused, and each error is one line."""

from __future__ import annotations

import io
import logging
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swell.configs.runtime.log import KeyValueFormatter, StructuredLogger
from swell.configs.schema import Config, ConfigError, load, parse_override

ROOT = Path(__file__).parents[2]

CONTRACT_KEYS = {
    "model": ["path", "load_format", "dtype", "max_model_len", "device"],
    "parallel": ["data", "tensor", "pipeline", "expert"],
    "cache": ["block_tokens", "memory_bytes", "memory_fraction", "prefix_caching"],
    "scheduler": ["max_tokens_per_step", "max_rows", "policy", "steps_in_flight"],
    "serve": ["host", "port", "ingress_replicas", "api_keys_file"],
    "cluster": ["min_engines", "max_engines", "stall_timeout_s", "gpus_per_worker"],
}
"""Keys on which scripts and users rely: keys may be added, but these may not be removed."""


def refusal(source: object, overrides: dict[str, object] | None = None) -> str:
    """Returns the one-line error of `load`."""
    with pytest.raises(ConfigError) as caught:
        load(source, overrides)
    text = str(caught.value)
    assert text and "\n" not in text
    return text


def config(**sections: dict[str, object]) -> Config:
    return load({"model": {"path": "m"}, **sections})


def yaml(folder: Path, text: str | bytes) -> str:
    path = folder / "a.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


@pytest.mark.parametrize(
    ("section", "key"), [(s, key) for s, keys in CONTRACT_KEYS.items() for key in keys]
)
def test_contract_keys_can_be_set(section: str, key: str) -> None:
    value = getattr(getattr(config(), section), key)
    again = load({"model": {"path": "m"}}, {f"{section}.{key}": value})
    assert again == config()


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("model.load_format", ["auto", "dummy", "sharded"]),
        ("model.device", ["auto", "cpu", "cuda"]),
        ("scheduler.policy", ["fcfs", "priority"]),
        ("drafts.method", ["none", "ngram"]),
    ],
)
def test_contract_values(key: str, values: list[str]) -> None:
    section, _, name = key.partition(".")
    for value in values:
        chosen = load({"model": {"path": "m"}}, {key: value})
        assert getattr(getattr(chosen, section), name) == value
    assert key in refusal({"model": {"path": "m"}}, {key: "other"})


def test_defaults_pass_their_own_ranges() -> None:
    """Defaults pass their own ranges; constructing a Struct does not check them."""
    default = config()
    assert msgspec.convert(msgspec.to_builtins(default), Config) == default


def test_a_config_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        config().model.seed = 3  # type: ignore[misc]


@pytest.mark.parametrize("section", [*CONTRACT_KEYS])
def test_an_unknown_key_is_named_with_its_path_and_the_known_ones(section: str) -> None:
    source = {"model": {"path": "m"}}
    written = {**source, section: {**source.get(section, {}), "nonsense": 1}}
    for text in (refusal(source, {f"{section}.nonsense": 1}), refusal(written)):
        assert f"'{section}.nonsense'" in text
        assert all(key in text for key in CONTRACT_KEYS[section])


def test_an_unknown_section_is_named_with_the_known_ones() -> None:
    for text in (
        refusal({"model": {"path": "m"}, "nonsense": {}}),
        refusal({"model": {"path": "m"}}, {"nonsense.key": 1}),
        refusal({"model": {"path": "m"}}, {"scheduler.": 1}),
    ):
        assert ("nonsense" in text or "scheduler." in text) and all(
            s in text for s in CONTRACT_KEYS
        )


@pytest.mark.parametrize(
    ("key", "good", "bad"),
    [
        ("parallel.tensor", [1, 8], [0, -1, "2", 1.5, True, None]),
        ("parallel.expert", [True, False], [1, "yes"]),
        ("model.max_model_len", [1, None], [0, -5]),
        ("model.seed", [0, 7], [-1]),
        ("model.path", ["owner/name"], ["", 3, None]),
        ("cache.memory_fraction", [0.01, 1.0, 1], [0.0, 1.01, -0.5, float("nan")]),
        ("cache.memory_bytes", [None, 1], [0]),
        ("cache.block_tokens", [1, 16], [0]),
        ("scheduler.steps_in_flight", [1, 16], [0, 17]),
        ("scheduler.steps_per_plan", [1, 32], [0, 33]),
        ("parallel.balance_steps", [0], [-1]),
        ("parallel.redundant_experts", [0], [-1, 4097]),
        ("scheduler.max_chunk_tokens", [0, 64], [-1]),
        ("drafts.model", [None], ["m", 3]),
        ("drafts.max_tokens", [1, 32], [0, 33]),
        ("drafts.min_match", [1, 8], [0, 33]),
        ("drafts.max_match", [3, 32], [0, 33]),
        ("drafts.max_step_tokens", [2, 4096], [1, 4097]),
        ("serve.port", [0, 65535], [-1, 65536]),
        ("serve.max_body_bytes", [1, 2**25], [0, 2**25 + 1]),
        ("cluster.stall_timeout_s", [0.001, 30], [0, -1]),
        ("cluster.load_report_s", [0.05], [0]),
    ],
)
def test_ranges(key: str, good: list[object], bad: list[object]) -> None:
    for value in good:
        load({"model": {"path": "m"}}, {key: value})
    for value in bad:
        text = refusal({"model": {"path": "m"}}, {key: value})
        assert text.startswith(f"{key}: " if value is None else f"{key}={value!r}: ")


def test_rules_between_keys_name_both_keys_and_values() -> None:
    text = refusal({"model": {"path": "m"}, "cluster": {"min_engines": 5, "max_engines": 2}})
    assert "cluster.min_engines=5" in text and "cluster.max_engines=2" in text
    for data in (1, 5):
        text = refusal(
            {
                "model": {"path": "m"},
                "parallel": {"data": data},
                "cluster": {"min_engines": 2, "max_engines": 4},
            }
        )
        assert f"parallel.data={data}" in text
        assert "cluster.min_engines=2" in text and "cluster.max_engines=4" in text


def test_derived_values() -> None:
    parts = config(parallel={"tensor": 2, "pipeline": 3})
    assert parts.parallel.world == 6
    assert load("owner/name").model.served_name == "name"
    assert load("folder/name/").model.served_name == "name"
    assert load({"model": {"path": "folder/name", "name": "mine"}}).model.served_name == "mine"


# -------------------------------------------------------------------------------- sources


def test_a_name_other_than_a_yaml_file_is_a_model() -> None:
    assert load("owner/name").model.path == "owner/name"


def test_a_model_path_is_first_resolved_in_the_folder_of_the_file(tmp_path, monkeypatch) -> None:
    """A model path is first tried next to the file: a folder there wins over the working directory,
    and a name without a folder there is not changed."""
    for parent in ("here", "elsewhere"):
        (tmp_path / parent / "model").mkdir(parents=True)
    (tmp_path / "elsewhere" / "other").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    source = yaml(tmp_path / "here", "model: {path: model}")
    assert load(source).model.path == str(tmp_path / "here" / "model")
    assert load(yaml(tmp_path / "here", "model: {path: other}")).model.path == "other"
    assert load("other").model.path == str(tmp_path / "elsewhere" / "other")
    monkeypatch.setenv("HOME", str(tmp_path / "here"))
    assert load("~/model").model.path == str(tmp_path / "here" / "model")


def test_a_relative_source_file(tmp_path, monkeypatch) -> None:
    (tmp_path / "model").mkdir()
    yaml(tmp_path, "model: {path: model}\nparallel: {tensor: 2}")
    monkeypatch.chdir(tmp_path)
    loaded = load("a.yaml")
    assert loaded.model.path == str(tmp_path / "model") and loaded.parallel.tensor == 2
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir("/")
    assert load("~/a.yaml") == loaded


def test_a_mapping_is_not_changed() -> None:
    source = {"model": {"path": "m"}}
    load(source, {"model.seed": 3, "scheduler.max_rows": 2})
    assert source == {"model": {"path": "m"}}


def test_overrides_win_over_the_source(tmp_path) -> None:
    source = yaml(tmp_path, "model: {path: m, seed: 1}\nscheduler: {max_rows: 4}")
    loaded = load(source, {"model.seed": 2})
    assert (loaded.model.seed, loaded.scheduler.max_rows) == (2, 4)


def test_the_minimum_of_a_draft_match_is_not_above_its_maximum() -> None:
    text = refusal({"model": {"path": "m"}, "drafts": {"min_match": 9}})
    assert "drafts.min_match=9" in text and "drafts.max_match=8" in text


def test_experts_are_balanced_only_among_engines_that_share_them() -> None:
    source = {"model": {"path": "m"}, "parallel": {"balance_steps": 100}}
    assert "set parallel.expert=true" in refusal(source)
    assert load(source, {"parallel.expert": True}).parallel.balance_steps == 100
    copies = {"parallel.expert": True, "parallel.redundant_experts": 2}
    assert load(source, copies).parallel.redundant_experts == 2
    text = refusal(source, {**copies, "parallel.balance_steps": 0})
    assert "needs parallel.balance_steps" in text


def test_several_steps_per_plan_exclude_drafts_and_shared_experts() -> None:
    source = {"model": {"path": "m"}, "scheduler": {"steps_per_plan": 4}}
    text = refusal(source, {"drafts.method": "ngram"})
    assert "scheduler.steps_per_plan=4" in text and "drafts.method=none" in text
    text = refusal(source, {"parallel.expert": True})
    assert "scheduler.steps_per_plan=4" in text and "parallel.expert=true" in text


def test_a_draft_model_is_required_exactly_by_the_methods_that_use_it(tmp_path) -> None:
    for method in ("model", "eagle", "eagle3"):
        text = refusal({"model": {"path": "m"}, "drafts": {"method": method}})
        assert text.startswith(f"drafts.method={method} needs drafts.model")
    assert load({"model": {"path": "m"}, "drafts": {"method": "mtp"}}).drafts.model is None
    text = refusal({"model": {"path": "m"}, "drafts": {"model": {"path": "small"}}})
    assert text.startswith("drafts.model='small' is not used with drafts.method=none")
    text = refusal({"model": {"path": "m"}, "drafts": {"model": {"path": "s", "size": 1}}})
    assert "drafts.model.size" in text
    text = refusal({"model": {"path": "m"}, "drafts": {"model": {"path": ""}}})
    assert text.startswith("drafts.model.path=''")
    settings = {"model": {"path": "m"}, "drafts": {"method": "model", "model": {"path": "s"}}}
    assert load(settings, {"drafts.model.dtype": "bfloat16"}).drafts.model.dtype == "bfloat16"
    assert settings["drafts"]["model"] == {"path": "s"}
    text = refusal(settings, {"drafts.model.path.name": "x"})
    assert text == "section 'drafts.model.path' must contain keys and values"
    (tmp_path / "small").mkdir()
    source = yaml(tmp_path, "model: {path: m}\ndrafts: {method: model, model: {path: small}}")
    assert load(source).drafts.model.path == str(tmp_path / "small")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "- a",
        "model:",
        "model: {path: [}",
        "\tmodel: 2",
        "model: {1: 2}",
        "1: 2",
        "model: name",
        "scheduler: {max_rows: 1}",
        "model: {path: m}\nserve: {port: 2020-01-01}",
        "!!python/object:os.system {}",
        b"\xff\xfe\x00",
        b'"\x00"',
    ],
)
def test_a_bad_file_is_refused_in_one_line(tmp_path, text) -> None:
    refusal(yaml(tmp_path, text))


def test_a_file_that_cannot_be_read_is_named(tmp_path) -> None:
    missing = str(tmp_path / "none.yaml")
    assert missing in refusal(missing)
    (tmp_path / "folder.yaml").mkdir()
    assert "folder.yaml" in refusal(str(tmp_path / "folder.yaml"))


def test_a_mapping_with_an_unsupported_value_is_refused() -> None:
    assert refusal({"model": {"path": Path("m")}}).startswith("model.path=PosixPath('m'):")
    assert "scheduler" in refusal({"model": {"path": "m"}, "scheduler": 3}, {"scheduler.a": 1})


def test_every_yaml_of_ours_loads() -> None:
    paths = sorted((ROOT / "configs").glob("*.yaml"))
    assert paths
    for path in paths:
        load(str(path))


# -------------------------------------------------------------------------------- --set


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("scheduler.max_rows=64", "scheduler.max_rows", 64),
        ("parallel.expert=true", "parallel.expert", True),
        ("cache.memory_fraction=0.5", "cache.memory_fraction", 0.5),
        ("serve.api_keys_file=", "serve.api_keys_file", None),
        ("model.name=null", "model.name", None),
        ("model.path=a=b", "model.path", "a=b"),
        ("model.name='7'", "model.name", "7"),
        (" model.name = x", "model.name", "x"),
    ],
)
def test_an_override_is_parsed(text: str, key: str, value: object) -> None:
    assert parse_override(text) == (key, value)
    load({"model": {"path": "m"}}, dict([parse_override(text)]))


@pytest.mark.parametrize("text", ["", "=", "a", "a.b", "max_rows=64", "a.b=[", "a.b='x", "a.b=\t"])
def test_a_bad_override_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_override(text)
    assert repr(text) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("split", [{"tensor": 2}, {"pipeline": 2}, {"expert": True}])
def test_a_part_of_a_gpu_is_only_for_engines_of_one_worker(split: dict[str, object]) -> None:
    half = {"cluster.gpus_per_worker": 0.5}
    assert config(cluster={"gpus_per_worker": 0.5}).cluster.gpus_per_worker == 0.5
    text = refusal({"model": {"path": "m"}, "parallel": split}, half)
    assert text.startswith("cluster.gpus_per_worker=0.5: ") and "set it to 1" in text
    assert "cluster.gpus_per_worker" in refusal("m", {"cluster.gpus_per_worker": 1.5})
    assert "cluster.gpus_per_worker" in refusal("m", {"cluster.gpus_per_worker": 0})


@given(st.text(max_size=20))
def test_an_override_parses_or_is_a_config_error(text: str) -> None:
    problem = ""
    try:
        key, value = parse_override(f"model.name={text}")
        load({"model": {"path": "m"}}, {key: value})
    except ConfigError as error:
        problem = str(error)
    assert "\n" not in problem


# -------------------------------------------------------------------------------- logs


def test_a_log_line_carries_its_facts() -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(KeyValueFormatter())
    logger = logging.getLogger("swell.test_schema")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        log = StructuredLogger("test_schema", rank=0)
        log.info("loaded", epoch=3, note="two words", empty="")
        log.warning("rank wins", rank=1)
    finally:
        logger.removeHandler(handler)
    first, second = stream.getvalue().splitlines()
    assert first.endswith("INFO swell.test_schema loaded rank=0 epoch=3 note='two words' empty=''")
    assert second.endswith("WARNING swell.test_schema rank wins rank=1")


def test_the_client_timeout_exceeds_the_longest_outage() -> None:
    """Timeouts of clients cover an outage that the cluster survives: TCP resends what a link lost
    after up to twice the outage."""
    default = config()
    late_s = 2 * default.cluster.stall_timeout_s
    assert default.serve.head_timeout_s >= late_s
    assert default.serve.transfer_timeout_s >= late_s


@pytest.mark.parametrize(
    ("data", "overrides", "hint"),
    [
        ({"scheduler": {"max_row": 4}}, {}, "'max_rows'"),
        ({"sheduler": {}}, {}, "'scheduler'"),
        ({"cache": {"max_rows": 4}}, {}, "'scheduler.max_rows'"),
        ({"max_rows": 4}, {}, "'scheduler.max_rows'"),
        ({}, {"schedule.max_rows": 4}, "'scheduler'"),
        ({}, {"cache.blok_tokens": 4}, "'block_tokens'"),
    ],
)
def test_a_key_similar_to_a_known_one_has_a_hint(data: dict, overrides: dict, hint: str) -> None:
    with pytest.raises(ConfigError, match=f"; did you mean {hint}\\?;"):
        load({"model": {"path": "m"}, **data}, overrides)


def test_a_key_without_a_similar_one_has_no_hint() -> None:
    with pytest.raises(ConfigError) as caught:
        load({"model": {"path": "m"}, "cache": {"qqq": 4}})
    assert "did you mean" not in str(caught.value)
