"""Finds the GPUs that Ray has assigned to a process among those that torch sees. Pure."""

from __future__ import annotations

from collections.abc import Iterable

VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"
"""The environment variable with the ids of the GPUs that torch sees, in torch's order."""


def gpu_indices(assigned: Iterable[int | str], visible: str | None) -> list[int]:
    """Returns torch's indices of the GPUs that Ray has assigned to this process.

    Ray makes only these GPUs visible, unless `RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES` is set:
    then a process sees all GPUs that its host gave to Ray, and all processes of a host that used
    the first one would share it. `assigned`: the ids of `ray.get_gpu_ids`; `visible`: the value of
    `CUDA_VISIBLE_DEVICES`, None: torch sees all GPUs. Raises `ValueError` if torch does not see an
    assigned GPU.
    """
    ids = [str(gpu) for gpu in assigned]
    if visible is None:
        return sorted(map(int, ids))
    seen = [gpu.strip() for gpu in visible.split(",")]
    if missing := [gpu for gpu in ids if gpu not in seen]:
        raise ValueError(
            f"Ray has assigned GPU {', '.join(missing)} to this process, but {VISIBLE_GPUS}="
            f"{visible!r} hides it; start Ray on this host with the same {VISIBLE_GPUS}"
        )
    return sorted(map(seen.index, ids))
