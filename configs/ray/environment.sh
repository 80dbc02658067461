# The environment of Ray and Swell on every host of a cluster that `ray up` starts; ~/.bashrc reads it. All hosts need the
# same values: change them here, and run `ray up` again.
export PATH="$HOME/swell-env/bin:$PATH"

# Ray only accepts clients that have the token in ~/.ray/auth_token. Without it, every client that reaches its ports controls
# the hosts.
export RAY_AUTH_MODE=token

# Ray's GCS considers a host lost after 18 failed checks in a row. Each check takes period plus timeout, so this takes 90 s.
# Requests continue elsewhere after cluster.stall_timeout_s, but the processes of the host, even coordinator and manager, are
# only replaced after the 90 s. After an outage, TCP sends again within twice the duration of the outage, so a link that is
# cut for 40 s terminates nothing. With 6 checks (30 s) a lost host is replaced sooner, but a link that is cut for more than
# 15 s may count as a lost host.
export RAY_health_check_period_ms=2000
export RAY_health_check_timeout_ms=3000
export RAY_health_check_failure_threshold=18

# A connection must outlast such an outage: Ray treats a reset connection as the termination of the process at its other end.
export RAY_grpc_keepalive_timeout_ms=120000

# How long a host that has lost its connection to the GCS continues (Ray's default). Then Ray stops on this host, and all
# processes of Swell with it. This also stops the workers after `ray down`, which only stops Ray on the head.
export RAY_gcs_rpc_server_reconnect_timeout_s=60

# A replica that does not answer is killed at once, because it receives its share of new connections until it is gone.
export RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS=1

# `ray up` limits all processes of a host to one thread; Swell divides the cores itself (model.cpu_threads).
unset OMP_NUM_THREADS

# Options of `ray start` for all hosts. The address is the one at which SSH has reached this host: `ray up` connects to the
# head, and the head to the workers. Ports: docs/operate/network.md. The log monitor is off, because no driver reads logs.
SWELL_NODE="--node-ip-address=$(echo "$SSH_CONNECTION" | cut -d' ' -f3) --include-log-monitor=false
  --node-manager-port=6380 --object-manager-port=6381 --runtime-env-agent-port=6382 --dashboard-agent-grpc-port=6383
  --dashboard-agent-listen-port=6384 --metrics-export-port=6385 --min-worker-port=10002 --max-worker-port=19999"
