"""The protections that `docs/design/failover.md` claims, and the tests that fail if one is missing.

Claims are quoted exactly as on the page. Tests are named `FILE::FUNCTION`.
"""

from __future__ import annotations

_CLIENT = "tests/cluster/client"
_CONTROL = "tests/cluster/control"
_NCCL = "tests/worker/comm/test_nccl_transport.py"
_FAILOVER = f"{_CLIENT}/failover/test_failover.py"
_CONNECTION = f"{_CLIENT}/test_engine_connection.py"
_STATE = "tests/coordinator/test_state_machine.py"
_MONITOR = "tests/coordinator/monitors/test_engine_monitor.py"
_FORMING = "tests/coordinator/monitors/test_forming_monitor.py"
_MANAGER = f"{_CONTROL}/manager/test_manager_faults.py"
_SUCCESSION = f"{_CONTROL}/manager/test_manager_succession.py"
_STANDALONE = "tests/engine/serving/test_standalone_monitor.py"
_MATRIX = "tests/e2e/test_faults.py"

PROMISE: dict[str, tuple[str, ...]] = {
    "every request ends successfully, and a greedy or seeded answer is byte for byte the same": (
        f"{_MATRIX}::test_dense",
        f"{_MATRIX}::test_dense_one_after_the_other",
        f"{_MATRIX}::test_expert_parallel_at_the_start_of_a_wave",
        f"{_MATRIX}::test_expert_parallel_one_after_the_other",
        "tests/simulator/test_simulation.py::test_random_faults_break_no_law",
    ),
}

MECHANISMS: dict[int, dict[str, tuple[str, ...]]] = {
    1: {
        "The noise depends on seed and position": (
            "tests/engine/outputs/test_token_exact.py"
            "::test_a_seeded_answer_is_the_same_in_any_batch_and_after_preemption",
        ),
    },
    2: {
        "This one mechanism serves preemption, failover and hand-over": (
            f"{_CLIENT}/requests/test_request_state.py"
            "::test_a_later_attempt_continues_after_the_outputs_on_any_engine",
            "tests/engine/outputs/test_token_exact.py::test_resumption_continues_an_answer",
        ),
        "The request carries its age": (
            f"{_CLIENT}/requests/test_request_state.py"
            "::test_a_later_attempt_carries_the_waiting_time_so_far",
        ),
        "the next engine starts it before younger requests": (
            "tests/engine/test_engine_core.py"
            "::test_a_request_that_comes_from_another_engine_keeps_its_place",
        ),
        "unless it may be the cause of the last loss": (
            "tests/engine/test_engine_core.py::test_a_suspect_does_not_keep_its_place",
        ),
    },
    3: {
        "every change is a step to the next epoch": (
            "tests/coordinator/test_roster.py"
            "::test_a_change_advances_the_epoch_and_a_no_op_keeps_the_roster",
        ),
        "late messages of a dead engine are dropped": (
            f"{_STATE}::test_messages_of_removed_engines_are_ignored",
            "tests/coordinator/wave_protocol/test_waves.py::test_messages_of_another_epoch_are_dropped",
        ),
    },
    4: {
        "Ingresses send its requests to other engines, and the manager starts a replacement": (
            f"{_FAILOVER}::test_a_lost_engine_is_replaced_by_another",
            f"{_MANAGER}::test_a_dead_engine_is_removed_at_once_and_replaced",
        ),
        "A request that has cost two engines is given up": (
            f"{_FAILOVER}::test_a_request_that_crashed_two_engines_fails",
            f"{_CLIENT}/test_request_placer.py::test_two_losses_while_engines_leave_end_a_request",
        ),
        "the roster names the engines that left on request": (
            "tests/coordinator/test_roster.py::test_requested_departures_are_distinguished_from_losses",
        ),
        "`request_failed` if both losses were workers of one engine": (
            "tests/engine/executor/test_recovery.py::test_a_request_in_every_failed_step_is_failed",
        ),
        "a request that only waited does not count": (
            f"{_FAILOVER}::test_a_waiting_request_is_not_blamed_for_a_lost_engine",
            "tests/engine/serving/test_server.py::test_requests_in_a_step_are_announced_before_it",
        ),
        "two suspects are never computed together": (
            "tests/engine/executor/test_recovery.py::test_a_request_in_every_failed_step_is_failed",
        ),
    },
    5: {
        "the other workers keep their weights and form their groups again": (
            "tests/engine/test_lockstep.py::test_a_worker_is_replaced_while_the_others_continue",
            "tests/engine/executor/test_ray_executor.py"
            "::test_a_lost_worker_is_replaced_and_the_answer_continues",
        ),
    },
    6: {
        "Work without progress for `cluster.stall_timeout_s`, or silence of the same length": (
            f"{_MONITOR}::test_a_silent_engine_is_found_within_the_limit_and_a_heartbeat",
            f"{_MONITOR}::test_work_without_progress_is_found_after_twice_the_limit",
            "tests/engine/executor/test_worker_monitor.py"
            "::test_silence_is_detected_after_the_limit_and_in_one_check",
        ),
        "A shorter pause has no effect": (
            "tests/coordinator/monitors/test_progress_monitor.py"
            "::test_reports_within_the_limit_are_never_silence_or_a_stall",
            f"{_MATRIX}::test_expert_parallel_one_after_the_other",
        ),
    },
    7: {
        "a failed prepare leaves the old epoch unchanged": (
            f"{_MANAGER}::test_a_failed_grow_leaves_the_old_epoch_serving",
        ),
        "A new engine that hangs does not delay the others": (
            f"{_MANAGER}::test_a_hanging_newcomer_delays_no_other",
            "tests/simulator/changes/test_hanging_newcomer.py::test_the_other_newcomer_serves",
        ),
        "without the new engine that its peers do not reach": (
            f"{_FORMING}::test_an_unreachable_newcomer_is_removed",
        ),
        "The only engine of a group gets one": (
            f"{_FORMING}::test_a_single_engine_that_does_not_follow_the_probe_hangs",
        ),
    },
    8: {
        "the other engines keep their requests and form the next group": (
            "tests/coordinator/wave_protocol/test_waves.py::test_an_engine_may_die_in_each_state",
            f"{_STATE}::test_a_dead_engine_is_removed_at_once_and_the_others_regroup",
        ),
        "each engine computes its requests without the others": (
            f"{_STANDALONE}::test_a_step_that_hangs_without_a_coordinator_is_abandoned_after_the_limit",
            "tests/simulator/outages/test_standalone_serving.py"
            "::test_remaining_engines_serve_standalone_and_then_share_again",
        ),
    },
    9: {
        "goes only to engines with its version of the weights": (
            f"{_CLIENT}/requests/test_answer_version.py::test_an_answer_continues_only_on_its_version",
        ),
        "The last engine of a version terminates only when no ingress needs it": (
            f"{_CONTROL}/manager/test_manager_upgrade.py"
            "::test_the_last_engine_of_a_version_stops_when_no_answer_needs_it",
        ),
        "it is started again if it dies earlier": (
            f"{_CONTROL}/manager/test_manager_upgrade.py"
            "::test_an_engine_of_a_needed_version_is_started_again",
        ),
        "another engine gives way, and is replaced": (
            f"{_CONTROL}/plan/test_needed_version.py::test_one_engine_is_replaced_by_the_needed_version_and_restored",
        ),
    },
    10: {
        "While it is away, routing continues with the last view": (
            f"{_FAILOVER}::test_a_restarted_coordinator_continues_at_its_address",
            "tests/coordinator/test_service.py::test_a_stalled_coordinator_keeps_its_subscribers",
        ),
        "A restarted coordinator learns the members from the engines": (
            f"{_STATE}::test_a_successor_takes_over_the_engines_that_report",
        ),
        "if another process holds that address, it waits until the address is free": (
            "tests/coordinator/transport/test_channel.py::test_a_successor_waits_until_its_address_is_free",
        ),
    },
    11: {
        "Ray Serve restarts manager and ingresses, and Ray's GCS restarts Serve's controller": (
            f"{_MATRIX}::test_dense_one_after_the_other",
            f"{_CONTROL}/ray/test_launch.py::test_a_manager_waits_for_a_controller_that_has_just_died",
        ),
        "A new manager adopts the engines that serve, load or wait to join": (
            f"{_SUCCESSION}::test_a_new_manager_adopts_serving_engines",
            f"{_SUCCESSION}::test_loading_and_waiting_engines_are_adopted",
        ),
        "terminates all other engines of earlier managers": (
            f"{_CONTROL}/engines/test_placement.py"
            "::test_serving_loading_and_waiting_engines_are_adopted_and_others_killed",
        ),
        "they survive the loss of manager and coordinator together": (
            "tests/simulator/outages/test_lost_control_host.py"
            "::test_a_pause_survives_both_although_its_checkpoint_is_lost",
            f"{_SUCCESSION}::test_a_new_manager_keeps_the_pause",
        ),
        "which continue with the rest of their time": (
            f"{_SUCCESSION}::test_a_new_manager_continues_with_the_remaining_drain_time",
        ),
    },
    12: {
        "Each failed start is reported at once, even while other engines start": (
            f"{_MANAGER}::test_a_start_that_fails_is_reported_while_another_one_loads",
        ),
        "retried without limit, with growing delays of at most five minutes": (
            f"{_CONTROL}/plan/test_backoff.py::test_no_rank_is_abandoned_and_waits_have_a_limit",
        ),
        "no engine and no placement group is left over": (
            f"{_CONTROL}/ray/test_leftovers.py"
            "::test_killing_an_engine_is_retried_with_growing_delays",
            f"{_CONTROL}/ray/test_leftovers.py"
            "::test_actors_and_groups_created_after_their_wait_are_removed",
        ),
        "reports what failed, how often, and when it is tried next": (
            f"{_MANAGER}::test_repeated_failures_are_reported_and_retried_with_growing_delays",
        ),
    },
    13: {
        "reads all waiting messages before it decides that a peer is gone": (
            f"{_MONITOR}::test_a_resumed_monitor_reports_no_engine",
            "tests/engine/executor/test_worker_monitor.py"
            "::test_a_monitor_that_slept_finds_no_worker_when_it_wakes",
        ),
        "A late turn of its loop counts as at most a quarter of the limit": (
            "tests/coordinator/transport/test_listening_clock.py"
            "::test_a_late_loop_counts_a_part_of_the_limit",
        ),
    },
    14: {
        "A process whose loop has ended exits with a traceback and status 70": (
            "tests/configs/runtime/test_process.py"
            "::test_the_process_exits_with_a_log_line_while_its_main_thread_sleeps",
            "tests/cluster/test_background_task_failures.py"
            "::test_an_ingress_without_its_heartbeat_task_exits",
            "tests/engine/executor/test_background_task_failures.py"
            "::test_an_engine_whose_loop_failed_logs_the_reason_and_exits",
            "tests/coordinator/test_service.py::test_a_failed_loop_stops_the_coordinator",
        ),
        "it is dropped and counted": (
            "tests/engine/executor/test_background_task_failures.py"
            "::test_a_malformed_command_is_dropped_and_counted",
        ),
        "An output that an ingress could not read is computed again": (
            "tests/cluster/test_background_task_failures.py"
            "::test_outputs_that_cannot_be_handled_are_computed_again",
        ),
    },
    15: {
        "another ingress computes it again with the same seed": (
            "tests/cluster/api/responses/test_responses_background.py::test_another_ingress_takes_over_the_responses_of_a_dead_one",
        ),
        "leaves out the part that the client has": (
            "tests/cluster/api/resumable/test_resumable_streams.py"
            "::test_a_resumable_answer_equals_the_answer_of_its_seed",
        ),
    },
    16: {
        "Ingress and engine count the messages of their connection": (
            f"{_CONNECTION}::test_exactly_the_losses_are_detected_at_the_next_exchange",
        ),
        "the ingress opens a new connection and continues its requests": (
            f"{_FAILOVER}::test_outputs_of_lost_messages_are_computed_again",
        ),
        "A connection on which nothing arrives is closed within": (
            "tests/simulator/network/test_connection_contract.py"
            "::test_only_the_silent_side_closes_the_connection",
        ),
    },
    17: {
        "An ingress routes around an engine that it has not reached": (
            f"{_CONNECTION}::test_an_engine_that_sends_but_does_not_answer_counts_as_unreachable",
            f"{_CLIENT}/routing/test_readiness.py"
            "::test_an_engine_that_this_ingress_does_not_reach_is_not_ready",
        ),
    },
    18: {
        "reports it in its replies to keep-alives": (
            "tests/simulator/outages/test_silent_coordinator.py"
            "::test_an_ingress_with_an_engine_that_waits_for_the_coordinator_is_not_ready",
            f"{_CLIENT}/test_engine_core_client.py"
            "::test_an_engine_that_waits_for_the_coordinator_is_not_used",
        ),
        "is detected by the missing replies. Neither gets requests": (
            "tests/simulator/outages/test_silent_coordinator.py"
            "::test_without_a_coordinator_a_request_leaves_a_hanging_engine",
        ),
    },
    19: {
        "kills the process when the loop has reported nothing for `cluster.stall_timeout_s`": (
            "tests/cluster/test_watchdog.py::test_a_process_that_is_stopped_is_killed",
            "tests/cluster/test_watchdog.py::test_a_process_with_a_hanging_loop_is_killed",
            f"{_MATRIX}::test_dense_one_after_the_other",
        ),
        "not counting time in which the loop had no free core": (
            "tests/cluster/test_watchdog.py::test_silence_counts_only_time_in_which_the_loop_could_run",
        ),
        "terminates no manager, no ingress and no store": (
            "tests/cluster/test_replica_options.py::test_an_outage_stops_no_replica",
            "tests/e2e/two_hosts/test_two_hosts.py"
            "::test_engines_on_two_hosts_keep_their_streams_while_a_link_is_down",
        ),
    },
    20: {
        "it terminates every process of the Ray cluster that it has started": (
            "tests/cluster/cli/start/test_ray_leftovers.py"
            "::test_a_stopped_process_and_the_child_of_a_killed_one_are_killed",
        ),
    },
}

LIMITS: dict[str, dict[str, tuple[str, ...]]] = {
    "Where rounding depends on the batch": {
        "`model.exact: true` is refused for these": (
            "tests/worker/test_exactness.py"
            "::test_a_worker_refuses_a_model_whose_rounding_depends_on_the_batch",
        ),
        "Other models that transformers computes on CPUs have the same bits in every batch": (
            "tests/engine/outputs/test_row_bits.py::test_the_bits_of_a_request_do_not_depend_on_its_batch",
        ),
    },
    "Between unlike hosts": {
        "continues on an engine of the class in which it began": (
            "tests/cluster/client/test_request_placer.py"
            "::test_an_answer_that_has_begun_continues_on_its_numerics_class",
        ),
        "find the same bits if the compiler is the same": (
            "tests/kernels/test_narrow_vectors.py"
            "::test_results_have_the_same_bits_on_all_processors",
        ),
        "torch chooses its code by the processor": (
            "tests/engine/outputs/test_numerics_class.py"
            "::test_torch_belongs_to_the_class_where_it_computes",
        ),
        "refuses a model whose products are not those of the compiled kernels": (
            "tests/worker/test_exactness.py::test_a_portable_model_is_computed_by_the_kernels",
        ),
    },
    "`model.exact`:": {
        "depend on its batch, its chunk or its place in a tile": (
            "tests/kernels/triton/test_linear.py"
            "::test_the_bits_of_a_row_do_not_depend_on_its_batch",
            "tests/kernels/triton/test_exact_attention.py"
            "::test_a_token_has_the_same_bits_in_every_batch",
            "tests/kernels/triton/test_moe.py"
            "::test_a_token_has_the_same_bits_in_every_batch_with_packed_experts",
            "tests/kernels/triton/test_exact_answers.py"
            "::test_an_answer_has_the_same_bits_in_every_batch",
        ),
        "all kernels compile for sm_80, sm_90 and sm_100": (
            "tests/kernels/triton/test_compile.py::test_kernels_compile_within_their_budget",
        ),
        "added in rank order and gathered": (
            "tests/worker/comm/test_mesh.py::test_an_exact_group_adds_in_order_on_every_device",
        ),
    },
    "The client of an ingress that dies sees a cut connection.": {},
    "The loss of a peer under NCCL:": {
        "all communicators of a worker are aborted together": (
            f"{_NCCL}::test_all_communicators_are_aborted_together_on_threads_of_their_own",
        ),
        "an abort that does not end replaces the worker": (
            f"{_NCCL}::test_an_abort_that_does_not_end_is_not_an_error_of_the_group",
        ),
        "kill and stop a peer inside a collective": (
            "tests/gpu/test_nccl.py::test_a_worker_survives_the_loss_of_a_peer_inside_a_collective",
        ),
    },
    "A stopped ingress": {
        "until its watchdog kills it, after `cluster.stall_timeout_s`": (
            "tests/cluster/test_watchdog.py::test_a_process_that_is_stopped_is_killed",
        ),
        "after Serve's controller has received nothing from it for 90 s": (
            "tests/cluster/test_replica_options.py::test_an_outage_stops_no_replica",
        ),
    },
    "Several faults at once": {
        "waits `cluster.start_timeout_s` for another one": (
            f"{_FAILOVER}::test_the_wait_for_an_engine_has_a_deadline",
        ),
        "`serve.no_engine_timeout_s`; then the answer is a 503": (
            f"{_FAILOVER}::test_the_wait_for_the_first_engine_has_a_deadline",
        ),
    },
    "The node.": {
        "a lost node is the loss of all its engines at once": (
            "tests/simulator/outages/test_lost_control_host.py"
            "::test_coordinator_and_manager_restart_on_another_host",
        ),
    },
    "Ray learns late that a host is lost": {
        "`swell doctor` shows these settings and the resulting time": (
            "tests/cluster/cli/doctor/test_run_checks.py"
            "::test_settings_for_lost_hosts_are_named_on_healthy_hosts",
        ),
        "that is 65 s at most, with the files in `configs/ray` 90 s": (
            "tests/pages/test_reliability_page.py::test_the_times_of_health_checks_are_those_on_the_page",
        ),
    },
    "A link that is down for longer than these checks take": {
        "its node terminates when the link is back, with all its processes": (
            "tests/simulator/simulated_ray/test_ray.py"
            "::test_a_long_isolated_host_counts_as_dead_and_then_kills_its_processes",
            "tests/simulator/simulated_ray/test_ray.py::test_a_short_cut_kills_nothing",
        ),
    },
    "An engine that sends nothing to the coordinator": {
        "even if ingresses still reach it": (
            f"{_STATE}::test_a_silent_engine_is_removed_and_reported",
        ),
    },
    "The host of Ray's GCS.": {},
    "Answers without a seed": {
        "with noise of a seed that the ingress chose": (
            "tests/cluster/text/params/test_sampling_params.py"
            "::test_a_request_without_a_seed_receives_one_of_63_bits",
            f"{_CLIENT}/requests/test_request_state.py"
            "::test_a_later_attempt_continues_after_the_outputs_on_any_engine",
        ),
    },
    "A request that kills engines": {
        "is given up after two (point 4)": (
            f"{_FAILOVER}::test_a_request_that_crashed_two_engines_fails",
        ),
        "whose outputs this ingress could not handle six times in a row": (
            f"{_CLIENT}/requests/test_request_state.py"
            "::test_only_a_possible_cause_of_many_losses_is_abandoned",
        ),
    },
    "A link that loses messages ends no request": {
        "the request is sent again until it is answered": (
            "tests/simulator/outages/test_flapping_link.py::test_no_request_fails",
        ),
    },
}
"""Limit -> claim -> tests. A limit is named by the bold words at its beginning."""
