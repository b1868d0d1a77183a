-- Receive the doctor's own notification. Not the worker's channel, so that no worker is woken.
LISTEN pgoutbox_doctor
