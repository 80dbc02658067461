"""All checks of `swell doctor`, and the result of a check. `docs/operate/doctor.md` has the
table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec

Level = Literal["ok", "warning", "error"]


class Check(NamedTuple):
    question: str
    level: Level
    """Level of a failed check. Error: the cluster cannot serve as configured, now or after the next
    fault. Warning: it serves, but slower or less safely."""
    remedy: str


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one check, for all hosts with the same result."""

    check: str
    level: Level
    hosts: tuple[str, ...]
    """Ray's addresses of the hosts; empty: the whole cluster."""
    value: str
    expected: str = ""
    remedy: str = ""


class Verdict(NamedTuple):
    """The problem of a host that fails a check."""

    value: str
    expected: str


CHECKS: dict[str, Check] = {
    "configuration": Check("Is the configuration valid?", "error", "correct the key that is named"),
    "cluster": Check(
        "Does the Ray cluster answer at `--address`?",
        "error",
        "start Ray (ray start --head), correct the address, or let this host through to the GCS; "
        "with token authentication set RAY_AUTH_MODE=token and copy ~/.ray/auth_token here",
    ),
    "hosts": Check(
        "Does every host run a process of ours and answer in time?",
        "error",
        "install the same Swell and Ray there; if it hangs, look at the host's load and at Ray's "
        "logs on it, or end its node (ray stop)",
    ),
    "lost-hosts": Check(
        "Are all hosts alive that the Ray cluster has had?",
        "warning",
        "start Ray there again (ray start --address=HEAD:6379), if the host is to serve",
    ),
    "python": Check(
        "Is Python supported, and the same on all hosts?",
        "error",
        "make the environment of that host with the same Python",
    ),
    "libraries": Check(
        "Are the libraries installed in supported versions, the same on all hosts?",
        "error",
        "install that version there: pip install 'NAME==VERSION'",
    ),
    "swell": Check(
        "Do all hosts have the same source of Swell?",
        "error",
        "install the same wheel or commit on all hosts, and start Ray there again",
    ),
    "torch": Check(
        "Can torch be imported?", "error", "install torch again, for this CPU, driver and Python"
    ),
    "compiler": Check(
        "Is there a C++ compiler for the CPU kernels?",
        "warning",
        "install g++ 12 or later: CPU attention is several times faster",
    ),
    "cores": Check(
        "Are there two cores, within the affinity and the CPU quota of the process?",
        "warning",
        "use a larger host, or raise the quota (docker run --cpus; resources.limits.cpu of a pod): "
        "2 serve smoothly",
    ),
    "memory": Check(
        "Is memory free for the processes, and without GPUs for the weights, within the limits of "
        "the process's control groups?",
        "warning",
        "end what uses it, raise the limit (docker run --memory; resources.limits.memory of a "
        "pod), or use a smaller or quantized model",
    ),
    "shared-memory": Check(
        "Is /dev/shm large enough for Ray's object store and for NCCL?",
        "warning",
        "enlarge it (docker run --shm-size=1g; mount -o remount,size=1g /dev/shm), or start Ray "
        "with a smaller --object-store-memory",
    ),
    "disk": Check(
        "Is space left for Ray's session, temporary files, and a model from the hub?",
        "warning",
        "free some space, or give Ray another folder (ray start --temp-dir)",
    ),
    "temporary-files": Check(
        "Can files be written in /tmp?", "error", "mount a tmpfs there: Ray keeps its sockets in it"
    ),
    "home": Check(
        "Can Ray's token and compiled kernels be kept in the home of the account?",
        "warning",
        "set SWELL_CACHE to a folder that stays, and HOME or RAY_AUTH_TOKEN_PATH; without them "
        "swell serve keeps both in a folder of each start",
    ),
    "open-files": Check(
        "May a process open as many files as `serve.max_connections` needs?",
        "warning",
        "raise the hard limit before Ray is started (ulimit -Hn 65536), or lower "
        "serve.max_connections",
    ),
    "gpu": Check(
        "Do NVML and torch see the GPUs that Ray counts?",
        "error",
        "run nvidia-smi on that host: load the driver, install a torch that is built for its CUDA "
        "version, or correct --num-gpus of ray start",
    ),
    "gpu-versions": Check(
        "Are driver, CUDA, NCCL and torch's build the same on all hosts with GPUs?",
        "error",
        "install the same driver and the same build of torch, which brings NCCL",
    ),
    "gpu-models": Check(
        "Are all GPUs of one model?",
        "warning",
        "serve them as clusters of their own: answers may differ in their last bits, and the "
        "slowest holds up its group",
    ),
    "gpu-errors": Check(
        "Are the GPUs free of memory errors that ECC did not correct?",
        "error",
        "reset the GPU (nvidia-smi --gpu-reset) when nothing uses it; replace it if they return",
    ),
    "gpu-memory": Check(
        "Is the memory of the GPUs free?",
        "warning",
        "end the processes that hold it (nvidia-smi lists them), or leave that GPU to them",
    ),
    "interface": Check(
        "Has every host an address at `cluster.interface`?",
        "error",
        "correct cluster.interface: a network as 10.1.0.0/16 where the interfaces have other names",
    ),
    "ports": Check(
        "Is a port free in each part of `cluster.ports`?",
        "error",
        "end what listens there, or choose another range of cluster.ports",
    ),
    "http-port": Check(
        "Can an ingress listen at `serve.host` and `serve.port`?",
        "error",
        "stop what listens there, or choose another port with serve.port",
    ),
    "links": Check(
        "Does every host reach the others at the ports of the cluster?",
        "error",
        "open cluster.ports between the hosts, in both directions, for TCP; without it, all ports; "
        "docs/operate/network.md lists the sockets",
    ),
    "http-links": Check(
        "Does every host reach the HTTP port of the others?",
        "warning",
        "open serve.port where clients are; between the hosts it is needed by load balancers only",
    ),
    "clocks": Check(
        "Do the clocks of the hosts agree?",
        "warning",
        "run a time service on every host (chrony, systemd-timesyncd): logs, traces and times of "
        "answers are out of order without",
    ),
    "files": Check(
        "Can every host read the files that the configuration names?",
        "error",
        "copy or mount them there, at the same path and readable for Ray's user",
    ),
    "model": Check(
        "Is the model's folder complete on every host?", "error", "do what the message says"
    ),
    "same-files": Check(
        "Are the files of model, keys and templates the same on all hosts?",
        "error",
        "copy them from one host to the others again: engines with other weights give other "
        "answers, and a request may be continued on any of them",
    ),
    "room": Check(
        "Do the hosts have room for `parallel.data` engines?",
        "error",
        "lower parallel.data, parallel.tensor or cluster.cpus_per_worker, or add hosts",
    ),
    "free-resources": Check(
        "Is that room free now?",
        "warning",
        "end what reserves it (ray status), or wait: engines that find no room are tried again",
    ),
    "token-authentication": Check(
        "Does Ray demand a token on a cluster of several hosts?",
        "warning",
        "ray get-auth-token --generate, copy ~/.ray/auth_token to all hosts, and start Ray with "
        "RAY_AUTH_MODE=token: without it every client of Ray's ports controls the hosts",
    ),
    "health-checks": Check(
        "Does Ray's GCS find out that a host is lost, neither too early nor too late?",
        "warning",
        "set RAY_health_check_period_ms, RAY_health_check_timeout_ms and "
        "RAY_health_check_failure_threshold for ray start --head",
    ),
    "serve-settings": Check(
        "Does Ray Serve end replicas that do not answer at once?",
        "warning",
        "set RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS=1 for ray start, on every host: requests that "
        "reach such a replica wait for it",
    ),
}


def passed(check: str, hosts: Sequence[str], value: str) -> Finding:
    return Finding(check=check, level="ok", hosts=tuple(hosts), value=value)


def problem(check: str, hosts: Sequence[str], value: str, expected: str) -> Finding:
    return Finding(
        check=check,
        level=CHECKS[check].level,
        hosts=tuple(hosts),
        value=value,
        expected=expected,
        remedy=CHECKS[check].remedy,
    )


def to_findings(
    check: str, hosts: Sequence[str], verdicts: Mapping[str, Verdict | None], value: str
) -> list[Finding]:
    """Returns one finding for each group of hosts with the same verdict. Without verdicts, returns
    one passed finding for all `hosts` with `value`."""
    shared: dict[Verdict, list[str]] = {}
    for host, verdict in verdicts.items():
        if verdict is not None:
            shared.setdefault(verdict, []).append(host)
    found = [problem(check, where, *verdict) for verdict, where in shared.items()]
    return found or [passed(check, hosts, value)]


def minority(values: Mapping[str, str]) -> dict[str, Verdict]:
    """Returns the hosts whose value differs from the most common one."""
    if not values:
        return {}
    (common, _count) = Counter(values.values()).most_common(1)[0]
    where = next(host for host, value in values.items() if value == common)
    return {
        host: Verdict(value, f"{common}, as on {where}")
        for host, value in values.items()
        if value != common
    }
