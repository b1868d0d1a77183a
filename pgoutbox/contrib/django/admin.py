"""The messages in Django's admin: a list, a page for each, and the acts of operators.

The list searches only the newest `ROWS` messages of the chosen state, so that no page reads millions of rows. Acts have
their own connection and transactions, as always with `Operator`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final, cast

import psycopg
from django import forms
from django.contrib import admin, messages
from django.contrib.admin import helpers
from django.contrib.admin.views.main import ERROR_FLAG
from django.core.exceptions import PermissionDenied
from django.db import connections, transaction
from django.db.models import Q, QuerySet
from django.db.models.expressions import RawSQL
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.utils.text import Truncator

from pgoutbox.contrib.django import conf, outbox
from pgoutbox.contrib.django.models import Message
from pgoutbox.database import sql
from pgoutbox.database.operator_connection import limiting
from pgoutbox.errors import MessageNotFoundError, PgOutboxError
from pgoutbox.message import OWED, PARTITIONS, State
from pgoutbox.operations import ListedMessage, MessageResult, Operator
from pgoutbox.operations.acts import ACTS, ActArguments, ActName
from pgoutbox.text import visible

ROWS: Final = 25_000
_HITS: Final = 1_000
_USED_ROWS: Final = 2_000
_SECONDS: Final = 5
_MOST_RESENT: Final = 1_000  # Each copy has a transaction of its own.
_LINKS: Final = frozenset({"waits_for", "superseded_by", "resend_of", "failure_of"})
# Those that need no more than a reason.
_ACTS: Final = {
    name: act
    for name, act in ACTS.items()
    if all(argument.kind == "text" for argument in act.arguments if argument.required)
}
_DONE: Final = {"requested": "asked to stop"}
_FIRST: Final = """
SELECT m.id FROM pgoutbox.message_view AS m WHERE m.state = ANY (%s)
ORDER BY m.id DESC OFFSET %s LIMIT 1
"""
_IN_FLIGHT: Final = "SELECT v.id FROM pgoutbox.in_flight_view AS v LIMIT 10000"


def _filter(name: str) -> type[admin.SimpleListFilter]:
    class Filter(admin.SimpleListFilter):
        title = parameter_name = name

        def lookups(self, request: HttpRequest, model_admin: admin.ModelAdmin) -> list[tuple[str, str]]:  # noqa: ARG002
            return [(one, one) for one in sorted({*_known(name), *_used(name), self.value() or ""} - {""})]

        def queryset(self, request: HttpRequest, queryset: QuerySet) -> QuerySet:  # noqa: ARG002
            return queryset.filter(**{name: self.value()}) if self.value() else queryset

    return Filter


def _known(name: str) -> set[str]:
    if name == "topic":
        return {*outbox.topics, *outbox.handlers}
    served = {name.partition(":")[0] for name in outbox.default_queues} - {"*"}
    return served | {topic.queue or "default" for topic in outbox.topics.values()}


def _used(name: str) -> set[str]:
    """Return those of the newest messages, of the newest live ones and of the newest failed ones."""
    newest = Message.objects.using(conf.alias()).order_by("-id").values_list(name, flat=True)
    live, failed = newest.filter(state__in=OWED), newest.filter(state=State.FAILED)
    return set(newest[:_USED_ROWS].union(live[:_USED_ROWS], failed[:_USED_ROWS]))


class _ActForm(helpers.ActionForm):
    reason = forms.CharField(label="", required=False, widget=forms.TextInput({"placeholder": "reason"}))


def _action(act: ActName) -> Any:  # noqa: ANN401 - Django has no types
    @admin.action(permissions=["change"], description=f"{act.capitalize()}: {_ACTS[act].says}")
    def action(model_admin: MessageAdmin, request: HttpRequest, queryset: QuerySet) -> None:
        model_admin.act(request, act, list(queryset.values_list("id", flat=True)))

    action.__name__ = act
    return action


def _names_of(topic: str) -> tuple[str, ...]:
    return outbox.settings.redacted_names + (outbox.topics[topic].redact if topic in outbox.topics else ())


def _listed(message: Message) -> ListedMessage:
    names = ListedMessage._fields
    row = ListedMessage(*(getattr(message, name) for name in names if name not in ListedMessage._field_defaults))
    return row.redacted(_names_of(message.topic))


def _visible(value: object) -> object:
    return visible(value) if isinstance(value, str) else value


def _id_of(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 19 else None


@admin.register(Message)
class MessageAdmin(admin.ModelAdmin):
    """With the permission to view, people see messages. To act, and to see payloads, they need the one to change."""

    list_display = ("id", "topic", "state", "reason", "attempts", "created_at", "finished_at", "receiver")
    list_filter = ("state", _filter("topic"), _filter("queue"), "created_at")
    list_per_page = list_max_show_all = 50
    show_full_result_count = False
    show_facets = admin.ShowFacets.NEVER
    ordering = ("-id",)
    search_fields = ("id",)  # `get_search_results` searches.
    search_help_text = f"An id, an owner, or a key of the newest {ROWS:,} messages in this list."
    actions = tuple(_action(act) for act in _ACTS)
    action_form = _ActForm

    class Media:
        """The cards of a phone."""

        css = {"all": ("pgoutbox/admin.css",)}  # noqa: RUF012 - as Django documents it

    def has_add_permission(self, request: HttpRequest, obj: Message | None = None) -> bool:  # noqa: ARG002
        """Only the application enqueues, and only retention deletes."""
        return False

    has_delete_permission = has_add_permission

    def lookup_allowed(self, lookup: str, value: str, request: HttpRequest | None = None) -> bool:  # noqa: ARG002
        """Allow only the filters. Others could guess hidden values letter by letter."""
        return lookup.partition("__")[0] in ("state", "topic", "queue", "created_at")

    def get_queryset(self, request: HttpRequest) -> QuerySet:  # noqa: ARG002
        """Return the messages of the database with the outbox."""
        return Message.objects.using(conf.alias()).order_by(*self.ordering)

    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> HttpResponse:
        """Show the list, in a transaction for the timeout of its statements. An act has its own transactions.

        PostgreSQL stores no NUL, so a filter for one is answered like any other impossible one.
        """
        if any("\0" in value for _, values in request.GET.lists() for value in values):
            return HttpResponseRedirect(f"{request.path}?{ERROR_FLAG}=1")
        if request.method == "POST":
            return super().changelist_view(request, extra_context)
        with transaction.atomic(using=conf.alias()):
            with connections[conf.alias()].cursor() as cursor:
                cursor.execute(sql.PREPARE_PAGE)
                cursor.execute("SELECT set_config('statement_timeout', %s, true)", [f"{_SECONDS}s"])
            return super().changelist_view(request, extra_context)

    def first_id(self, request: HttpRequest) -> int:
        """Return the id from which the list searches."""
        state = request.GET.get("state__exact")
        states = next((few for few in PARTITIONS if state in few), State)
        with connections[conf.alias()].cursor() as cursor:
            cursor.execute(_FIRST, [[one.value for one in states], ROWS - 1])
            return next((first for (first,) in cursor.fetchall()), 0)

    def get_search_results(self, request: HttpRequest, queryset: QuerySet, search_term: str) -> tuple[QuerySet, bool]:
        """Restrict the filtered messages to the newest ones, or to those with this id, owner or key."""
        near = queryset.filter(id__gte=self.first_id(request))
        if request.GET.get("state__exact") == State.SENDING:
            near = queryset.filter(id__in=RawSQL(_IN_FLIGHT, ()))  # noqa: S611 - a constant
        if not (term := search_term.strip()):
            return near, False
        # Each search reads its ids first, so that it uses its own index.
        keyed = near.filter(Q(coalesce_key=term) | Q(dedupe_key=term) | Q(ordering_key=term) | Q(fair_key=term))
        owned = queryset.order_by().filter(owner=term)
        ids = [_id_of(term) or 0]
        for found in (keyed, owned):
            ids += found.values_list("id", flat=True)[:_HITS]
        return queryset.filter(id__in=ids), False

    @admin.display(description="destination")
    def receiver(self, message: Message) -> object:
        """Return the destination without secrets."""
        return _visible(_listed(message).destination)

    def attempts(self, message: Message) -> str:
        """Return the attempts that count, of those that are granted."""
        return _listed(message).attempts

    def reason(self, message: Message) -> str:
        """Return the reason of the last failure or skip, shortened."""
        listed = _listed(message)
        return visible(str(Truncator(listed.why_not_sent or "").chars(80)))

    def change_view(self, request: HttpRequest, object_id: str, *_: Any, **__: Any) -> HttpResponse:  # noqa: ANN401
        """Show one message and its attempts, or do the act of a button."""
        may_act = self.has_change_permission(request)
        if not self.has_view_or_change_permission(request) or (request.method == "POST" and not may_act):
            raise PermissionDenied
        number = _id_of(object_id) or 0
        if request.method == "POST":
            if (act := request.POST.get("act")) in _ACTS:
                self.act(request, act, [number])
            return HttpResponseRedirect(request.get_full_path())
        try:
            with limiting(_SECONDS), Operator(outbox.settings, read_only=True) as operator:
                message, attempts = operator.show_message(number, with_values=may_act)
        except MessageNotFoundError:
            return self._get_obj_does_not_exist_redirect(request, self.opts, object_id)
        names = _names_of(message.topic)
        message, attempts = message.redacted(names), [attempt.redacted(names) for attempt in attempts]
        values = message._asdict() | {"waits": message.why_it_waits}
        for name in ("headers", "payload"):
            if not isinstance(values[name], str | None):
                values[name] = json.dumps(values[name], indent=2, ensure_ascii=False)
        context = {
            **self.admin_site.each_context(request),
            "title": f"Message {number}",
            "original": f"message {number}",
            "opts": self.opts,
            "media": self.media,
            "has_view_permission": True,
            "fields": [(name.replace("_", " "), _visible(value), name in _LINKS) for name, value in values.items()],
            "attempts": [{name: _visible(value) for name, value in one._asdict().items()} for one in attempts],
            "acts": [act for act in _ACTS.values() if may_act and message.state in act.states],
        }
        return TemplateResponse(request, "admin/pgoutbox/message/change_form.html", context)

    def act(self, request: HttpRequest, act: ActName, ids: Sequence[int]) -> None:
        """Do this as the user, and report how many messages changed, and why others did not."""
        if act == "resend" and len(ids) > _MOST_RESENT:
            text = f"select at most {_MOST_RESENT:,} messages to resend, not {len(ids):,}"
            self.message_user(request, text, messages.ERROR)
            return
        asked = {argument.name for argument in _ACTS[act].arguments} & {"reason"}
        changes = cast("ActArguments", {name: request.POST.get(name, "") for name in asked})
        actor, origin = f"django:{request.user.get_username()}", f"admin {request.META.get('REMOTE_ADDR', '')}"
        results: list[MessageResult] = []
        try:
            with limiting(_SECONDS), Operator(outbox.settings, actor=actor, origin=origin) as operator:
                for batch in operator.bulk(act, ids, **changes):
                    results += batch.results
        except (PgOutboxError, psycopg.Error) as error:
            reason = getattr(getattr(error, "diag", None), "message_primary", error) or type(error).__name__
            self.message_user(request, f"{act}: {reason}", messages.ERROR)
        for result, count in Counter(one.result for one in results).items():
            first = next(one for one in results if one.result == result)
            if first.is_done:
                self.message_user(request, f"{count:,} {_DONE.get(result, result)}", messages.SUCCESS)
            else:
                why = f"message {first.id} {first.explanation}"
                self.message_user(request, f"{count:,} left alone: {why}", messages.WARNING)
