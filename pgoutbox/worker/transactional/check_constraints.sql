-- Check the deferred constraints before COMMIT AND CHAIN: if that is refused, a pooler takes the session back as it is.
SET CONSTRAINTS ALL IMMEDIATE
