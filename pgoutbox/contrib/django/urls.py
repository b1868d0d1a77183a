"""The URLs of the dashboard: `path("outbox/", include("pgoutbox.contrib.django.urls"))`."""

from __future__ import annotations

from django.urls import path

from pgoutbox.contrib.django.dashboard import dashboard

app_name = "pgoutbox"
urlpatterns = [path("", dashboard, name="dashboard"), path("<path:path>", dashboard)]
