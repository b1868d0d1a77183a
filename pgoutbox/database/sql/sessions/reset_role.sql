-- Return to the role of the worker in the transaction of a handler, which may have set another one.
RESET ROLE
