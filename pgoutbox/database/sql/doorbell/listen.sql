-- Receive the notifications about new messages.
LISTEN pgoutbox
