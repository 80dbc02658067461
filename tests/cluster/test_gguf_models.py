"""A GGUF file is accepted wherever a model folder is: by checks, upgrades, `swell doctor`, chat,
grammars, adapters and saving."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from swell.cluster.cli.doctor.probes.host_facts import config_files, named_paths
from swell.cluster.cli.main import main
from swell.cluster.control.plan.upgrade import UpgradeRefused
from swell.cluster.control.upgrade_check import cluster_id_of, upgraded
from swell.cluster.local import LLM, SamplingParams
from swell.cluster.text.model_check import check
from swell.cluster.text.params.sampling_params import StructuredOutputs
from swell.cluster.text.prompt.tokenizer_files import text_files
from swell.configs.files.gguf.unpacked import COMPLETE
from swell.configs.files.model_path import local_folder
from swell.configs.schema import ConfigError, load
from tests.support.gguf.files import gguf_of, twin_of, write_gguf
from tests.support.paths import NANO
from tests.support.weights.adapters import make_adapter

CHATS = [
    [{"role": "user", "content": text}]
    for text in ("upper: hello", "reverse: kitten", "add: 12+30", "count from 3 to 9")
]
GREEDY = SamplingParams(temperature=0, max_tokens=60)
CPU = {"model.device": "cpu", "model.dtype": "float32", "cache.memory_bytes": 50_000_000}


@pytest.fixture(scope="module", autouse=True)
def temporary(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keeps what is unpacked out of the folder of other runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tempfile.tempdir", str(tmp_path_factory.mktemp("tmp")))
        yield


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gguf_of(NANO, tmp_path_factory.mktemp("model") / "nano-Q8_0.gguf", ("Q8_0",))


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return twin_of(NANO, tmp_path_factory.mktemp("model") / "twin", ("Q8_0",))


def chat(model: Path, **options: object) -> list[str]:
    with LLM(str(model), **{**CPU, **options}) as llm:
        return [answer.outputs[0].text for answer in llm.chat(CHATS, GREEDY)]


def test_a_file_answers_as_its_twin(file: Path, twin: Path) -> None:
    answers = chat(twin)
    assert chat(file) == answers and len(set(answers)) == len(CHATS)


def test_a_file_is_accepted_by_its_name(file: Path) -> None:
    config = load(str(file))
    check(config)
    assert config.model.served_name == "nano-Q8_0"


def test_a_grammar_reads_the_vocabulary_of_a_file(file: Path) -> None:
    forced = StructuredOutputs(choice=["first", "second"])
    params = SamplingParams(temperature=0, max_tokens=20, structured_outputs=forced)
    with LLM(str(file), **CPU) as llm:
        (answer,) = llm.generate(["one of: "], params)
    assert answer.outputs[0].text in ("first", "second")


def test_an_adapter_changes_the_answers_of_a_file_as_those_of_its_twin(
    file: Path, twin: Path, tmp_path: Path
) -> None:
    shapes = {f"model.layers.{layer}.mlp.down_proj": (128, 512) for layer in range(4)}
    adapter = str(make_adapter(tmp_path / "adapter", shapes, targets=["down_proj"], alpha=40.0))

    def answers(model: Path) -> list[str]:
        with LLM(str(model), **CPU, **{"lora.adapters": {"mine": adapter}}) as llm:
            return [answer.outputs[0].text for answer in llm.chat(CHATS, GREEDY, adapter="mine")]

    assert answers(file) == answers(twin) != chat(file)


def test_a_file_is_a_draft_model(file: Path) -> None:
    drafts = {"drafts.method": "model", "drafts.model": {"path": str(file)}, "drafts.max_tokens": 3}
    assert chat(file, **drafts) == chat(file)


def test_a_file_can_be_saved_sharded(file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    split = ["--set", "parallel.tensor=2", "--set", "model.dtype=float32"]
    assert main(["save-sharded", str(file), str(out), *split]) == 0
    assert chat(out, **{"parallel.tensor": 2}) == chat(file, **{"parallel.tensor": 2})


def test_a_cluster_can_be_upgraded_to_another_quantization(file: Path, tmp_path: Path) -> None:
    other = gguf_of(NANO, tmp_path / "nano-Q4_0.gguf", ("Q4_0",))
    running = load(str(file))
    config, kept = upgraded(running, {"model": {"path": str(other)}})
    assert config.model.path == str(other) and kept == []
    assert config.model.served_name == "nano-Q8_0"
    assert cluster_id_of(config) == cluster_id_of(running)
    with pytest.raises(UpgradeRefused, match="is neither a folder nor a GGUF file on this host"):
        upgraded(running, {"model": {"path": str(tmp_path / "missing.gguf")}})
    with pytest.raises(UpgradeRefused, match="not an absolute path"):
        upgraded(running, {"model": {"path": "other.gguf"}})


def test_doctor_compares_the_file_itself(file: Path) -> None:
    config = load(str(file))
    assert named_paths(config)["model.path"] == str(file)
    found = config_files(config, b"salt")
    assert [(name, facts.size_bytes) for name, facts in found.items()] == [
        (file.name, file.stat().st_size)
    ]


def test_doctor_compares_all_parts_of_a_split_model(tmp_path: Path) -> None:
    first = gguf_of(NANO, tmp_path / "nano.gguf", parts=3)
    names = [f"nano-{part:05}-of-00003.gguf" for part in (1, 2, 3)]
    assert list(config_files(load(str(first)), b"salt")) == names


# ------------------------------------------------------------------------ the folder of small files


def test_small_files_are_written_once(file: Path) -> None:
    folder = local_folder(str(file))
    assert folder is not None
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert local_folder(str(file)) == folder
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    assert [path.name for path in folder.parent.iterdir() if path.name.startswith("new-")] == []


@pytest.mark.parametrize("lost", ["tokenizer.json", COMPLETE])
def test_a_lost_small_file_is_written_again(file: Path, lost: str) -> None:
    folder = local_folder(str(file))
    assert folder is not None
    digests = text_files(load(str(file)).model)
    (folder / lost).unlink()
    assert local_folder(str(file)) == folder
    assert text_files(load(str(file)).model) == digests


def test_a_changed_file_is_unpacked_again(file: Path, tmp_path: Path) -> None:
    own = tmp_path / "m.gguf"
    shutil.copy(file, own)
    before = local_folder(str(own))
    changed = {"tokenizer.chat_template": "{{ 'another' }}"}
    gguf_of(NANO, own, ("Q8_0",), changed)
    after = local_folder(str(own))
    assert before is not None and after is not None and before != after
    assert (after / "chat_template.jinja").read_text() == "{{ 'another' }}"


def test_a_folder_in_which_others_write_is_refused(file: Path) -> None:
    folder = local_folder(str(file))
    assert folder is not None
    folder.parent.chmod(0o777)
    try:
        with pytest.raises(ConfigError, match="other accounts can write there"):
            local_folder(str(file))
    finally:
        folder.parent.chmod(0o700)


def test_sampling_defaults_of_a_file_apply_to_requests(tmp_path: Path) -> None:
    stated = {"general.sampling.temp": 0.25, "general.sampling.top_k": 7}
    file = gguf_of(NANO, tmp_path / "m.gguf", metadata=stated)
    with LLM(str(file), **CPU) as llm:
        params = llm.get_default_sampling_params()
    assert (params.temperature, params.top_k) == (0.25, 7)


# ---------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("metadata", "text"),
    [
        ({"general.architecture": "mamba"}, "the architecture 'mamba' is not supported"),
        ({"llama.expert_count": 8}, "the architecture 'llama' with experts"),
        ({"llama.rope.dimension_count": 16}, "rope.dimension_count=16 is not the size of a head"),
        (
            {"llama.rope.scaling.type": "odd", "llama.rope.scaling.factor": 2.0},
            "rope.scaling.type='odd'",
        ),
        ({"llama.attention.value_length": 8}, "the value heads have 8 dimensions"),
        ({"llama.attention.head_count": [4, 2]}, "head_count differs between layers"),
        ({"llama.block_count": -1}, "block_count=-1 is not a positive integer"),
        ({"llama.context_length": "x"}, "context_length='x' is not a positive integer"),
        ({"tokenizer.ggml.model": "rwkv"}, "the tokenizer model 'rwkv' is not supported"),
        ({"tokenizer.ggml.pre": "kimi-k2"}, "tokenizer.ggml.pre='kimi-k2'"),
        ({"tokenizer.ggml.tokens": []}, "has no tokenizer"),
        ({"tokenizer.ggml.token_type": [1]}, "320 tokens and 1 values"),
        ({"tokenizer.ggml.tokens": [1, 2]}, "tokenizer.ggml.tokens is not a list of str"),
        ({"tokenizer.ggml.merges": ["a"]}, "the merge 'a'"),
    ],
    ids=str,
)
def test_a_refusal_is_one_line_with_the_cause(
    tmp_path: Path, metadata: dict[str, object], text: str
) -> None:
    file = gguf_of(NANO, tmp_path / "m.gguf", metadata=metadata)
    with pytest.raises(ConfigError) as refused:
        check(load(str(file)))
    found = str(refused.value)
    assert text in found and str(file) in found and "\n" not in found


def test_a_tensor_that_the_architecture_lacks_is_refused(tmp_path: Path) -> None:
    file = gguf_of(NANO, tmp_path / "m.gguf")
    data = file.read_bytes()
    file.write_bytes(data.replace(b"blk.0.ffn_gate.weight", b"blk.0.ffn_gaga.weight"))
    with pytest.raises(ConfigError, match=r"the tensor 'blk\.0\.ffn_gaga\.weight' is not known"):
        check(load(str(file)))


def test_a_file_without_weights_is_refused(tmp_path: Path) -> None:
    file = write_gguf(
        tmp_path / "m.gguf",
        {"general.architecture": "llama", "tokenizer.ggml.tokens": ["a"]},
        {},
    )
    with pytest.raises(ConfigError, match=r"has no tensor 'token_embd\.weight'"):
        check(load(str(file)))
