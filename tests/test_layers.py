"""Imports only run downward, and every library stays on its floors. Both are read from the source
code."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Collection, Iterator
from fnmatch import fnmatch
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.support.deadlines import HANG_S

ROOT = Path(__file__).parents[1]

FLOORS = ("cluster", "coordinator", "engine", "worker", "kernels", "configs")

OUTSIDE = ("configs/models/train.py",)
"""Standalone scripts: our modules must not import them."""

MAY_IMPORT: dict[str, list[str]] = {
    # Pattern of importing files -> patterns of our modules that they may import. A file may import
    # everything that any of its patterns allows.
    "cluster/*": [
        "engine.*",
        "coordinator.*",
        "configs.*",
        "worker.sampler_wire",  # SamplerParams, Extra: fields of engine requests and outputs
    ],
    "cluster/cli/*": ["cluster.*"],
    "cluster/cli/save_sharded.py": ["worker.sharded.saving"],  # a worker's job, without an engine
    "cluster/__main__.py": ["cluster.cli.*"],
    "cluster/app.py": [
        "cluster.api.*",
        "cluster.control.*",
        "cluster.client.*",
        "cluster.text.*",
        "cluster.port_claim",
        "cluster.replica_peers",
        "cluster.serve_status",
        "cluster.watchdog",
    ],
    "cluster/watchdog.py": ["cluster.watchdog_process"],
    "cluster/replica_peers.py": ["cluster.api.*"],
    "cluster/api/*": ["cluster.api.*", "cluster.client.*", "cluster.text.*"],
    "cluster/control/*": ["cluster.control.*", "cluster.client.*", "cluster.text.*"],
    "cluster/local.py": ["cluster.local_engine", "cluster.text.*", "cluster.client.*"],
    "cluster/local_cluster.py": ["cluster.client.*"],
    "cluster/local_engine.py": [
        "cluster.client.*",
        "cluster.text.*",
        "worker.memory.new_weights",  # writes a caller's tensors for the workers
    ],
    "cluster/client/*": ["cluster.client.*", "cluster.text.*"],
    "cluster/text/*": ["cluster.text.*"],
    "coordinator/*": ["coordinator.*", "configs.*"],
    "engine/*": ["engine.*", "coordinator.*", "configs.*", "worker.wire", "worker.sampler_wire"],
    "engine/executor/*": ["worker.worker", "worker.actor"],
    "worker/*": ["worker.*", "kernels.*", "coordinator.transport.channel", "configs.*"],
    "kernels/*": ["kernels.*"],
    "configs/*": ["configs.*"],
}

LIBRARIES: dict[str, list[str]] = {
    # Library -> our only files that may import it, at module level or inside functions.
    "ray": [
        "cluster/app.py",
        "cluster/replica_peers.py",
        "cluster/serve_status.py",
        "cluster/control/ray/ray_cluster.py",
        "cluster/cli/*",
        "coordinator/actor.py",
        "engine/serving/actor.py",
        "engine/executor/hang_report.py",
        "engine/executor/process_killer.py",
        "engine/executor/ray.py",
        "worker/actor.py",
    ],
    "torch": [
        "worker/*",
        "kernels/*",
        "engine/executor/inproc.py",
    ],
    "triton": ["kernels/triton/*"],
    "transformers": [
        "cluster/text/tokens/tokenizer.py",
        "worker/hf_config.py",
        "worker/models/generic/*",
        "worker/models/text_part.py",
        "worker/sample/vocabulary.py",
    ],
    "llguidance": [
        "cluster/text/json_grammar/string_patterns.py",
        "cluster/text/grammar/user_grammar.py",
        "cluster/text/grammar/grammar_check.py",
        "worker/sample/grammar.py",
        "worker/sample/vocabulary.py",
    ],
    "prometheus_client": ["*/metrics.py"],
    "opentelemetry": ["cluster/api/tracing/otlp.py", "cluster/api/tracing/spans.py"],
    "zmq": ["coordinator/transport/authenticator.py", "coordinator/transport/channel.py"],
}

ON_A_RUNTIME: dict[str, tuple[str, ...]] = {
    # Pattern of files that use only a `Runtime` and ports -> the shells among them, which implement
    # these. All other files take the clock, random bits, threads and processes from there.
    "cluster/client/*": (),
    "cluster/control/*": ("cluster/control/ray/ray_cluster.py",),
    "coordinator/*": (
        "coordinator/transport/authenticator.py",
        "coordinator/transport/channel.py",
        "coordinator/actor.py",
        "coordinator/transport/runtime.py",
        "coordinator/transport/ports.py",
    ),
    "engine/*": (
        "engine/serving/actor.py",
        "engine/executor/heartbeat_listener.py",
        "engine/executor/inline.py",
        "engine/executor/inproc.py",
        "engine/executor/hang_report.py",
        "engine/executor/process_killer.py",
        "engine/executor/ray.py",
        "engine/kv/handover_files.py",
    ),
}
OF_A_RUNTIME = ("ray", "time", "secrets", "random", "threading", "multiprocessing", "os", "signal")
"""Libraries that only shells may import."""
THREADS_OF_ASYNCIO = ("to_thread", "run_in_executor")
"""Functions that only shells may call."""


def our_files() -> list[str]:
    """Returns every Python file of the floors, as a path from the repository root."""
    paths = (p for floor in FLOORS for p in (ROOT / floor).rglob("*.py"))
    return sorted(name for p in paths if (name := p.relative_to(ROOT).as_posix()) not in OUTSIDE)


@cache
def imports(name: str) -> tuple[str, ...]:
    """Returns the modules that a file imports anywhere. `from a import b` counts as `a.b` if that
    is a module."""
    return tuple(_imports(name))


@cache
def _nodes(name: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse((ROOT / name).read_text(), name)))


def _imports(name: str) -> Iterator[str]:
    for node in _nodes(name):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}:{node.lineno} imports by dots; name it from swell"
            assert node.module is not None
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield whole if _is_module(whole) else node.module
        elif isinstance(node, ast.Call) and _name(node.func) == "import_module":
            yield from (a.value for a in node.args if isinstance(a, ast.Constant))


def _name(function: ast.expr) -> str:
    """Returns the last part of a dotted name."""
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


@cache
def _is_module(dotted: str) -> bool:
    path = ROOT.joinpath(*dotted.removeprefix("swell.").split("."))
    return dotted.startswith("swell.") and (path.is_dir() or path.with_suffix(".py").is_file())


def named_modules(name: str) -> Iterator[str]:
    """Yields the modules named in tables of `"swell.module:Class"`, which are imported on use."""
    for node in _nodes(name):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            module, colon, kind = node.value.partition(":")
            if colon and kind.isidentifier() and module.startswith("swell."):
                yield module


FILES = our_files()


def test_the_rules_cover_files_of_every_layer() -> None:
    assert {name.partition("/")[0] for name in FILES} == set(FLOORS)
    assert len(FILES) > 60
    assert "swell.worker.wire" in set(imports("engine/scheduling/scheduler.py"))
    assert "torch" in set(imports("worker/runner.py"))
    assert "swell.engine.executor.ray" in set(named_modules("engine/executor/__init__.py"))


def test_imports_run_downward_only() -> None:
    upward = []
    for name in FILES:
        rows = [modules for pattern, modules in MAY_IMPORT.items() if fnmatch(name, pattern)]
        allowed = [module for modules in rows for module in modules]
        for module in [*imports(name), *named_modules(name)]:
            if module.partition(".")[0] != "swell":
                continue
            inner = module.removeprefix("swell").removeprefix(".")
            if not any(fnmatch(inner, pattern) or pattern == f"{inner}.*" for pattern in allowed):
                upward.append(f"{name} imports {module}; it may import {allowed}")
    assert upward == []


def test_libraries_stay_in_their_layers() -> None:
    strays = []
    for name in FILES:
        for module in imports(name):
            library = module.partition(".")[0]
            homes = LIBRARIES.get(library, [name])
            if not any(fnmatch(name, home) for home in homes):
                strays.append(f"{name} imports {library}; only {homes} may")
    assert strays == []


def folder_of(module: str) -> str:
    """The folder of a module, or of a package, of ours."""
    path = module.removeprefix("swell.").replace(".", "/")
    return path if (ROOT / path).is_dir() else path.rpartition("/")[0]


def test_folders_side_by_side_import_one_way_only() -> None:
    edges = {
        (name.rpartition("/")[0], folder_of(module))
        for name in FILES
        for module in imports(name)
        if module.startswith("swell.")
    }
    assert ("cluster/api/chat", "cluster/api/answers") in edges
    both_ways = {
        (one, other)
        for one, other in edges
        if (other, one) in edges
        and not one.startswith(f"{other}/")
        and not other.startswith(f"{one}/")
        and one < other
    }
    assert both_ways == set()


CLOSE_A_CIRCLE = {
    "configs/files/gguf/tokenizer.py": "loads the module of the file's kind of tokenizer",
    "cluster/api/tracing/exporter.py": "loads the module with an optional library",
    "worker/model_interfaces.py": "names the types of layers in its protocols",
}
"""Files that import modules that import them -> why."""


def circle(without: Collection[str]) -> list[str]:
    """Returns files that import each other in a circle, if there are any. Imports for types count.
    `without`: files whose imports do not count."""
    graph = {
        name: {
            path
            for module in imports(name)
            if (path := f"{module.removeprefix('swell.').replace('.', '/')}.py") in FILES
        }
        for name in FILES
        if name not in without
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return [*error.args[1]]
    return []


def test_files_do_not_import_each_other() -> None:
    assert circle(CLOSE_A_CIRCLE) == []
    for name in CLOSE_A_CIRCLE:
        assert name in circle([*CLOSE_A_CIRCLE.keys() - {name}]), f"{name} closes no circle"


def _on_a_runtime() -> list[str]:
    return [
        name
        for name in FILES
        for pattern, shells in ON_A_RUNTIME.items()
        if fnmatch(name, pattern) and name not in shells
    ]


def test_only_shells_access_the_machine() -> None:
    """Otherwise the simulator could not run the code with a virtual clock."""
    found = {}
    for name in _on_a_runtime():
        used = {module.partition(".")[0] for module in imports(name)} & set(OF_A_RUNTIME)
        called = {node.attr for node in _nodes(name) if isinstance(node, ast.Attribute)}
        if known := used | (called & set(THREADS_OF_ASYNCIO)):
            found[name] = known
    assert found == {}


def test_every_shell_needs_to_be_one() -> None:
    for shells in ON_A_RUNTIME.values():
        for shell in shells:
            assert _roots(shell) & set(OF_A_RUNTIME), shell


def test_the_product_imports_nothing_of_the_tests() -> None:
    found = {}
    for name in FILES:
        used = {module.partition(".")[0] for module in (*imports(name), *named_modules(name))}
        if of_tests := used & {"tests", "conftest", "pytest", "hypothesis"}:
            found[name] = of_tests
    assert found == {}


def test_our_folders_are_never_imported_by_their_bare_names() -> None:
    """`import engine` works only in the repository root, and may collide elsewhere."""
    for name in [*FILES, *OUTSIDE, *_test_files()]:
        for module in imports(name):
            assert module.partition(".")[0] not in FLOORS, f"{name} imports {module}"


def _test_files() -> list[str]:
    return sorted(p.relative_to(ROOT).as_posix() for p in (ROOT / "tests").rglob("*.py"))


def test_no_module_imports_a_script() -> None:
    scripts = {f"swell.{path.removesuffix('.py').replace('/', '.')}" for path in OUTSIDE}
    assert all((ROOT / path).is_file() for path in OUTSIDE)
    for name in FILES:
        assert not scripts & set(imports(name)), name


def test_every_exception_in_the_rules_is_needed() -> None:
    """A permission that no file needs any more must be removed."""
    for library, homes in LIBRARIES.items():
        for home in homes:
            used = [n for n in FILES if fnmatch(n, home) and library in _roots(n)]
            assert used, f"{home} may import {library}, and nothing there does"


def _roots(name: str) -> set[str]:
    return {module.partition(".")[0] for module in imports(name)}


def test_the_kernels_package_file_is_empty() -> None:
    """`kernels` is also the name of a Hugging Face package, and other libraries probe for it."""
    assert list(imports("kernels/__init__.py")) == []


# -------------------------------------------------------------------------------- loaded modules


@pytest.mark.parametrize(
    ("modules", "absent"),
    [
        (
            "swell.engine.core, swell.engine.scheduling.scheduler, swell.engine.serving.server",
            ["torch", "ray", "transformers", "numpy", "prometheus_client"],
        ),
        ("swell.cluster.local", ["ray"]),
        ("swell.coordinator.service", ["torch", "ray", "transformers"]),
        ("swell.cluster.client.routing.router", ["torch", "ray", "transformers"]),
        ("swell.cluster.control.manager", ["torch", "ray", "transformers"]),
        ("swell.cluster.api.ingress", ["torch", "ray", "opentelemetry"]),
        ("swell.cluster.text.grammar.structured_output", ["torch", "ray", "transformers"]),
        ("swell.worker.wire", ["torch", "ray", "zmq"]),
        ("swell.worker.worker", ["ray", "llguidance"]),
        ("tests.gpu.test_engine", ["ray", "llguidance", "prometheus_client", "hypothesis"]),
        ("swell.kernels", ["torch"]),
        ("swell.configs.schema", ["torch", "ray", "zmq"]),
        ("swell.configs.quantization.declaration", ["torch", "ray", "transformers"]),
    ],
)
def test_an_import_does_not_load_heavy_libraries(modules: str, absent: list[str]) -> None:
    """Runs in the repository root, where our folders could shadow third-party packages."""
    code = f"import sys, {modules}; print([m for m in {absent} if m in sys.modules])"
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=HANG_S
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "[]", f"{modules} loads {run.stdout.strip()}"
