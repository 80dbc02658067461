"""Makes the Helm chart of `configs/k8s/rayservice.yaml`: values that differ between clusters become
values of the chart. `python -m tests.configs.chart` writes it."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from tests.test_layers import ROOT

SOURCE = ROOT / "configs" / "k8s" / "rayservice.yaml"
CHART = ROOT / "configs" / "k8s" / "chart"
_HEADER = "# Made of configs/k8s/rayservice.yaml by `python -m tests.configs.chart`.\n"


class Value(NamedTuple):
    """A value of the chart."""

    name: str
    default: str
    comment: str
    places: tuple[str, ...]
    """Texts of the source, each found once, with `{}` for the value."""


VALUES = (
    Value(
        "image",
        "REGISTRY/swell:0.1.0",
        "the target `cuda` of configs/docker/Dockerfile",
        (
            "name: ray-head\n              image: {}\n",
            "name: ray-worker\n                image: {}\n",
        ),
    ),
    Value("model", "Qwen/Qwen3-8B", "a hub id, or a folder of the image", ("config: {}\n",)),
    Value(
        "engines",
        "2",
        "each uses parallel.tensor * parallel.pipeline GPUs",
        ("parallel.data: {} ",),
    ),
    Value("ingresses", "3", "one for each pod, including the head", ("num_replicas: {} ",)),
    Value(
        "startTimeoutSeconds",
        "1800",
        "every pod downloads the weights at its first start",
        ("cluster.start_timeout_s: {} ",),
    ),
    Value("replicas", "2", "pods with GPUs", ("        replicas: {}\n",)),
    Value("minReplicas", "2", "at least so many", ("minReplicas: {}\n",)),
    Value("maxReplicas", "8", "at most so many, with KubeRay's autoscaler", ("maxReplicas: {}\n",)),
)


def _names() -> dict[str, str]:
    """Returns the texts with the name of the deployment, and what they are in the chart."""
    release = "{{ .Release.Name }}"
    return {
        "metadata:\n  name: swell\n": f"metadata:\n  name: {release}\n",
        "  name: swell-http\n": f"  name: {release}-http\n",
        "app.kubernetes.io/instance: swell": f"app.kubernetes.io/instance: {release}",
    }


def template() -> str:
    """Returns the template of the chart."""
    text = SOURCE.read_text()
    for value in VALUES:
        for place in value.places:
            text = _replaced(
                text, place.format(value.default), place.format(f"{{{{ .Values.{value.name} }}}}")
            )
    for before, after in _names().items():
        assert before in text
        text = text.replace(before, after)
    return _HEADER + text


def values() -> str:
    """Returns the default values of the chart."""
    lines = [f"{value.name}: {value.default}  # {value.comment}\n" for value in VALUES]
    return _HEADER + "".join(lines)


def files() -> dict[Path, str]:
    return {CHART / "values.yaml": values(), CHART / "templates" / "rayservice.yaml": template()}


def _replaced(text: str, before: str, after: str) -> str:
    assert text.count(before) == 1, f"{SOURCE} has {before!r} {text.count(before)} times"
    return text.replace(before, after)


if __name__ == "__main__":
    for path, content in files().items():
        path.write_text(content)
