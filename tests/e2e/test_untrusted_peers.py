"""A running cluster and an untrusted peer without its secrets, in its network or with another
account of its host. Every listening socket is in the table of `docs/operate/security.md` and has
the protection of its row, and data that an untrusted peer sends to Swell's sockets changes
nothing."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import zmq

from swell.coordinator.transport.channel import ChannelAddress, ChannelKeys, Outlet, make_keys
from swell.engine.wire import EngineCoreOutputs, EngineCoreRequest
from swell.worker.sampler_wire import SamplerParams
from tests.e2e.cluster import NANO, ROOT, Cluster
from tests.e2e.protections import (
    PROTECTIONS,
    Place,
    Site,
    code_files,
    complaints,
    not_denied,
    open_processes,
    written_files,
)
from tests.faults.process import HTTP, title
from tests.support.deadlines import HANG_S
from tests.support.marked_page import END, marker
from tests.support.untrusted.untrusted_account import ATTEMPTS, UntrustedAccount
from tests.support.untrusted.untrusted_peers import (
    Door,
    Recorder,
    knock_with_keys,
    knocks,
    listening,
    visit,
)

pytestmark = pytest.mark.slow

PAGE = ROOT / "docs" / "operate" / "security.md"
PORTS = range(29_200, 29_264)
LIST_NODES = "/ray.rpc.NodeInfoGcsService/GetAllNodeInfo"
MORE_MEMORY_BYTES = 64 << 20
"""The memory by which one process may grow during all knocks."""
MORE_LOG_BYTES = 256 << 10
MORE_FILES = 16
"""The number of file descriptors that one process may have opened meanwhile for other reasons."""
PROMPTS = [f"reverse: {word}" for word in ("kitten", "planet", "garden", "silver")]


@dataclass
class Row:
    """A row of the table of sockets."""

    process: str
    at_most: int
    address: str
    port: str
    protocol: str
    protection: str
    found: int = field(default=0)

    @property
    def is_ours(self) -> bool:
        return not self.protocol.startswith("Ray")


def read_rows() -> list[Row]:
    text = PAGE.read_text().partition(marker("sockets"))[2].partition(END)[0]
    lines = [line.strip("| \n").split("|") for line in text.splitlines()[2:]]
    rows = [[*(cell.strip(" `") for cell in line[:5]), line[5].strip()] for line in lines]
    return [Row(row[0], int(row[1]), *row[2:]) for row in rows]


class LockedCluster(Cluster):
    """A cluster with keys for users and operators. `get` and `post` send the key of their route."""

    def __init__(self, folder: Path, *arguments: Any) -> None:
        self.key_files = (folder / "user", folder / "admin")
        self.keys = [f"{path.name}-{secrets.token_hex(16)}" for path in self.key_files]
        for path, key in zip(self.key_files, self.keys, strict=True):
            path.touch(0o600)
            path.write_text(f"{key}\n")
        names = ("serve.api_keys_file", "serve.admin_keys_file")
        files = zip(names, self.key_files, strict=True)
        super().__init__(*arguments, *(f"{name}={path}" for name, path in files))

    def get(self, path: str) -> httpx.Response:
        return HTTP.get(self.url + path, headers=self._headers(path), timeout=HANG_S)

    def post(self, path: str, body: object) -> httpx.Response:
        return HTTP.post(self.url + path, json=body, headers=self._headers(path), timeout=HANG_S)

    def _headers(self, path: str) -> dict[str, str]:
        return {"authorization": f"Bearer {self.keys[path.startswith('/admin')]}"}


@pytest.fixture(scope="module")
def recorder() -> Iterator[Recorder | None]:
    """Records the loopback interface from before the cluster starts; None without the right to."""
    with contextlib.ExitStack() as stack:
        recorded = None
        with contextlib.suppress(PermissionError):  # this process may not open packet sockets
            recorded = stack.enter_context(Recorder())
        yield recorded


@pytest.fixture(scope="module")
def public() -> Iterator[Path]:
    """A folder that every account may enter; the folders of pytest belong to one account."""
    folder = Path(tempfile.mkdtemp(prefix="public-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def cluster(recorder: Recorder | None, public: Path) -> Iterator[LockedCluster]:
    """A cluster with every kind of socket: two engines of two workers each that share experts."""
    with LockedCluster(
        public,
        NANO.parent / "nano-moe",
        "model.dtype=float32",
        "parallel.data=2",
        "parallel.expert=true",
        "parallel.tensor=2",
        f"cluster.ports={PORTS[0]}-{PORTS[-1]}",
    ) as running:
        wait_until_whole(running, 2)
        yield running


def wait_until_whole(cluster: Cluster, engines: int) -> None:
    deadline = time.monotonic() + HANG_S
    while True:
        state = cluster.get("/admin/cluster").json()
        active = [engine["state"] for engine in state["engines"]] == ["active"] * engines
        if active and state["state"] == "serving" and state["rescale"]["phase"] == "idle":
            return
        assert time.monotonic() < deadline, state
        time.sleep(0.2)


@pytest.fixture(scope="module")
def internal_access(cluster: Cluster) -> dict[str, Any]:
    """The keys and addresses of the cluster, read with Ray's token."""
    (gcs,) = listening(cluster.named("gcs_server")).values()
    address = f"127.0.0.1:{next(door.port for door in gcs)}"
    done = run_with_token(address)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = msgspec.json.decode(done.stdout.splitlines()[-1])
    return {
        "gcs": address,
        "keys": msgspec.convert(found["keys"], ChannelKeys),
        "coordinator": msgspec.convert(found["coordinator"], ChannelAddress),
        "engines": msgspec.convert(found["engines"], list[ChannelAddress]),
    }


def run_with_token(address: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.e2e.internal_access", address],
        env={**os.environ, "RAY_AUTH_MODE": "token"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )


@pytest.fixture(scope="module")
def site(cluster: LockedCluster, internal_access: dict[str, Any]) -> Iterator[Site]:
    """The cluster and another account of its host; needs root."""
    if os.geteuid() != 0:
        pytest.skip("only root becomes another account of this host")
    token = (os.environ.get("RAY_AUTH_TOKEN") or token_path().read_text()).strip()
    keys = internal_access["keys"]
    found = (token, *cluster.keys, *(key.decode() for key in (keys.public, keys.secret)))
    with UntrustedAccount() as account:
        yield Site(
            account=account,
            url=cluster.url,
            token=token,
            channel_key=keys.public.decode(),
            user_key=cluster.keys[0],
            key_files=cluster.key_files,
            secrets=found,
        )


def token_path() -> Path:
    named = os.environ.get("RAY_AUTH_TOKEN_PATH")
    return Path(named) if named else Path.home() / ".ray" / "auth_token"


# -------------------------------------------------------------------------------- the table


def assign(rows: list[Row], process: str, door: Door, http_port: int) -> Row | None:
    """Returns the first row that fits and has room; the table lists specific rows first."""
    for row in rows:
        if row.process in process and row.found < row.at_most and fits(row, door, http_port):
            row.found += 1
            return row
    return None


def fits(row: Row, door: Door, http_port: int) -> bool:
    if door.family == "unix":
        return row.address[0] in "@/" and door.address.startswith(row.address)
    loopback = door.address == "127.0.0.1"
    addresses = {
        "all": door.address in ("0.0.0.0", "::"),
        "interface": door.address not in ("0.0.0.0", "::") and not loopback,
        "serve.host": loopback,
        "127.0.0.1": loopback,
    }
    ports = {
        "cluster.ports": door.port in PORTS,
        "serve.port": door.port == http_port,
        "any": door.port not in PORTS,
    }
    return addresses.get(row.address, False) and ports.get(row.port, row.port == str(door.port))


def doors_by_row(cluster: Cluster) -> tuple[list[tuple[Row, Door]], list[str]]:
    """Returns all sockets with their rows, and a line for each socket without one."""
    known, unknown = [], []
    pids = [cluster.process.pid, *cluster.members()]
    for pid, doors in listening(dict.fromkeys(pids)).items():
        rows = read_rows()
        for door in sorted(doors):
            row = assign(rows, title(pid), door, cluster.port)
            if row is not None:
                known.append((row, door))
            elif "ray::IDLE" not in title(pid):
                unknown.append(f"{title(pid)[:100].strip()}: {door}")
    return known, unknown


def is_taken(cluster: Cluster, row: Row) -> bool:
    """Whether Ray's agent runs without its HTTP port, since another cluster of the host has it."""
    if row.process != "ray::DashboardAgent" or not row.port.isdigit():
        return False
    log = logs(cluster) / "dashboard_agent.log"
    return f"Agent port #{row.port} failed to bind" in log.read_text()


def test_every_socket_that_listens_is_in_the_table_and_every_row_listens(cluster) -> None:
    deadline = time.monotonic() + HANG_S
    while True:  # a Ray agent may begin to listen after the cluster serves
        known, unknown = doors_by_row(cluster)
        assert not unknown, f"not in {PAGE.name}: {unknown}"
        found = {(row.process, row.address, row.port) for row, _ in known}
        missing = [row for row in read_rows() if (row.process, row.address, row.port) not in found]
        missing = [row for row in missing if not is_taken(cluster, row)]
        if not missing or time.monotonic() > deadline:
            break
        time.sleep(0.5)
    assert not missing, f"in {PAGE.name}, and nothing listens: {missing}"


# -------------------------------------------------------------------------------- another account


def test_every_row_has_an_attempt_and_every_attempt_a_row() -> None:
    assert {row.protection for row in read_rows()} == PROTECTIONS.keys()


def test_every_socket_has_the_protection_of_its_row(cluster, site) -> None:
    expected = [answer(cluster, prompt) for prompt in PROMPTS]
    before = at_rest(cluster)
    known, unknown = doors_by_row(cluster)
    assert not unknown
    lines = [
        line
        for row, door in known
        for line in complaints(site, Place(row.process, row.protocol, door), row.protection)
    ]
    assert not lines, "\n".join(lines)
    assert_unchanged(before, cluster)
    assert [answer(cluster, prompt) for prompt in PROMPTS] == expected


def test_calls_with_the_token_are_accepted(cluster, site) -> None:
    """Shows that the calls in the tests above are refused because they lack the token."""
    (gcs,) = listening(cluster.named("gcs_server")).values()
    address = f"127.0.0.1:{next(door.port for door in gcs)}"
    assert site.account.attempt("call", address, [LIST_NODES], site.token) == {LIST_NODES: "OK"}


def test_processes_and_their_files_are_closed_to_another_account(cluster, site) -> None:
    pids = [cluster.process.pid, *cluster.members()]
    assert not [*open_processes(site, pids)]
    files = sorted(written_files(pids))
    assert any(path.endswith("raylet.out") for path in files), files
    attempts = [(name, path) for path in files for name in ("read", "write")]
    attempts += [("write", path) for path in sorted(code_files(pids))]
    attempts += [(name, str(token_path())) for name in ("read", "write", "rename")]
    attempts += [(name, f"/tmp/swell-ports-{os.getuid()}") for name in ("list", "create")]
    assert not [*not_denied(site.account, *attempts)]


# -------------------------------------------------------------------------------- the knocks


@dataclass(frozen=True)
class State:
    """The state that untrusted peers must not change."""

    cluster: Any
    memory: dict[int, int]
    files: dict[int, int]
    log_bytes: int

    @classmethod
    def of(cls, cluster: Cluster) -> State:
        view = cluster.get("/admin/cluster").json()
        members = [*cluster.members()]
        return cls(
            view,
            {pid: memory_of(pid) for pid in members},
            {pid: len(os.listdir(f"/proc/{pid}/fd")) for pid in members},
            log_bytes(cluster),
        )


def memory_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def logs(cluster: Cluster) -> Path:
    """Returns the folder of Ray's logs."""
    (raylet,) = cluster.named("raylet/raylet")
    session = next(word for word in title(raylet).split() if word.startswith("--raylet_socket"))
    return Path(session.partition("=")[2]).parents[1] / "logs"


def log_bytes(cluster: Cluster) -> int:
    return sum(path.stat().st_size for path in logs(cluster).rglob("*") if path.is_file())


def ours(cluster: Cluster) -> list[tuple[Row, Door]]:
    return [(row, door) for row, door in doors_by_row(cluster)[0] if row.is_ours]


def answer(cluster: Cluster, prompt: str) -> str:
    body = {"model": "nano-moe", "prompt": prompt, "max_tokens": 16, "ignore_eos": True}
    response = cluster.post("/v1/completions", {**body, "temperature": 0})
    assert response.status_code == 200, response.text
    text: str = response.json()["choices"][0]["text"]
    return text


def at_rest(cluster: Cluster) -> State:
    """Returns the state of the idle cluster, once it has reported all its steps."""
    cluster.wait_idle()
    wait_for_steps(cluster, 0)
    return State.of(cluster)


def assert_unchanged(before: State, cluster: Cluster) -> None:
    """Asserts that nothing has changed. An idle cluster makes no steps, so a request of an
    untrusted peer would be visible. Its connections are closed after the handshake timeout."""
    cluster.wait_idle()
    deadline = time.monotonic() + HANG_S
    while True:
        now = State.of(cluster)
        more = {
            title(pid)[:60]: count - before.files[pid]
            for pid, count in now.files.items()
            if pid in before.files and count > before.files[pid] + MORE_FILES
        }
        if not more and stable(now.cluster) == stable(before.cluster):
            break
        assert time.monotonic() < deadline, (more, now.cluster, before.cluster)
        time.sleep(0.5)
    assert now.memory.keys() >= before.memory.keys(), "a process is gone"
    grown = {
        title(pid)[:60]: now.memory[pid] - size
        for pid, size in before.memory.items()
        if now.memory[pid] > size + MORE_MEMORY_BYTES
    }
    assert not grown
    assert now.log_bytes - before.log_bytes < MORE_LOG_BYTES


def stable(view: Any) -> Any:
    """Returns the view without ages: epoch, wave, states, processes and steps remain."""
    return {key: value for key, value in view.items() if "ago" not in key and "age" not in key}


def knock_at_all(cases: list[tuple[Door, bytes]]) -> None:
    with ThreadPoolExecutor(64) as pool:  # each visit waits for an answer or to be accepted
        list(pool.map(lambda case: visit(*case), cases))


def test_noise_changes_nothing(cluster) -> None:
    expected = [answer(cluster, prompt) for prompt in PROMPTS]
    before = at_rest(cluster)
    doors = [door for _, door in ours(cluster)]
    assert len(doors) >= 20, doors
    knock_at_all([(door, knock) for door in doors for knock in knocks().values()])
    assert_unchanged(before, cluster)
    busy = threading.Event()

    def knock_until_done() -> None:
        while not busy.is_set():
            knock_at_all([(door, knocks()["noise"]) for door in doors])

    thread = threading.Thread(target=knock_until_done)
    thread.start()
    try:
        assert [answer(cluster, prompt) for prompt in PROMPTS] == expected
    finally:
        busy.set()
        thread.join()


def test_keys_of_another_cluster_are_refused(cluster, internal_access) -> None:
    """Tries keys of another cluster, and own keys together with the public key of this cluster."""
    before = at_rest(cluster)
    frame = msgspec.msgpack.encode(request("untrusted"))
    other, keys = make_keys(), internal_access["keys"]
    doors = [door for row, door in ours(cluster) if row.protocol == "ZMTP"]
    assert len(doors) == 14, doors
    for door in doors:
        assert not knock_with_keys(door, other.public, other.secret, other.public, frame)
        assert not knock_with_keys(door, *zmq.curve_keypair(), keys.public, frame)
    assert_unchanged(before, cluster)


def request(id: str) -> EngineCoreRequest:
    return EngineCoreRequest(id, [5, 6, 7], SamplerParams(temperature=0), max_tokens=4)


def test_replayed_frames_are_refused(cluster, internal_access, recorder) -> None:
    """Replays data of a peer whose request was served, of clients of the store, and of gloo."""
    if recorder is None:
        pytest.skip("this process may not open packet sockets")
    engine = msgspec.structs.replace(internal_access["engines"][0], machine="another")
    outlet: Outlet[EngineCoreOutputs] = Outlet(engine, EngineCoreOutputs, internal_access["keys"])
    steps = sum(engine["steps"] for engine in cluster.get("/admin/cluster").json()["engines"])
    outlet.send(request("internal_access"))
    assert outlet.receive(60.0) is not None, "the request of a peer with the keys is not served"
    outlet.close()
    cluster.wait_idle()
    wait_for_steps(cluster, steps)
    before = State.of(cluster)
    port = int(engine.tcp.rpartition(":")[2])
    assert any(len(sent) > 400 for sent in recorder.sent_to(port)), "nothing was recorded"
    cases = [
        (door, part)
        for row, door in ours(cluster)
        if door.family == "tcp" and row.protocol != "HTTP"
        for sent in recorder.sent_to(door.port)
        for part in (sent, sent[64:])
    ]
    protocols = {row.protocol for row, door in ours(cluster) if any(door == d for d, _ in cases)}
    assert protocols == {"ZMTP", "gloo", "torch's TCPStore"}
    knock_at_all(cases)
    assert_unchanged(before, cluster)


def wait_for_steps(cluster: Cluster, more_than: int) -> None:
    """Waits until the engines report more than `more_than` steps and the number stays the same."""
    deadline, last = time.monotonic() + HANG_S, -1
    while True:
        engines = cluster.get("/admin/cluster").json()["engines"]
        steps = sum(engine["steps"] for engine in engines)
        if steps > more_than and steps == last:
            return
        assert time.monotonic() < deadline, engines
        last = steps
        time.sleep(3)


def test_ray_demands_its_token(internal_access) -> None:
    answer = ATTEMPTS["call"](internal_access["gcs"], [LIST_NODES], "0" * 64)
    assert answer == {LIST_NODES: "UNAUTHENTICATED"}
    token = token_path()
    if "RAY_AUTH_TOKEN" not in os.environ and token.exists():
        assert token.stat().st_mode & 0o077 == 0


def test_groups_form_again_after_all_attempts(cluster) -> None:
    """Changes the number of engines after the attacks, which also reached the stores."""
    expected = [answer(cluster, prompt) for prompt in PROMPTS]
    cluster.post("/admin/scale", {"engines": 1})
    wait_until_whole(cluster, 1)
    assert [answer(cluster, prompt) for prompt in PROMPTS] == expected
