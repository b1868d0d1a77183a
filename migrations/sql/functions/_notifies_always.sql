-- Whether every enqueue notifies, also while no worker sleeps. The body is the setting: notify_every_enqueue replaces this
-- function. PostgreSQL puts the constant into the plans that call it, and makes these plans again after a change. So an
-- enqueue reads no row for it.
CREATE FUNCTION pgoutbox._notifies_always()
RETURNS boolean
LANGUAGE sql
STABLE
RETURN false;
