-- One role for each way of using the outbox, with all grants. Roles belong to the whole cluster, and few users may
-- create them. If the caller may not, the result names the missing ones. Call it again when they exist.
CREATE FUNCTION pgoutbox.set_up_roles()
RETURNS text[]
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    missing text[] := '{}';
    wanted text;
BEGIN
    LOCK TABLE pgoutbox.home IN SHARE ROW EXCLUSIVE MODE; -- Of two concurrent grants one would fail.
    PERFORM pgoutbox._hand_over();
    FOREACH wanted IN ARRAY ARRAY['pgoutbox_producer', 'pgoutbox_worker', 'pgoutbox_operator', 'pgoutbox_viewer'] LOOP
        IF to_regrole(wanted) IS NULL THEN
            BEGIN
                EXECUTE format('CREATE ROLE %I NOLOGIN', wanted);
            EXCEPTION
                WHEN insufficient_privilege THEN
                    missing := missing || wanted;
                WHEN duplicate_object OR unique_violation THEN
                    NULL; -- The migration of another database was faster.
            END;
        END IF;
    END LOOP;

    REVOKE ALL ON SCHEMA pgoutbox FROM PUBLIC;
    REVOKE ALL ON ALL TABLES IN SCHEMA pgoutbox FROM PUBLIC;
    REVOKE ALL ON ALL SEQUENCES IN SCHEMA pgoutbox FROM PUBLIC;
    REVOKE ALL ON ALL FUNCTIONS IN SCHEMA pgoutbox FROM PUBLIC;

    IF to_regrole('pgoutbox_producer') IS NOT NULL THEN
        GRANT USAGE ON SCHEMA pgoutbox TO pgoutbox_producer;
        GRANT EXECUTE ON FUNCTION
            pgoutbox.enqueue, pgoutbox._enqueue_receipt, pgoutbox.enqueue_many, pgoutbox.enqueue_fanout, pgoutbox._state_of,
            pgoutbox.lock_for_enqueue,
            pgoutbox.cancel, pgoutbox.cancel_by_key, pgoutbox.cancel_all, pgoutbox.reschedule, pgoutbox.find, pgoutbox.edit,
            -- For `pgoutbox enqueue` and `pgoutbox cancel`.
            pgoutbox.schema_version, pgoutbox._is_known_topic, pgoutbox._cancel_each,
            -- For direct sends.
            pgoutbox._require_home, pgoutbox._read_redirect
        TO pgoutbox_producer;
    END IF;

    IF to_regrole('pgoutbox_worker') IS NOT NULL THEN
        GRANT USAGE ON SCHEMA pgoutbox TO pgoutbox_worker;
        GRANT EXECUTE ON FUNCTION
            pgoutbox.enqueue, pgoutbox._enqueue_receipt, pgoutbox.enqueue_many, pgoutbox.enqueue_fanout, pgoutbox._state_of,
            pgoutbox.lock_for_enqueue,
            pgoutbox.cancel, pgoutbox.cancel_by_key, pgoutbox.cancel_all, pgoutbox.reschedule, pgoutbox.find, pgoutbox.edit,
            pgoutbox.read_payloads, pgoutbox._is_known_topic, pgoutbox.schema_version, pgoutbox._require_home, pgoutbox._here,
            pgoutbox._read_redirect, pgoutbox._permits, pgoutbox.next_permit_at, pgoutbox._tokens_of, pgoutbox._bucket_of,
            pgoutbox._in_flight_of, pgoutbox._hold_of, pgoutbox._forget_sent, pgoutbox._require_completion,
            pgoutbox._complete, pgoutbox._reset_session,
            pgoutbox._redacted_text, pgoutbox._cause_of, pgoutbox._error_group, pgoutbox.failures,
            pgoutbox._with_attempt, pgoutbox._enqueue_failure,
            pgoutbox._prune_by_rule, pgoutbox._prune_dedupe_by_rule, pgoutbox._prune_keys,
            pgoutbox._prune_content, pgoutbox._prune_audit, pgoutbox._forget_requests, pgoutbox._raise_id_floor,
            pgoutbox.partitions, pgoutbox._kept_until, pgoutbox.make_partition, pgoutbox._drop_partition
        TO pgoutbox_worker;
        GRANT SELECT ON
            pgoutbox.message, pgoutbox.message_live, pgoutbox.key_head, pgoutbox.content,
            pgoutbox.cancel_request, pgoutbox.queue, pgoutbox.topic_pause, pgoutbox.breaker, pgoutbox.retention
        TO pgoutbox_worker;
        GRANT SELECT ON SEQUENCE pgoutbox.message_id_seq TO pgoutbox_worker;
        GRANT SELECT (id, queue, ordering_key, halts_key) ON pgoutbox.message_failed TO pgoutbox_worker;
        GRANT SELECT ON
            pgoutbox.message_view, pgoutbox.queue_view, pgoutbox.breaker_view, pgoutbox.retention_view,
            pgoutbox.pulse_view, pgoutbox.redirect_view, pgoutbox.blackout_view, pgoutbox.in_flight_view, pgoutbox.worker_view,
            pgoutbox.home_view, pgoutbox.topic_pause_view, pgoutbox.maintenance_run
        TO pgoutbox_worker;
        GRANT INSERT (due_at, began_at, worker), UPDATE (due_at, began_at, succeeded_at, worker)
        ON pgoutbox.maintenance_run TO pgoutbox_worker;
        GRANT UPDATE (
            state, attempt_count, max_attempts, available_at, lane, claimed_at, worker, key_in_flight, finished_at,
            skip_reason, superseded_by, last_error, attempts
        ) ON pgoutbox.message TO pgoutbox_worker;
        GRANT UPDATE (lane) ON pgoutbox.message_live TO pgoutbox_worker; -- A row lock needs the right to update a column.
        GRANT SELECT, INSERT, UPDATE, DELETE ON pgoutbox.claim TO pgoutbox_worker;
        GRANT UPDATE (tokens, tokens_at, begun_count) ON pgoutbox.queue TO pgoutbox_worker;
        GRANT INSERT, UPDATE, DELETE ON pgoutbox.breaker TO pgoutbox_worker;
        GRANT SELECT, INSERT, UPDATE, DELETE ON pgoutbox.worker TO pgoutbox_worker;
    END IF;

    IF to_regrole('pgoutbox_viewer') IS NOT NULL THEN
        GRANT USAGE ON SCHEMA pgoutbox TO pgoutbox_viewer;
        GRANT SELECT ON
            pgoutbox.message_view, pgoutbox.attempt_view, pgoutbox.queue_view, pgoutbox.breaker_view,
            pgoutbox.retention_view, pgoutbox.waiting_view, pgoutbox.pulse_view, pgoutbox.redirect_view,
            pgoutbox.topic_pause_view, pgoutbox.blackout_view, pgoutbox.in_flight_view, pgoutbox.worker_view, pgoutbox.home_view
        TO pgoutbox_viewer;
        GRANT EXECUTE ON FUNCTION
            pgoutbox.schema_version, pgoutbox._require_home, pgoutbox._here, pgoutbox._redacted_text,
            pgoutbox._redacted_json, pgoutbox._cause_of, pgoutbox._error_group, pgoutbox.failures,
            pgoutbox._tokens_of, pgoutbox._done_estimate, pgoutbox._hold_of
        TO pgoutbox_viewer;
    END IF;

    IF to_regrole('pgoutbox_operator') IS NOT NULL THEN
        IF NOT has_schema_privilege('pgoutbox_operator', 'pgoutbox', 'USAGE') THEN
            -- An operator can read messages at a destination that it sets. If the owner revokes this, it stays revoked.
            GRANT EXECUTE ON FUNCTION pgoutbox.correct, pgoutbox._enqueue_act TO pgoutbox_operator;
        END IF;
        GRANT USAGE ON SCHEMA pgoutbox TO pgoutbox_operator;
        GRANT SELECT ON
            pgoutbox.message_view, pgoutbox.attempt_view, pgoutbox.queue_view, pgoutbox.breaker_view,
            pgoutbox.retention_view, pgoutbox.waiting_view, pgoutbox.pulse_view, pgoutbox.redirect_view,
            pgoutbox.topic_pause_view, pgoutbox.blackout_view, pgoutbox.in_flight_view, pgoutbox.worker_view, pgoutbox.home_view
        TO pgoutbox_operator;
        GRANT EXECUTE ON FUNCTION
            pgoutbox.schema_version, pgoutbox._require_home, pgoutbox._here, pgoutbox._redacted_text,
            pgoutbox._redacted_json, pgoutbox._cause_of, pgoutbox._error_group, pgoutbox.failures,
            pgoutbox._tokens_of, pgoutbox._bucket_of, pgoutbox._done_estimate, pgoutbox.announce_act,
            pgoutbox._state_of, pgoutbox._is_known_topic, pgoutbox._hold_of,
            pgoutbox.cancel, pgoutbox._cancel_each, pgoutbox.cancel_by_key, pgoutbox.cancel_all, pgoutbox.reschedule,
            pgoutbox.dismiss, pgoutbox.redrive, pgoutbox.release, pgoutbox.resend, pgoutbox.snooze, pgoutbox.close_breaker,
            pgoutbox.set_redirect, pgoutbox.clear_redirect, pgoutbox.pause_topic, pgoutbox.resume_topic, pgoutbox.adopt,
            pgoutbox.erase, pgoutbox._erase, pgoutbox._selected_messages,
            pgoutbox.prune, pgoutbox._prune_dedupe, pgoutbox._prune_by_rule, pgoutbox._prune_dedupe_by_rule,
            pgoutbox._prune_keys, pgoutbox._prune_content, pgoutbox._prune_audit,
            pgoutbox._forget_requests, pgoutbox._raise_id_floor, pgoutbox.set_retention, pgoutbox.unset_retention,
            pgoutbox.partitions, pgoutbox._kept_until, pgoutbox.make_partition, pgoutbox._drop_partition
        TO pgoutbox_operator;
        GRANT
            SELECT,
            INSERT (name, paused_at, resume_at, rate_seconds, rate_count, burst, max_in_flight),
            UPDATE (paused_at, resume_at, rate_seconds, rate_count, burst, max_in_flight)
        ON pgoutbox.queue TO pgoutbox_operator;
        GRANT SELECT ON pgoutbox.retention, pgoutbox.audit TO pgoutbox_operator;
    END IF;
    RETURN missing;
END
$function$;

COMMENT ON FUNCTION pgoutbox.set_up_roles IS
    'Create the missing roles, if the caller may, and grant the existing ones their privileges in this database. '
    'Returns the roles that are still missing. Idempotent.';
