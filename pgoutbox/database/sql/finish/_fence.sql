-- The fence: an attempt may write its row while the row is in flight in this attempt.
AND m.state = 'sending'
\ir _attempt.sql
