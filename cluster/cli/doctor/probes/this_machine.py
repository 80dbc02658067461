"""Collects the facts of only this machine, which `swell serve` without `--address` will use."""

from __future__ import annotations

import contextlib
import secrets

from swell.cluster.cli.doctor.facts import HostRequest
from swell.cluster.cli.doctor.probes import links
from swell.cluster.cli.doctor.probes.fact_collector import collect
from swell.cluster.cli.doctor.probes.link_sockets import TOKEN_BYTES, LinkListeners
from swell.cluster.cli.doctor.survey import Requirements, Survey
from swell.cluster.cli.start import ray_settings
from swell.configs.schema import Config

NAME = "127.0.0.1"


def ask_machine(config: Config | None, requirements: Requirements, timeout_s: float) -> Survey:
    request = HostRequest(
        node=NAME,
        config=config,
        libraries=tuple(requirements.libraries),
        salt=secrets.token_bytes(TOKEN_BYTES),
        timeout_s=timeout_s,
    )
    facts = collect(request)
    gpus = max(len(facts.torch.gpus), len(facts.gpus.gpus))
    listeners = {}
    if facts.address is not None:
        with contextlib.closing(LinkListeners(secrets.token_bytes(TOKEN_BYTES))) as sockets:
            listeners[NAME] = [sockets.open(part) for part in links.parts(config, facts.address)]
    return Survey(
        requirements=requirements,
        hosts={NAME: facts},
        nodes={NAME: {"CPU": float(ray_settings.local_cpus()), "GPU": float(gpus)}},
        config=config,
        listeners=listeners,
    )
