-- Delete claims whose attempts have ended, if no finish does it soon.
\ir _ended_claims.sql
