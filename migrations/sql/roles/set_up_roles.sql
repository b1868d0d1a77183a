-- Create the missing roles, if the caller may, and grant the existing ones their privileges in this database. Returns
-- the roles that are still missing. Idempotent.
--
-- One role for each way of using the outbox, with all grants. Roles belong to the whole cluster, and few users may
-- create them. No role gets DELETE on a table for which a function is enough: with it, an operator could also lock the
-- table against every worker.
CREATE FUNCTION pgoutbox.set_up_roles()
RETURNS text[]
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    missing text[] := '{}';
    wanted text;
    rights text;
    objects text;
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

    IF
        to_regrole('pgoutbox_operator') IS NOT NULL
        AND NOT has_schema_privilege('pgoutbox_operator', 'pgoutbox', 'USAGE')
    THEN
        -- An operator can read messages at a destination that it sets. If the owner revokes this, it stays revoked.
        GRANT EXECUTE ON FUNCTION pgoutbox.correct, pgoutbox._enqueue_act TO pgoutbox_operator;
    END IF;
    FOR wanted, rights, objects IN
        SELECT unnest(g.roles), g.rights, 'pgoutbox.' || regexp_replace(g.objects, ',[^a-z_]+', ', pgoutbox.', 'g')
        FROM (
            VALUES
            ('{pgoutbox_producer, pgoutbox_worker}'::text[], 'EXECUTE ON FUNCTION',
                'enqueue, _enqueue_receipt, enqueue_many, enqueue_fanout, lock_for_enqueue, find, edit, _read_redirect'),
            ('{pgoutbox_producer, pgoutbox_worker}', 'EXECUTE ON FUNCTION', 'set_schedule, unset_schedule'),
            ('{pgoutbox_worker}', 'EXECUTE ON FUNCTION', '_tick_schedule'),
            ('{pgoutbox_producer, pgoutbox_worker, pgoutbox_operator}', 'EXECUTE ON FUNCTION', 'suppress, unsuppress'),
            ('{pgoutbox_producer, pgoutbox_worker, pgoutbox_operator}', 'EXECUTE ON FUNCTION', '_suppressed'),
            ('{pgoutbox_producer}', 'EXECUTE ON FUNCTION', '_unsubscribe'),
            ('{pgoutbox_operator}', 'EXECUTE ON FUNCTION', 'import_suppressions, address_digest'),
            ('{pgoutbox_operator, pgoutbox_viewer}', 'SELECT ON', 'suppression_view'),
            ('{pgoutbox_worker}', 'SELECT, UPDATE (problem) ON', 'schedule'),
            ('{pgoutbox_operator}', 'EXECUTE ON FUNCTION', 'pause_schedule, resume_schedule, run_schedule'),
            ('{pgoutbox_producer, pgoutbox_worker, pgoutbox_operator}', 'EXECUTE ON FUNCTION',
                '_state_of, cancel, cancel_by_key, cancel_all, reschedule, _is_known_topic'),
            ('{pgoutbox_producer, pgoutbox_worker, pgoutbox_operator, pgoutbox_viewer}', 'EXECUTE ON FUNCTION',
                '_require_package, _require_home, partitions'),
            ('{pgoutbox_producer, pgoutbox_worker, pgoutbox_operator, pgoutbox_viewer}', 'SELECT ON', 'revision'),
            ('{pgoutbox_producer, pgoutbox_operator}', 'EXECUTE ON FUNCTION', '_cancel_each'),
            ('{pgoutbox_worker}', 'EXECUTE ON FUNCTION',
                'read_payloads, _permits, _give_turns, next_permit_at, _in_flight_of, _forget_sent, _require_completion,
                _complete, _reset_session, _with_attempt, _enqueue_failure'),
            ('{pgoutbox_worker, pgoutbox_operator}', 'EXECUTE ON FUNCTION',
                '_bucket_of, _prune_by_rule, _prune_dedupe_by_rule, _prune_keys, _prune_content, _prune_audit,
                _forget_requests, _kept_until, make_partition, _drop_partition'),
            ('{pgoutbox_worker, pgoutbox_operator, pgoutbox_viewer}', 'EXECUTE ON FUNCTION',
                '_here, _tokens_of, _hold_of, _handled_as, _redacted_text, _cause_of, _error_group, failures'),
            ('{pgoutbox_operator, pgoutbox_viewer}', 'EXECUTE ON FUNCTION', '_redacted_json, _done_estimate'),
            ('{pgoutbox_operator}', 'EXECUTE ON FUNCTION',
                'announce_act, close_breaker, set_redirect, clear_redirect, pause_topic, resume_topic, set_fair_share, adopt,
                erase, _erase, _selected_messages, prune, _prune_dedupe, set_retention, unset_retention'),
            -- The acts on messages.
            ('{pgoutbox_operator}', 'EXECUTE ON FUNCTION', (
                SELECT string_agg(p.proname, ', ')
                FROM pg_proc AS p
                WHERE p.prorettype = 'pgoutbox.act_result'::regtype AND p.pronamespace = 'pgoutbox'::regnamespace
                    AND p.proname !~ '^_' AND p.proname <> 'correct'
            )),
            ('{pgoutbox_worker, pgoutbox_operator, pgoutbox_viewer}', 'SELECT ON',
                'message_view, queue_view, breaker_view, retention_view, pulse_view, redirect_view, blackout_view,
                in_flight_view, worker_view, worker_event_view, home_view, topic_pause_view, schedule_view,
                fair_share_view, waiting_view'),
            ('{pgoutbox_operator, pgoutbox_viewer}', 'SELECT ON', 'attempt_view'),
            ('{pgoutbox_worker, pgoutbox_operator}', 'SELECT ON', 'queue, retention'),
            ('{pgoutbox_operator}', 'SELECT ON', 'audit'),
            ('{pgoutbox_operator}',
                'INSERT (name, paused_at, resume_at, rate_seconds, rate_count, burst, max_in_flight),
                UPDATE (paused_at, resume_at, rate_seconds, rate_count, burst, max_in_flight) ON', 'queue'),
            ('{pgoutbox_worker}', 'SELECT ON',
                'message, message_live, key_head, content, cancel_request, topic_pause, breaker, maintenance_run'),
            ('{pgoutbox_worker}', 'SELECT ON SEQUENCE', 'message_id_seq'),
            ('{pgoutbox_worker}', 'SELECT (id, queue, ordering_key, halts_key) ON', 'message_failed'),
            ('{pgoutbox_worker}',
                'INSERT (due_at, began_at, worker), UPDATE (due_at, began_at, succeeded_at, worker) ON', 'maintenance_run'),
            ('{pgoutbox_worker}',
                'UPDATE (state, attempt_count, max_attempts, available_at, lane, claimed_at, worker, key_in_flight,
                finished_at, skip_reason, superseded_by, last_error, attempts) ON', 'message'),
            ('{pgoutbox_worker}', 'UPDATE (lane) ON', 'message_live'), -- A row lock needs the right to update a column.
            ('{pgoutbox_worker}', 'UPDATE (tokens, tokens_at, begun_count) ON', 'queue'),
            ('{pgoutbox_worker}', 'INSERT, UPDATE, DELETE ON', 'breaker'),
            ('{pgoutbox_worker}', 'SELECT, INSERT, UPDATE, DELETE ON', 'claim, worker')
        ) AS g (roles, rights, objects)
    LOOP
        IF to_regrole(wanted) IS NOT NULL THEN
            EXECUTE format('GRANT USAGE ON SCHEMA pgoutbox TO %I', wanted);
            EXECUTE format('GRANT %s %s TO %I', rights, objects, wanted);
        END IF;
    END LOOP;
    RETURN missing;
END
$function$;
