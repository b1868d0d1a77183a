"""The sign-in page of the dashboard, and signing out."""

from __future__ import annotations

from typing import Final, cast

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from pgoutbox.dashboard.access import Access, check_origin, cookie_of, local_path
from pgoutbox.dashboard.credentials import SESSION
from pgoutbox.dashboard.inputs import read_form
from pgoutbox.dashboard.rendering import ROOT, render
from pgoutbox.dashboard.responses import sentence


async def show(request: Request) -> Response:
    """Show the form."""
    return _page(request, request.query_params.get("next", ""))


async def sign_in(request: Request) -> Response:
    """Begin a session, and end the previous one of this browser."""
    access = _access_of(request)
    check_origin(request, required=True)
    form = await read_form(request)
    onward = form.get("next", "")
    try:
        person = await access.check_secret(request, form.get("secret", ""), name=form.get("name", "").strip())
    except HTTPException as error:
        return _page(request, onward, error=error)
    response = RedirectResponse(f"{request.scope[ROOT]}{local_path(onward)}", status_code=303)
    response.set_cookie(value=access.begin_session(request, person), **cookie_of(request))
    return response


async def sign_out(request: Request) -> Response:
    """End the session."""
    if SESSION not in request.scope:
        raise HTTPException(404)
    _access_of(request).sessions.end(request.scope[SESSION])
    response = RedirectResponse(f"{request.scope[ROOT]}/login", status_code=303)
    response.delete_cookie(**cookie_of(request))
    return response


def _page(request: Request, onward: str, *, error: HTTPException | None = None) -> Response:
    context = {
        "onward": local_path(onward),
        # A browser does not send its session cookie if it follows a link from another site.
        "is_cross_site": request.headers.get("sec-fetch-site") == "cross-site",
        "asks_name": _access_of(request).credentials.has_passwords,
        "error": None if error is None else sentence(error.detail),
    }
    status, headers = (200, None) if error is None else (error.status_code, error.headers)
    return render(request, "login.html", context, status=status, headers=headers)


def _access_of(request: Request) -> Access:
    return cast("Access", request.app.state.access)


PUBLIC_ROUTES: Final = [Route("/login", show), Route("/login", sign_in, methods=["POST"])]
PRIVATE_ROUTES: Final = [Route("/logout", sign_out, methods=["POST"])]
