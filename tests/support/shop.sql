-- An outbox with made-up messages: one hour of a busy shop. Message 10001 failed after several attempts.
INSERT INTO pgoutbox.message (
    id, topic, queue, destination, payload, state, coalesce_key, key_in_flight, attempt_count, created_at, available_at,
    claimed_at, worker, finished_at, skip_reason, superseded_by, last_error
)
SELECT
    n,
    (ARRAY['mail.welcome', 'mail.receipt', 'webhook.order', 'sms.code'])[1 + n % 4],
    (ARRAY['default', 'mail', 'webhooks', 'default'])[1 + n % 4],
    (ARRAY['mailto:user' || n || '@example.org', 'mailto:shop' || n || '@example.org',
           'https://shop' || n % 9 || '.example.org/hook', 'sms:+15550' || 100000 + n])[1 + n % 4],
    jsonb_build_object('user_id', n),
    s.state,
    CASE WHEN n % 5 = 0 THEN 'user-' || n END,
    CASE WHEN n % 5 = 0 AND s.state = 'sending' THEN 'user-' || n END,
    CASE s.state WHEN 'pending' THEN 0 WHEN 'failed' THEN 11 ELSE 1 END,
    s.at,
    s.at,
    s.at,
    'worker-' || n % 3,
    CASE WHEN s.state NOT IN ('pending', 'sending') THEN s.at + (5 + n * 37 % 400) * interval '1 ms' END,
    CASE WHEN s.state = 'skipped' THEN 'superseded' END,
    CASE WHEN s.state = 'skipped' THEN n + 5 END,
    CASE WHEN s.state = 'failed' THEN (
        ARRAY['550 5.1.1 user' || n || '@example.org unknown', '550 5.7.1 not accepted',
              'HTTP 410 from shop' || n % 9 || '.example.org', 'the number +15550' || 100000 + n || ' is not in use']
    )[1 + n % 4] END
FROM (
    SELECT
        i AS n,
        now() - (10000 - i) * interval '3 s' - (sin(i / 40.0) + 1) * interval '20 s' AS at,
        CASE
            WHEN i > 9990 THEN 'sending'
            WHEN i > 9960 THEN 'pending'
            WHEN i % 23 = 0 THEN 'failed'
            WHEN i % 31 = 0 THEN 'skipped'
            WHEN i % 151 = 0 THEN 'cancelled'
            ELSE 'sent'
        END AS state
    FROM generate_series(1, 10000) AS i
) AS s;

INSERT INTO pgoutbox.claim (claimed_at, lease_expires_at, queue, worker, ids)
SELECT m.claimed_at, now() + interval '50 s', m.queue, m.worker, array_agg(m.id)
FROM pgoutbox.message_live AS m
WHERE m.state = 'sending'
GROUP BY m.claimed_at, m.queue, m.worker;

INSERT INTO pgoutbox.message (
    id, topic, queue, destination, payload, headers, state, dedupe_key, attempt_count, created_at, available_at,
    claimed_at, worker, finished_at, last_error
) VALUES (
    10001, 'webhook.order', 'webhooks', 'https://shop3.example.org/hook',
    '{"order": 4711, "total": "59.90", "customer": {"name": "Ada", "password": "hidden here"}}',
    '{"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}',
    'failed', 'order-4711', 4, now() - interval '12 min', now() - interval '12 min', now() - interval '4 min',
    'worker-1', now() - interval '3 min', 'HTTP 410 from shop3.example.org: gone'
);

UPDATE pgoutbox.message
SET attempts = (
    SELECT jsonb_agg((
        n,
        1,
        CASE WHEN n = 4 THEN 'failed' ELSE 'retry' END,
        'worker-' || n % 3,
        now() - (13 - 2 * n) * interval '1 min',
        now() - (13 - 2 * n) * interval '1 min' + n * interval '210 ms',
        CASE WHEN n = 4 THEN 'HTTP 410 from shop3.example.org: gone' ELSE 'HTTP 503 from shop3.example.org' END,
        NULL,
        NULL,
        NULL
    )::pgoutbox.attempt ORDER BY n)
    FROM generate_series(1, 4) AS n
)
WHERE id = 10001;

INSERT INTO pgoutbox.queue (
    name, paused_at, resume_at, rate_count, rate_seconds, burst, tokens, tokens_at, max_in_flight
) VALUES
    ('mail', NULL, NULL, 20, 1, 5, 5, now(), NULL),
    ('webhooks', now() - interval '3 min', now() + interval '27 min', NULL, NULL, NULL, NULL, NULL, 10);

INSERT INTO pgoutbox.breaker (key, opened_at, retry_at, cooldown_seconds, worker, last_error)
VALUES ('host:shop3.example.org', now() - interval '6 min', now() + interval '40 s', 60, 'worker-1',
        'HTTP 503 from shop3.example.org');

INSERT INTO pgoutbox.audit (
    acted_at, act_id, message_count, actor, db_role, origin, action, queue, message_ids, details
)
SELECT
    now() - a.minutes * interval '1 min', md5(a.minutes::text)::uuid, a.message_count, a.actor, 'outbox_operator',
    a.origin, a.action, a.queue, a.message_ids, a.details
FROM (VALUES
    (40, 2, 'grace', 'cli ops1', 'cancel', NULL, '{17,18}'::bigint[], NULL::jsonb),
    (25, 312, 'ada', 'web 192.0.2.7', 'redrive', NULL, NULL, '{"state": "failed", "topic": "mail.receipt"}'),
    (3, NULL, 'ada', 'web 192.0.2.7', 'pause', 'webhooks', NULL, '{"until": "in half an hour"}'),
    (1, 1, 'ada', 'web 192.0.2.7', 'redrive', NULL, ARRAY[10001::bigint], NULL)
) AS a (minutes, message_count, actor, origin, action, queue, message_ids, details);

SELECT setval('pgoutbox.message_id_seq', 10000);
