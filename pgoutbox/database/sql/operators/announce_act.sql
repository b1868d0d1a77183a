-- Name the act of an operator. The functions and triggers of the schema record it under this name, until the transaction
-- ends.
SELECT pgoutbox.announce_act(%(actor)s::text, %(origin)s::text, %(stated)s::jsonb, %(act_id)s::uuid)
