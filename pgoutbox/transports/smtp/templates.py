"""E-mail from templates: three files of one name give the subject, the text and the HTML.

Missing data is `Permanent`, because the next attempt would lack it too. A problem that a deployment fixes is
`Transient`.
"""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pgoutbox.errors import ConfigurationError, NotReadyError, require_extra
from pgoutbox.message import Permanent, Transient

if TYPE_CHECKING:
    from collections.abc import Mapping
    from os import PathLike

    import jinja2

_SUFFIXES = frozenset({".txt", ".html"})


class RenderedTemplates(NamedTuple):
    """The parts of one e-mail."""

    subject: str
    text: str | None
    html: str | None


class Templates:
    """The Jinja templates of an application's e-mail, in a directory, or in a directory of a package.

    Create it when the application starts: a directory that does not exist raises a `ConfigurationError` that names it.

        templates = Templates(package="club")

        @outbox.handler("mail.welcome")
        async def welcome(message: Message, ctx: Context) -> Email:
            return Email.from_template(templates, "welcome", {"name": "Ada"})
    """

    def __init__(self, directory: str | PathLike[str] = "templates", *, package: str | None = None) -> None:
        require_extra("jinja2", "e-mail from templates", "templates")
        import jinja2

        loader: jinja2.BaseLoader
        if package is None:
            if not Path(directory).is_dir():
                raise NotReadyError(f"templates: {str(directory)!r} is not a directory")
            loader = jinja2.FileSystemLoader(directory)
        else:
            try:
                loader = jinja2.PackageLoader(package, str(directory))
            except (ImportError, ValueError):
                raise ConfigurationError(
                    f"templates: there is no package {package!r} with a directory {str(directory)!r}"
                ) from None
        self._environment = jinja2.Environment(
            loader=loader,
            autoescape=jinja2.select_autoescape(["html"]),
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )

    @property
    def environment(self) -> jinja2.Environment:
        """Jinja's own object, to add filters and globals to before the first e-mail."""
        return self._environment

    def render(self, name: str, context: Mapping[str, object]) -> RenderedTemplates:
        """Render `NAME.subject.txt`, and `NAME.txt`, `NAME.html` or both, with the context.

        Values are escaped only in `.html`. A name that the context does not have is `Permanent`, with the template, the
        line and the name. A subject of several lines is also `Permanent`. A missing or unreadable template is
        `Transient`: the messages wait for a deployment with the template.
        """
        subject_template, *bodies = (self._find(f"{name}{suffix}") for suffix in (".subject.txt", ".txt", ".html"))
        if subject_template is None:
            raise Transient(f"template {name}.subject.txt: not found")
        if bodies == [None, None]:
            raise Transient(f"template {name}.txt: not found, and {name}.html neither")
        subject = _render(subject_template, context).strip()
        if len(subject.splitlines()) != 1:
            raise Permanent(f"template {name}.subject.txt: gives no subject of one line")
        text, html = (None if template is None else _render(template, context) for template in bodies)
        return RenderedTemplates(subject, text, html)

    def _find(self, file: str) -> jinja2.Template | None:
        import jinja2

        try:
            return self._environment.get_template(file)
        except jinja2.TemplateNotFound:
            return None
        except jinja2.TemplateSyntaxError as error:
            raise _unreadable(error) from None


def _render(template: jinja2.Template, context: Mapping[str, object]) -> str:
    import jinja2

    try:
        return template.render(context)
    except jinja2.UndefinedError as error:
        raise Permanent(f"template {template.name}: {_place(error, template.name)}{error.message}") from None
    except jinja2.TemplateNotFound as error:
        raise Transient(f"template {template.name}: needs {error.name}, which is not found") from None
    except jinja2.TemplateSyntaxError as error:
        raise _unreadable(error) from None


def _unreadable(error: jinja2.TemplateSyntaxError) -> Transient:
    return Transient(f"template {error.name}: line {error.lineno}: {error.message}")


def _place(error: Exception, name: str | None) -> str:
    """Return the place of the error. Jinja rewrites tracebacks so that they contain the lines of templates."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if path.suffix in _SUFFIXES:
            other = "" if path.name == Path(name or "").name else f"{path.name}, "
            return f"{other}line {frame.lineno}: "
    return ""
