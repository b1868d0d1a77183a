-- Name the act of an operator. The functions and triggers of the schema record it under these names, until the
-- transaction ends.
SELECT
    set_config('pgoutbox.act_id', %(act_id)s::text, true),
    set_config('pgoutbox.act_actor', coalesce(%(actor)s::text, ''), true),
    set_config('pgoutbox.act_origin', coalesce(%(origin)s::text, ''), true),
    set_config('pgoutbox.act_details', coalesce(%(details)s::jsonb::text, ''), true)
