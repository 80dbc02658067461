# The environment of Ray and Swell on every host of a cluster that `ray up` starts; ~/.bashrc reads it. All hosts need the
# same values: change them here, and run `ray up` again.
export PATH="$HOME/swell-env/bin:$PATH"

# Ray answers only those that have the token in ~/.ray/auth_token. Without this, every client of its ports controls the hosts.
export RAY_AUTH_MODE=token

# When Ray's GCS counts a host as lost: after 18 checks in a row without an answer, each of which takes period and timeout,
# so after 90 s. Requests go on elsewhere after cluster.stall_timeout_s; what was on the host, coordinator and manager too, is
# replaced only now. After an outage TCP sends again within twice its duration, so a link that is cut for 40 s ends nothing;
# with 6 checks, after 30 s, a lost host is replaced sooner, and a link that is cut for more than 15 s may be its loss.
export RAY_health_check_period_ms=2000
export RAY_health_check_timeout_ms=3000
export RAY_health_check_failure_threshold=18

# A connection outlasts such an outage: its reset would count as the end of the process that is reached through it.
export RAY_grpc_keepalive_timeout_ms=120000

# How long a host goes on whose connection to the GCS has ended: Ray's own value. Then its Ray ends, and all that Swell has
# there with it. So it does on the workers after `ray down`, which stops Ray on the head alone.
export RAY_gcs_rpc_server_reconnect_timeout_s=60

# A replica that does not answer is killed at once: it owns its share of new connections until it is gone.
export RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS=1

# `ray up` sets one thread for all that a host runs; Swell divides the cores itself (model.cpu_threads).
unset OMP_NUM_THREADS

# Options of `ray start` that all hosts share. The address is the one at which SSH has reached this host: the head is reached
# by `ray up`, the workers by the head. Ports: docs/operate/network.md. No process tails logs for drivers, since there are none.
SWELL_NODE="--node-ip-address=$(echo "$SSH_CONNECTION" | cut -d' ' -f3) --include-log-monitor=false
  --node-manager-port=6380 --object-manager-port=6381 --runtime-env-agent-port=6382 --dashboard-agent-grpc-port=6383
  --dashboard-agent-listen-port=6384 --metrics-export-port=6385 --min-worker-port=10002 --max-worker-port=19999"
