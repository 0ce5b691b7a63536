"""Every setting of a service has a test of its effect; a field that is added without one is seen here.

Settings of the scheduler's core, of an edge and of the simulated engine are listed beside their tests.
"""

import ast
from dataclasses import fields
from pathlib import Path

import pytest

from evenhand.scheduler.config import DaemonConfig
from evenhand.state.config import StateConfig

ROOT = Path(__file__).parents[2]
DAEMON = "integration/test_scheduler_daemon.py"
BOUNDS = "integration/test_scheduler_daemon_bounds.py"
IDENTITY = "integration/test_scheduler_daemon_identity.py"
FAILOVER = "integration/test_scheduler_daemon_failover.py"
STATE = "integration/test_state_service.py"
STATE_BOUNDS = "integration/test_state_service_bounds.py"

SETTINGS = {
    DaemonConfig: {
        "core": ("unit/core/test_settings.py", "test_every_setting_of_the_scheduler_has_an_effect"),
        "secret_file": ("unit/scheduler/test_secret.py", "test_it_is_made_once_for_its_owner_alone"),
        "listen": (IDENTITY, "test_a_port_in_use_stops_the_start"),
        "metrics_listen": (DAEMON, "test_pages_show_the_pool_with_bounded_labels"),
        "tls": (IDENTITY, "test_tls"),
        "insecure_loopback": (IDENTITY, "test_who_may_act_for_whom"),
        "reflection": (DAEMON, "test_reflection_is_served_where_it_is_asked_for"),
        "lease_ttl_ms": (FAILOVER, "test_without_its_lease_store_it_decides_until_the_lease_runs_out"),
        "checkpoint_interval_ms": (FAILOVER, "test_a_ticket_the_checkpoint_does_not_know_is_adopted"),
        "directory_poll_ms": (IDENTITY, "test_a_revoked_key_is_refused_within_a_second"),
        "acquire_timeout_default_ms": (BOUNDS, "test_a_wait_is_bounded_by_the_settings"),
        "acquire_timeout_max_ms": (BOUNDS, "test_a_wait_is_bounded_by_the_settings"),
        "calls_pending_max": (BOUNDS, "test_no_more_calls_wait_than_the_setting_says"),
        "session_calls_max": (
            "integration/test_scheduler_daemon_session.py",
            "test_more_than_a_session_may_wait_for_is_refused_and_settles_are_still_read",
        ),
        "metric_tenants_max": (DAEMON, "test_pages_show_the_pool_with_bounded_labels"),
        "drain_timeout_ms": (BOUNDS, "test_a_stop_waits_for_open_tickets_as_long_as_the_setting_says"),
    },
    StateConfig: {
        "group_ms_max": (STATE_BOUNDS, "test_commits_come_when_the_settings_say"),
        "group_key_changes_max": (STATE_BOUNDS, "test_commits_come_when_the_settings_say"),
        "idle_commit_ms": (STATE_BOUNDS, "test_commits_come_when_the_settings_say"),
        "lag_key_changes_max": (STATE, "test_reading_pauses_at_the_bound_and_says_so"),
        "lag_records_max": (STATE_BOUNDS, "test_reading_pauses_at_the_bound_in_records_too"),
        "slice_records_max": (STATE, "test_reading_pauses_at_the_bound_and_says_so"),
        "retry_ms_min": (STATE_BOUNDS, "test_tries_at_the_database_are_paced_by_the_settings"),
        "retry_ms_max": (STATE_BOUNDS, "test_tries_at_the_database_are_paced_by_the_settings"),
        "start_ms_max": (STATE, "test_what_is_away_at_the_start_is_waited_for_and_then_named"),
        "stop_ms_max": (STATE_BOUNDS, "test_a_stop_waits_for_the_database_as_long_as_the_setting_says"),
        "worker_forgotten_after_ms": (STATE, "test_a_worker_that_fell_silent_while_others_spoke_counts_as_left"),
        "malformed_logged_per_minute_max": (
            STATE_BOUNDS,
            "test_malformed_records_are_logged_up_to_the_bound_and_all_counted",
        ),
    },
}


@pytest.mark.parametrize("config", SETTINGS, ids=lambda config: config.__name__)
def test_every_setting_has_its_test(config: type) -> None:
    assert set(SETTINGS[config]) == {field.name for field in fields(config)}
    for path, name in SETTINGS[config].values():
        functions = {
            node.name
            for node in ast.parse((ROOT / "tests" / path).read_text()).body
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        }
        assert name in functions, f"{path} has no test {name}"
