"""A cluster of one engine in this process, without Ray: what an ingress connects to."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from functools import partial

from swell.cluster.client.engine_core_client import AsyncEngineCoreClient, ConnectEngines
from swell.configs.schema import Config
from swell.coordinator.service import CoordinatorService
from swell.engine.core import EngineCore
from swell.engine.executor import build_executor
from swell.engine.serving.server import EngineServer

_JOIN_S = 60.0
"""How long the engine, which has loaded its model, may take to join."""


class LocalCluster:
    """A coordinator and an engine, whose loops are threads of this process. Nobody replaces the
    engine if it fails."""

    def __init__(self, config: Config) -> None:
        """Loads the model and joins the engine. Raises the exception of a worker."""
        self.executor = build_executor(config)
        core = EngineCore(config, self.executor, self.executor.start())
        self._coordinator = coordinator = CoordinatorService(config.cluster)
        self._engine = EngineServer(config, 0, core, coordinator.keys, coordinator.address)
        self.ended: Future[None] = Future()
        """Has a result after `close`, or the exception of an engine that has failed."""
        self._thread = threading.Thread(target=self._run, name="swell-engine", daemon=True)
        self._thread.start()
        coordinator.join([self._engine.member], _JOIN_S)

    @property
    def connect(self) -> ConnectEngines:
        """Opens the connections of an ingress."""
        coordinator = self._coordinator
        return partial(AsyncEngineCoreClient, coordinator.address, coordinator.keys)

    def close(self) -> None:
        """Stops the engine, its workers and the coordinator."""
        self._engine.stop()
        self._thread.join()
        self._coordinator.stop()

    def __enter__(self) -> LocalCluster:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def _run(self) -> None:
        try:
            self._engine.run()
        except BaseException as error:
            self.ended.set_exception(error)
        else:
            self.ended.set_result(None)
