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
    "configuration": Check(
        "Is the configuration valid?", "error", "correct the key that the error names"
    ),
    "cluster": Check(
        "Does the Ray cluster answer at `--address`?",
        "error",
        "start Ray (ray start --head), correct the address, or allow connections from this host "
        "to the GCS; with token authentication set RAY_AUTH_MODE=token and copy "
        "~/.ray/auth_token here",
    ),
    "hosts": Check(
        "Does every host run a process of Swell and answer in time?",
        "error",
        "install the same Swell and Ray there; if it hangs, check the host's load and Ray's logs "
        "on it, or stop its Ray node (ray stop)",
    ),
    "lost-hosts": Check(
        "Are all hosts that have joined the Ray cluster still alive?",
        "warning",
        "start Ray there again (ray start --address=HEAD:6379), if the host should serve",
    ),
    "python": Check(
        "Is Python supported, and the same on all hosts?",
        "error",
        "create the environment of that host with the same Python",
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
    "processors": Check(
        "Are the processors of all hosts of one kind?",
        "warning",
        "serve each kind with its own cluster, or compare the numerics of the engines (swell "
        "status): answers that move between engines of different classes may differ in their last "
        "bits",
    ),
    "cores": Check(
        "Are there two cores, within the affinity and the CPU quota of the process?",
        "warning",
        "use a larger host, or raise the quota (docker run --cpus; resources.limits.cpu of a "
        "pod): Swell needs 2 cores to serve without delays",
    ),
    "memory": Check(
        "Is enough memory free for the processes (and for the weights, if there are no GPUs), "
        "within the limits of the process's control groups?",
        "warning",
        "stop the processes that use it, raise the limit (docker run --memory; "
        "resources.limits.memory of a pod), or use a smaller or quantized model",
    ),
    "shared-memory": Check(
        "Is /dev/shm large enough for Ray's object store and for NCCL?",
        "warning",
        "enlarge it (docker run --shm-size=1g; mount -o remount,size=1g /dev/shm), or start Ray "
        "with a smaller --object-store-memory",
    ),
    "disk": Check(
        "Is enough disk space free for Ray's session, temporary files, and a model from the hub?",
        "warning",
        "free some space, or start Ray with another folder (ray start --temp-dir)",
    ),
    "temporary-files": Check(
        "Can files be written in /tmp?",
        "error",
        "mount a tmpfs at /tmp: Ray keeps its sockets there",
    ),
    "home": Check(
        "Can Ray's token and the compiled kernels be stored in the account's home folder?",
        "warning",
        "set SWELL_CACHE to a permanent folder, and HOME or RAY_AUTH_TOKEN_PATH; otherwise swell "
        "serve stores both in a new folder at each start",
    ),
    "open-files": Check(
        "May a process open as many files as `serve.max_connections` needs?",
        "warning",
        "raise the hard limit before you start Ray (ulimit -Hn 65536), or lower "
        "serve.max_connections",
    ),
    "gpu": Check(
        "Do NVML and torch see the GPUs that Ray counts?",
        "error",
        "run nvidia-smi on that host: load the driver, install a torch that is built for its CUDA "
        "version, or correct --num-gpus of ray start",
    ),
    "gpu-compiler": Check(
        "Is there a C compiler where engines use GPUs?",
        "warning",
        "install gcc (apt install gcc), or set CC: Triton needs it to launch the GPU kernels; "
        "without it torch computes, with some 25 times as many kernel launches",
    ),
    "gpu-versions": Check(
        "Are driver, CUDA, NCCL and torch's build the same on all hosts with GPUs?",
        "error",
        "install the same driver and the same build of torch, which brings NCCL",
    ),
    "gpu-models": Check(
        "Are all GPUs of the same model?",
        "warning",
        "serve each GPU model with its own cluster: results may differ in their last bits, and "
        "the slowest GPU delays its group",
    ),
    "gpu-errors": Check(
        "Are the GPUs free of memory errors that ECC did not correct?",
        "error",
        "reset the GPU (nvidia-smi --gpu-reset) when no process uses it; replace the GPU if "
        "the errors return",
    ),
    "gpu-memory": Check(
        "Is the memory of the GPUs free?",
        "warning",
        "stop the processes that use it (nvidia-smi lists them), or use another GPU",
    ),
    "interface": Check(
        "Has every host an address at `cluster.interface`?",
        "error",
        "correct cluster.interface; if the names of the interfaces differ, set a network "
        "such as 10.1.0.0/16",
    ),
    "ports": Check(
        "Is a port free in each part of `cluster.ports`?",
        "error",
        "stop the processes that listen there, or set another range in cluster.ports",
    ),
    "http-port": Check(
        "Can an ingress listen at `serve.host` and `serve.port`?",
        "error",
        "stop the process that listens there, or set another port in serve.port",
    ),
    "links": Check(
        "Can every host connect to the others at the ports of the cluster?",
        "error",
        "open cluster.ports between the hosts, in both directions, for TCP (without "
        "cluster.ports, open all ports); docs/operate/network.md lists the sockets",
    ),
    "http-links": Check(
        "Can every host connect to the HTTP port of the others?",
        "warning",
        "open serve.port for the clients; between the hosts only load balancers need it",
    ),
    "clocks": Check(
        "Do the clocks of the hosts agree?",
        "warning",
        "run a time service on every host (chrony, systemd-timesyncd): otherwise logs, traces "
        "and the times of answers are out of order",
    ),
    "files": Check(
        "Can every host read the files that the configuration names?",
        "error",
        "copy or mount them there, at the same path and readable for Ray's user",
    ),
    "model": Check("Is the model's folder complete on every host?", "error", "follow the message"),
    "same-files": Check(
        "Are the files of model, keys and templates the same on all hosts?",
        "error",
        "copy them again from one host to the others: engines with other weights return other "
        "answers, and any engine may continue a request",
    ),
    "room": Check(
        "Do the hosts have room for `parallel.data` engines?",
        "error",
        "lower parallel.data, parallel.tensor or cluster.cpus_per_worker, or add hosts",
    ),
    "free-resources": Check(
        "Is that room free now?",
        "warning",
        "stop the jobs that reserve it (ray status), or wait: Swell retries to start engines "
        "that find no room",
    ),
    "token-authentication": Check(
        "Does Ray demand a token on a cluster of several hosts?",
        "warning",
        "ray get-auth-token --generate, copy ~/.ray/auth_token to all hosts, and start Ray with "
        "RAY_AUTH_MODE=token: without a token, everyone who can connect to Ray's ports controls "
        "the hosts",
    ),
    "health-checks": Check(
        "Does Ray's GCS detect a lost host neither too early nor too late?",
        "warning",
        "set RAY_health_check_period_ms, RAY_health_check_timeout_ms and "
        "RAY_health_check_failure_threshold for ray start --head",
    ),
    "serve-settings": Check(
        "Does Ray Serve stop replicas that do not answer immediately?",
        "warning",
        "set RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS=1 for ray start, on every host: otherwise "
        "requests to such a replica wait for it",
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
