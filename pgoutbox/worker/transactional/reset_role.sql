-- Return to the login and the role of the worker in the transaction of a handler, which may have set others.
SET SESSION AUTHORIZATION DEFAULT
