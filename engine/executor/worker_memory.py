"""The memory of an engine's workers: whose weights they hold, and whether they sleep."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from swell.engine.executor import Executor, ExecutorError
from swell.worker.wire import GroupPlan, Regrouped, WeightsSource


class WeightVersions:
    """The weights that the workers should have. Pure."""

    def __init__(self, path: str) -> None:
        """`path`: the folder of the configured weights, which no worker refuses."""
        self.target = self._loaded = WeightsSource(path, 0)
        """The weights of the next regroup, and the last ones that all workers have loaded."""
        self._num_updates = 0

    @property
    def are_configured(self) -> bool:
        """Whether the target is the configured weights."""
        return not self.target.number

    @property
    def folders(self) -> tuple[str, str]:
        """Folders of the weights that may be loaded again."""
        return self.target.path, self._loaded.path

    def update(self, path: str) -> None:
        """Makes the weights of another folder the target."""
        self._num_updates += 1
        self.target = WeightsSource(path, self._num_updates)

    def on_loaded(self) -> None:
        """Records that all workers have loaded the target."""
        self._loaded = self.target

    def restore(self, target: WeightsSource) -> None:
        """Makes an earlier target the target again."""
        self.target = target

    def fall_back(self) -> WeightsSource:
        """Makes the last loaded weights the target. Returns the previous target."""
        refused, self.target = self.target, self._loaded
        return refused


class WorkerMemory:
    """Changes the weights and the sleep level of the workers. Every regroup applies both."""

    def __init__(self, executor: Executor, path: str, discard_steps: Callable[[], None]) -> None:
        """`path`: the folder of the configured weights. `discard_steps` drops the steps in flight
        and the KV cache: the workers lose them unless a regroup keeps their states."""
        self._executor = executor
        self._versions = WeightVersions(path)
        self._discard_steps = discard_steps
        self.sleep_level = 0
        """See `GroupPlan.sleep_level`."""
        self.num_wakes = 0
        self.freed_bytes = 0
        """Bytes that sleeping workers have freed."""

    @property
    def weight_folders(self) -> tuple[str, str]:
        """See `WeightVersions.folders`."""
        return self._versions.folders

    def regroup(self, groups: GroupPlan) -> list[Regrouped]:
        """Lets the workers form the groups of the plan (see `Executor.regroup`), with the current
        weights and sleep level."""
        if not groups.keep_states:
            self._discard_steps()
        versions = self._versions
        if versions.are_configured:
            return self._regroup(groups)
        regrouped = self._regroup(groups)
        if refusal := _refusal_of(regrouped):
            refused = versions.fall_back()
            if failure := _refusal_of(self._regroup(groups)):
                raise ExecutorError(
                    f"{refusal}; and the previous weights cannot be loaded again: {failure}"
                )
            raise ValueError(
                f"{refusal}; the weights of {refused.path} are not used; the engine keeps the "
                "previous ones"
            )
        if not self.sleep_level:
            versions.on_loaded()
        return regrouped

    def _regroup(self, groups: GroupPlan) -> list[Regrouped]:
        plan = msgspec.structs.replace(
            groups, sleep_level=self.sleep_level, weights=self._versions.target
        )
        regrouped = self._executor.regroup(plan)
        self.freed_bytes = sum(worker.freed_bytes for worker in regrouped)
        return regrouped

    def set_sleep(self, level: int) -> list[Regrouped]:
        """Lets the workers release memory, or allocate it again; see `GroupPlan.sleep_level`.
        Requests wait, and restart from the tokens that were read. Raises like `regroup`."""
        self.sleep_level = level
        return self.regroup(GroupPlan(generation=0))

    def wake_with_next_regroup(self) -> None:
        """Lets the workers allocate their memory again in the next regroup."""
        self.sleep_level = 0

    def on_woken(self) -> None:
        """Counts a wake-up that is complete."""
        self.num_wakes += 1

    def update_weights(self, path: str) -> None:
        """Loads the weights of another folder, for the same model, into all workers. Requests wait,
        and restart from the tokens that were read; sleeping workers load the weights when they wake
        up. Raises ValueError for unusable weights, now or then: the previous weights remain. They
        also remain after an interrupt, from the next `regroup` on."""
        before = self._versions.target
        try:
            self._versions.update(path)
            self.regroup(GroupPlan(generation=0))
        except ValueError:
            raise
        except BaseException:
            self._versions.restore(before)
            raise


def _refusal_of(regrouped: list[Regrouped]) -> str:
    """Returns why a worker cannot use new weights; empty if all can."""
    return next((one.refusal for one in regrouped if one.refusal), "")
