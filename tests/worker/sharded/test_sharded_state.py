"""A saved model computes the same bits as the original; what does not fit is refused with a
reason."""

from __future__ import annotations

import fcntl
import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from swell.configs.files.sharded_index import INDEX_NAME, MAX_INDEX_BYTES, digest_of, file_names
from swell.configs.schema import Config, ModelConfig, ParallelConfig, load
from swell.kernels import backends
from swell.kernels.linear import LAYOUT_VERSION, panel
from swell.worker.comm.mesh import Mesh
from swell.worker.hf_config import load_config, resolve_dtype
from swell.worker.layers.packed_weight import pack_weights
from swell.worker.loader import LoadedWeights, LoadShare, load_weights
from swell.worker.models import build_model
from swell.worker.sharded import saving
from swell.worker.sharded.state import state_of
from swell.worker.sharded.tensor_file import TensorFile, data_of, word_sum, write_tensors
from swell.worker.worker import Worker
from tests.worker import tiny_models
from tests.worker.models.test_models import run_split
from tests.worker.moe.moe_engines import EngineGroup, answers
from tests.worker.quantization import writers

pytestmark = pytest.mark.slow

SPLITS = [(1, 1), (2, 1), (1, 2), (2, 2)]
FILE = file_names(ParallelConfig())[0]
PANEL = panel("cpu") or 0
packs = pytest.mark.skipif(not PANEL, reason="no compiler: weights are not packed")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Returns a function: family -> its folder; each is made once."""
    made: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in made:
            made[family] = tmp_path_factory.mktemp(family)
            tiny_models.make(made[family], family)
        return made[family]

    return get


@pytest.fixture(scope="module")
def saved_llama(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tiny("llama"), tmp_path_factory.mktemp("saved") / "out")


@pytest.fixture
def saved(saved_llama: Path, tmp_path: Path) -> Path:
    """Returns a copy of a saved llama, for the test to damage."""
    return Path(shutil.copytree(saved_llama, tmp_path / "saved"))


def configured(folder: Path, **keys: Any) -> Config:
    """Loads a config; `keys` have `__` for the dot."""
    return load(str(folder), {key.replace("__", "."): value for key, value in keys.items()})


def save(folder: Path, out: Path, **keys: Any) -> Path:
    keys.setdefault("model__device", "cpu")
    saving.save_sharded(configured(folder, **keys), out, lambda what, done, total: None)
    return out


def loaded(folder: Path, **model: Any) -> tuple[Any, LoadedWeights]:
    config = ModelConfig(path=str(folder), **model)
    hf_config = load_config(config)
    mesh = Mesh.build(ParallelConfig(), 0)
    built = build_model(config, hf_config, mesh, "cpu", resolve_dtype(config, hf_config))
    return built, load_weights(built, config)


def refusal(folder: Path, **model: Any) -> str:
    with pytest.raises(ValueError) as failed:
        loaded(folder, **model)
    return one_line(failed.value)


def one_line(error: BaseException) -> str:
    assert "\n" not in str(error)
    return str(error)


def same_logits(one: Path, other: Path, *arguments: Any) -> None:
    """Asserts bitwise equal logits on every rank of the last stage."""
    (_, first), (_, second) = run_split(one, *arguments), run_split(other, *arguments)
    for a, b in zip(first, second, strict=True):
        assert a and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# ------------------------------------------------------------------------------------- same answers


@pytest.mark.parametrize(("tensor", "pipeline"), SPLITS)
@pytest.mark.parametrize(
    "family", ["llama", "llama-tied", "llama-bias", "qwen3", "mixtral", "qwen3_moe-mixed"]
)
def test_saved_native_models_compute_the_same(
    tiny: Any, tmp_path: Path, family: str, tensor: int, pipeline: int
) -> None:
    folder = tiny(family)
    out = save(folder, tmp_path / "out", parallel__tensor=tensor, parallel__pipeline=pipeline)
    same_logits(folder, out, tensor, pipeline)


@pytest.mark.parametrize(
    ("family", "tensor", "pipeline"),
    [
        *((family, *split) for family in ("llama-tied", "gemma2") for split in SPLITS),
        ("phimoe", 1, 1),
        ("mixtral", 1, 2),
    ],
)
def test_saved_generic_models_compute_the_same(
    tiny: Any, tmp_path: Path, family: str, tensor: int, pipeline: int
) -> None:
    folder = tiny(family)
    split = {"parallel__tensor": tensor, "parallel__pipeline": pipeline}
    out = save(folder, tmp_path / "out", model__backend="transformers", **split)
    same_logits(folder, out, tensor, pipeline, "transformers")


def test_the_backend_that_auto_selects_is_saved(tiny: Any, tmp_path: Path) -> None:
    out = save(tiny("llama"), tmp_path / "out", model__backend="transformers")
    assert type(loaded(out)[0]).__name__ == "GenericForCausalLM"
    text = refusal(out, backend="native")
    assert "model.backend=transformers" in text and "model.backend=native" in text


@pytest.mark.parametrize("backend", ["native", "transformers"])
@pytest.mark.parametrize(("tensor", "pipeline"), [(1, 1), (2, 1), (1, 2)])
def test_a_checkpoint_decides_what_is_tied(
    tmp_path: Path, backend: str, tensor: int, pipeline: int
) -> None:
    """A checkpoint decides what is tied: config.json ties the head, and the checkpoint has another
    one."""
    source = tmp_path / "source"
    tiny_models.make(source, "llama-tied")
    tensors = load_file(source / "model.safetensors")
    head = torch.randn(tiny_models.VOCAB, 128, generator=torch.Generator().manual_seed(3))
    save_file({**tensors, "lm_head.weight": head}, source / "model.safetensors")
    keys = {"model__backend": backend, "parallel__tensor": tensor, "parallel__pipeline": pipeline}
    out = save(source, tmp_path / "out", **keys)
    same_logits(source, out, tensor, pipeline, backend)


@pytest.mark.parametrize(
    ("family", "tensor", "pipeline"),
    [("mixtral", 1, 1), ("mixtral", 2, 1), ("qwen3_moe-mixed", 1, 2)],
)
def test_engines_that_share_experts(
    tiny_moe: Any, tmp_path: Path, family: str, tensor: int, pipeline: int
) -> None:
    """Engines that share experts load saved ones: any worker that owns an expert reads its file,
    also after another engine has left."""
    folder, truth = tiny_moe(family)
    split = {"parallel__tensor": tensor, "parallel__pipeline": pipeline}
    out = save(folder, tmp_path / "out", parallel__expert=True, **split)
    for file in folder.glob("*.safetensors"):
        assert not (out / file.name).exists()
    with EngineGroup(out, **split) as engine_group:
        first, second = engine_group.add(), engine_group.add()
        engine_group.regroup(first, second)
        assert answers(engine_group, [[0, 1], [2, 3, 4]]) == truth[:5]
        regrouped = engine_group.regroup(first)[0]
        assert sum(worker.experts_loaded for worker in regrouped) > 0
        assert answers(engine_group, [[5, 0]]) == [truth[5], truth[0]]


def test_a_damaged_expert_is_refused(tiny_moe: Any, tmp_path: Path) -> None:
    out = save(tiny_moe("mixtral")[0], tmp_path / "out", parallel__expert=True)
    name = "expert2of4-pp0of1.safetensors"
    data = bytearray((out / name).read_bytes())
    data[-1] ^= 1
    (out / name).write_bytes(data)
    with EngineGroup(out) as engine_group:
        engine = engine_group.add()
        with pytest.raises(ValueError, match="damaged") as failed:
            engine_group.regroup(engine)
    assert name in one_line(failed.value)


@pytest.mark.parametrize("family", ["llama", "mixtral"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_another_type_is_kept(tiny: Any, tmp_path: Path, family: str, dtype: str) -> None:
    out = save(tiny(family), tmp_path / "out", model__dtype=dtype)
    (one, _), (two, _) = loaded(tiny(family), dtype=dtype), loaded(out)
    pack_weights(one)
    pack_weights(two)
    first, second = state_of(one), state_of(two)
    assert list(first) == list(second)
    for name, state in first.items():
        a, b = data_of(state.weight), data_of(second[name].weight)
        assert a.dtype == b.dtype and torch.equal(a, b), name
    text = refusal(out, dtype="float32")
    assert f"model.dtype={dtype}" in text and "model.dtype=float32" in text


# -------------------------------------------------------------------------- where memory comes from


@packs
def test_a_cpu_maps_its_file(saved: Path) -> None:
    before = (saved / FILE).read_bytes()
    model, weights = loaded(saved)
    assert weights.mapped_bytes == weights.nbytes > 0
    packed = model.layers[0].mlp.down.weight
    pack_weights(model)
    assert model.layers[0].mlp.down.weight is packed
    for state in state_of(model).values():
        data = data_of(state.weight)
        if data.nbytes % 64 == 0:
            assert data.data_ptr() % 64 == 0
        data.zero_()
    assert (saved / FILE).read_bytes() == before


@packs
def test_mapped_weights_reduce_the_memory_for_the_cache(
    saved: Path, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mapped weights leave less memory for the cache, although the system counts pages of files as
    available."""
    from swell.worker.memory import kv_cache

    monkeypatch.setattr(kv_cache, "free_bytes", lambda *_: 50_000_000)

    def num_blocks(folder: Path) -> int:
        config = configured(folder, model__device="cpu", cache__memory_fraction=1.0)
        worker = Worker(config)
        try:
            weight_bytes = worker.load()
            nbytes = weight_bytes if folder == saved else 0
            limits = worker.measure()
            block_bytes = kv_cache.bytes_per_block(
                worker.model.attention_layers(), config.cache.block_tokens, torch.float32
            )
            assert limits.num_blocks == (50_000_000 - nbytes) // block_bytes
            return limits.num_blocks
        finally:
            worker.shutdown()

    assert num_blocks(saved) < num_blocks(tiny("llama"))


@packs
@pytest.mark.parametrize("width", [None, 2 * PANEL])
def test_weights_of_another_processor_are_converted(
    tiny: Any,
    tmp_path: Path,
    width: int | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Weights of another processor, not packed (saved for a GPU) or with other panels, are
    converted: the same bits, and a log line."""
    folder, out = tiny("llama-bias"), tmp_path / "out"
    with monkeypatch.context() as patch:
        if width is not None:
            patch.setattr(backends.get("linear", "cpu"), "PANEL", width)
        save(folder, out, model__device="cpu" if width else "cuda")
    packing = json.loads((out / INDEX_NAME).read_text())["packing"]
    assert packing == (width and {"version": LAYOUT_VERSION, "panel": width})
    with caplog.at_level(logging.WARNING, "swell"):
        same_logits(folder, out, 1, 1)
        assert loaded(out)[1].mapped_bytes == 0
    assert "another kind of processor" in caplog.text


@packs
def test_pairs_of_bfloat16_of_another_processor_are_converted(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(backends.get("linear", "cpu"), "PANEL", 2 * PANEL)
        out = save(tiny("llama"), tmp_path / "out", model__dtype="bfloat16")
    (expected, _), (model, _) = loaded(tiny("llama"), dtype="bfloat16"), loaded(out)
    pack_weights(expected)
    pack_weights(model)
    converted = state_of(model)
    for name, state in state_of(expected).items():
        assert torch.equal(data_of(state.weight), data_of(converted[name].weight)), name


def test_every_file_is_safetensors(saved: Path) -> None:
    model, _ = loaded(saved)
    with safe_open(str(saved / FILE), framework="pt") as file:
        assert set(file.keys()) == set(state_of(model))
        for name, state in state_of(model).items():
            assert torch.equal(file.get_tensor(name), data_of(state.weight))


def test_saving_and_loading_report_progress(tiny: Any, tmp_path: Path) -> None:
    seen: dict[str, list[tuple[int, int]]] = {}

    def progress(what: str, done: int, total: int) -> None:
        seen.setdefault(what, []).append((done, total))

    config = configured(tiny("llama"), parallel__tensor=2, model__device="cpu")
    saving.save_sharded(config, tmp_path / "out", progress)
    assert list(seen) == [
        f"worker {i} of 2: {what}" for i in (1, 2) for what in ("read", "written")
    ]
    for steps in seen.values():
        assert steps == sorted(steps) and steps[-1][0] == steps[-1][1] > 0
    shares: list[LoadShare] = []
    config = ModelConfig(path=str(tmp_path / "out"))
    mesh = Mesh.build(ParallelConfig(tensor=2), 1)
    model = build_model(config, load_config(config), mesh, "cpu", torch.float32)
    nbytes = load_weights(model, config, shares.append).nbytes
    tensors = len(state_of(model))
    assert shares == sorted(shares) and shares[-1] == (nbytes, nbytes, tensors, tensors)


# ------------------------------------------------------------------------------------ whole folders


def test_a_quantized_model_is_saved_dequantized(tiny: Any, tmp_path: Path) -> None:
    out = tmp_path / "quantized", tmp_path / "plain"
    form = writers.FORMATS["gptq"]
    writers.quantize_folder(tiny("llama"), form, lambda name, _: name.endswith("_proj.weight"), out)
    (out[0] / "quantize_config.json").write_text(json.dumps(form.config))
    folder = save(out[0], tmp_path / "saved")
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    assert not (folder / "quantize_config.json").exists()
    expected = state_of(loaded(save(out[1], tmp_path / "from plain"))[0])
    for name, tensor in state_of(loaded(folder)[0]).items():
        assert torch.equal(data_of(tensor.weight), data_of(expected[name].weight)), name


def test_all_other_files_are_copied(tiny: Any, tmp_path: Path) -> None:
    source = Path(shutil.copytree(tiny("llama"), tmp_path / "source"))
    for name in ("tokenizer.json", "chat_template.jinja", "merges.txt", "spiece.model"):
        (source / name).write_text(f"of {name}")
    (source / "pytorch_model.bin").write_text("x")
    templates = source / "additional_chat_templates"
    templates.mkdir()
    (templates / "tool_use.jinja").write_text("of tools")
    out = save(source, tmp_path / "out")
    assert (out / templates.name / "tool_use.jinja").read_text() == "of tools"
    shutil.rmtree(templates)
    shutil.rmtree(out / templates.name)
    names = {file.name for file in source.iterdir()} - {"model.safetensors", "pytorch_model.bin"}
    assert {file.name for file in out.iterdir()} == names | {INDEX_NAME, FILE}
    for name in names - {"config.json"}:
        assert (out / name).read_bytes() == (source / name).read_bytes()


def test_only_small_other_files_are_copied(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving, "MAX_COPIED_BYTES", 100)
    with pytest.raises(ValueError, match="move it elsewhere"):
        save(tiny("llama"), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_nothing_is_overwritten(tiny: Any, tmp_path: Path, kind: str) -> None:
    out = tmp_path / "out"
    if kind == "file":
        out.write_text("x")
    elif kind == "link":
        out.symlink_to(tmp_path / "nowhere")
    else:
        out.mkdir()
        (out / "notes").write_text("x")
    with pytest.raises(ValueError, match="never overwrites"):
        save(tiny("llama"), out)
    if kind == "folder":
        (out / "notes").unlink()
        assert save(tiny("llama"), out).is_dir()


def test_a_full_disk_is_detected_first(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil._ntuple_diskusage(10**9, 0, saving.RESERVE_BYTES + 1_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(ValueError, match="free some space") as failed:
        save(tiny("llama"), tmp_path / "out")
    assert str(usage.free) in one_line(failed.value)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_save_leaves_nothing(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = saving.write_tensors, []

    def fails(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 2:
            raise OSError("no space left")
        return real(*arguments)

    monkeypatch.setattr(saving, "write_tensors", fails)
    with pytest.raises(OSError, match="no space"):
        save(tiny("llama"), tmp_path / "out", parallel__tensor=2)
    assert list(tmp_path.iterdir()) == []


def test_leftovers_of_a_killed_save_are_removed(tiny: Any, tmp_path: Path) -> None:
    rest = tmp_path / ".out.saving"
    rest.mkdir()
    with pytest.raises(ValueError, match="was not left by an interrupted save"):
        save(tiny("llama"), tmp_path / "out")
    (rest / saving._LOCK).touch()
    (rest / FILE).write_bytes(b"half")
    (rest / "more").write_bytes(b"half")
    (rest / "templates").mkdir()
    with (rest / saving._LOCK).open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match="another process"):
            save(tiny("llama"), tmp_path / "out")
    assert (rest / FILE).read_bytes() == b"half"
    out = save(tiny("llama"), tmp_path / "out")
    assert list(tmp_path.iterdir()) == [out]
    assert not {"more", "templates", saving._LOCK} & {file.name for file in out.iterdir()}


def test_a_missing_parent_is_named(tiny: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not exist"):
        save(tiny("llama"), tmp_path / "no" / "out")


def test_unsupported_configurations_cannot_be_saved(tiny: Any, tmp_path: Path, saved: Path) -> None:
    with pytest.raises(ValueError, match=r"no experts.*parallel\.expert=false"):
        save(tiny("llama"), tmp_path / "out", parallel__expert=True)
    with pytest.raises(ValueError, match="already"):
        save(saved, tmp_path / "out")
    quantized = Path(shutil.copytree(tiny("llama"), tmp_path / "quantized"))
    tiny_models.change_config(quantized, quantization_config={"quant_method": "hqq"})
    with pytest.raises(ValueError, match="hqq"):
        save(quantized, tmp_path / "out")
    assert not (tmp_path / "out").exists()


# ----------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("split", "words"),
    [
        ({"tensor": 2}, "parallel.tensor=2"),
        ({"pipeline": 2}, "parallel.pipeline=2"),
        ({"expert": True}, "parallel.expert=false"),
    ],
)
def test_another_parallel_split_is_refused(
    tiny: Any, tmp_path: Path, split: dict[str, Any], words: str
) -> None:
    out = save(tiny("mixtral"), tmp_path / "out")
    config = ModelConfig(path=str(out))
    mesh = Mesh.build(ParallelConfig(**split), 0)
    model = build_model(config, load_config(config), mesh, "cpu", torch.float32)
    with pytest.raises(ValueError) as failed:
        load_weights(model, config)
    text = one_line(failed.value)
    assert words in text and "saved for" in text


def test_another_config_is_refused(saved: Path) -> None:
    tiny_models.change_config(saved, rms_norm_eps=0.1)
    assert "config.json" in refusal(saved)


def change_index(folder: Path, **values: Any) -> None:
    file = folder / INDEX_NAME
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


@pytest.mark.parametrize(
    "values",
    [
        {"format": 2},
        {"format": None},
        {"tensor": 2},
        {"tensor": 0},
        {"files": {"../weights": {"size_bytes": 1, "header_digest": "0" * 32}}},
        {"dtype": "float8"},
        {"more": 1},
    ],
)
def test_a_wrong_index_is_refused(saved: Path, values: dict[str, Any]) -> None:
    change_index(saved, **values)
    text = refusal(saved)
    assert INDEX_NAME in text and "swell save-sharded" in text


def test_a_broken_index_is_refused(saved: Path) -> None:
    (saved / INDEX_NAME).write_bytes(b"{")
    assert INDEX_NAME in refusal(saved)
    (saved / INDEX_NAME).write_bytes(b" " * (MAX_INDEX_BYTES + 1))
    assert str(MAX_INDEX_BYTES) in refusal(saved)
    (saved / INDEX_NAME).unlink()
    assert "model.load_format=auto" in refusal(saved, load_format="sharded")


@pytest.mark.parametrize("keep", [0, 100, -1])
def test_a_truncated_file_is_refused(saved: Path, keep: int) -> None:
    data = (saved / FILE).read_bytes()
    (saved / FILE).write_bytes(data[:keep])
    text = refusal(saved)
    assert FILE in text and str(len(data)) in text
    (saved / FILE).unlink()
    assert "missing" in refusal(saved)


@pytest.mark.parametrize("place", [20, -3])
def test_a_flipped_bit_is_refused(saved: Path, place: int) -> None:
    """A flipped bit is found, in the header or in a tensor."""
    data = bytearray((saved / FILE).read_bytes())
    data[place] ^= 4
    (saved / FILE).write_bytes(data)
    text = refusal(saved)
    assert FILE in text and "damaged" in text


def test_a_file_of_another_save_is_refused(saved: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    tiny_models.make(other, "llama", seed=1)
    shutil.copy(save(other, tmp_path / "out") / FILE, saved / FILE)
    assert "another save" in refusal(saved)


@pytest.mark.parametrize(
    "place",
    [
        {"dtype": "F8"},
        {"shape": [7]},
        {"data_offsets": [0, 10**9]},
        {"data_offsets": [2, 2 + 4 * 128]},
        {"data_offsets": [-4 * 128, 0]},
        {"shape": "x"},
        None,
    ],
)
def test_a_wrong_header_with_the_right_digest_is_refused(
    saved: Path, place: dict[str, Any] | None
) -> None:
    """A invalid header is refused even if its digest is right, because the index came with it."""
    data = (saved / FILE).read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    if place is None:
        header["__metadata__"] = {}
    else:
        header["norm.weight"].update(place)
    text = json.dumps(header, separators=(",", ":")).encode().ljust(length)
    if len(text) > length:
        text = text.ljust(2 * length)
    changed = len(text).to_bytes(8, "little") + text
    (saved / FILE).write_bytes(changed + data[8 + length :])
    known = {
        "size_bytes": (saved / FILE).stat().st_size,
        "header_digest": digest_of(changed),
    }
    change_index(saved, files={FILE: known})
    assert "invalid header" in refusal(saved)


@packs
@pytest.mark.parametrize("change", ["lacks", "has", "shape", "order"])
def test_tensors_of_another_model_are_refused(
    tiny: Any, tmp_path: Path, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors of another model are refused, as another version of Swell with other modules would
    have saved them."""
    real = saving.state_of

    def other(model: Any) -> Any:
        state = real(model)
        if change == "lacks":
            del state["norm.weight"]
        elif change == "has":
            state["norm.bias"] = state["norm.weight"]
        elif change == "shape":
            state["norm.weight"].weight = torch.zeros(3)
        return state

    monkeypatch.setattr(saving, "state_of", other)
    out = save(tiny("llama"), tmp_path / "out")
    if change == "order":
        change_index(out, packing={"version": 7, "panel": PANEL})
    text = refusal(out)
    wanted = {
        "lacks": "has no tensor 'norm.weight'",
        "has": "has the tensor 'norm.bias'",
        "shape": "[3]",
        "order": "version=7",
    }
    assert wanted[change] in text and "swell save-sharded" in text


def test_large_tensors_begin_at_a_cache_line(tmp_path: Path) -> None:
    """Large tensors begin at a cache line; small ones of odd sizes follow them, those with the
    widest elements first."""
    tensors = {
        "flag": torch.tensor(True),
        "odd": torch.arange(3, dtype=torch.int8),
        "none": torch.empty(0, 5),
        "line": torch.randn(16),
        "long": torch.arange(5),
        "matrix": torch.randn(8, 24).bfloat16(),
        "scalar": torch.tensor(1.5),
    }
    known = write_tensors(tmp_path / "file", tensors, lambda nbytes: None)
    file = TensorFile(tmp_path / "file", known)
    assert file.names == set(tensors)
    for name, tensor in tensors.items():
        view = file.tensor(name)
        file.check(name, lambda nbytes: None)
        assert view.dtype == tensor.dtype and torch.equal(view, tensor)
        assert view.data_ptr() % (64 if tensor.nbytes % 64 == 0 else tensor.element_size()) == 0


def test_checksums_cover_every_word() -> None:
    data = torch.arange(101, dtype=torch.uint8)
    for tensor in (data, data.view(101, 1), data[8:], data[3:]):
        base = word_sum(tensor)
        for i in (0, 7, 8, len(tensor) - 1):
            changed = tensor.clone()
            changed[i] += 1
            assert word_sum(changed) != base
        assert word_sum(tensor.clone()) == base
