"""Tests e-mail from templates: the result of the three files, and the errors."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from pgoutbox import Attachment, Email, Permanent, Templates, Transient
from pgoutbox.errors import ConfigurationError

if TYPE_CHECKING:
    from pathlib import Path

WELCOME = {
    "welcome.subject.txt": "Welcome, {{ name }}\n",
    "welcome.txt": "Hello {{ name }},\n{% if guests %}\nbring them: {{ guests | join(', ') }}\n{% endif %}\nBye.\n",
    "welcome.html": '{% extends "layout.html" %}\n{% block body %}<p>Hello {{ name }}{% endblock %}\n',
    "layout.html": "<body>{% block body %}{% endblock %}</body>\n",
}
CONTEXT = {"name": "Ann & <b>Bob</b>", "guests": ["Cid", "Dee"]}


def templates_of(directory: Path, files: dict[str, str]) -> Templates:
    for name, text in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Templates(directory)


def refusal(templates: Templates, kind: type[Permanent | Transient], **context: object) -> str:
    with pytest.raises((Permanent, Transient)) as caught:
        Email.from_template(templates, "welcome", context)
    assert isinstance(caught.value, kind)
    return caught.value.error


def test_three_files_give_subject_text_and_html_and_only_html_is_escaped(tmp_path: Path) -> None:
    assert Email.from_template(templates_of(tmp_path, WELCOME), "welcome", CONTEXT) == Email(
        subject="Welcome, Ann & <b>Bob</b>",
        text="Hello Ann & <b>Bob</b>,\nbring them: Cid, Dee\nBye.",
        html="<body><p>Hello Ann &amp; &lt;b&gt;Bob&lt;/b&gt;</body>",
    )


def test_other_fields_of_an_email_are_passed_on(tmp_path: Path) -> None:
    ticket = Attachment("ticket.pdf", b"%PDF")
    email = Email.from_template(
        templates_of(tmp_path, WELCOME),
        "welcome",
        CONTEXT,
        to="ann@example.com",
        sender="club@example.org",
        cc="bob@example.com",
        bcc="cid@example.com",
        reply_to="help@example.org",
        headers={"X-Tag": "1"},
        attachments=[ticket],
    )
    assert (email.to, email.sender, email.cc, email.bcc) == (
        "ann@example.com", "club@example.org", "bob@example.com", "cid@example.com",
    )  # fmt: skip
    assert (email.reply_to, email.headers, email.attachments) == ("help@example.org", {"X-Tag": "1"}, [ticket])


@pytest.mark.parametrize(("kind", "text", "html"), [("txt", "Hello Ann", None), ("html", None, "<p>Ann")])
def test_text_or_html_may_be_missing(tmp_path: Path, kind: str, text: str | None, html: str | None) -> None:
    bodies = {"txt": "Hello {{ name }}", "html": "<p>{{ name }}"}
    templates = templates_of(tmp_path, {"welcome.subject.txt": "Hello", f"welcome.{kind}": bodies[kind]})
    assert Email.from_template(templates, "welcome", {"name": "Ann"}) == Email(subject="Hello", text=text, html=html)


def test_templates_can_be_in_subdirectories(tmp_path: Path) -> None:
    templates = templates_of(tmp_path, {"de/welcome.subject.txt": "Hallo", "de/welcome.txt": "Willkommen"})
    assert Email.from_template(templates, "de/welcome", {}).text == "Willkommen"


def test_templates_can_be_in_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "club_of_templates"
    templates_of(package / "mails", {"welcome.subject.txt": "Hello", "welcome.txt": "Hi"})
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert Email.from_template(Templates("mails", package="club_of_templates"), "welcome", {}).text == "Hi"


@pytest.mark.parametrize(
    ("file", "text", "error"),
    [
        ("welcome.subject.txt", "Dear {{ nmae }}", "template welcome.subject.txt: line 1: 'nmae' is undefined"),
        ("welcome.txt", "Hello\n{{ member.email }}", "template welcome.txt: line 2: 'member' is undefined"),
        ("welcome.txt", "{{ name.first }}", "template welcome.txt: line 1: 'str object' has no attribute 'first'"),
        ("welcome.html", "{% if vip %}x{% endif %}", "template welcome.html: line 1: 'vip' is undefined"),
        ("layout.html", "<body>\n{{ logo }}", "template welcome.html: layout.html, line 2: 'logo' is undefined"),
    ],
)
def test_an_undefined_name_is_permanent_and_named(tmp_path: Path, file: str, text: str, error: str) -> None:
    templates = templates_of(tmp_path, WELCOME | {file: text})
    assert refusal(templates, Permanent, name="Ann", guests=[]) == error


@pytest.mark.parametrize("separator", ["\n", "\r\n", "\r", "\x0b", "\x85", "\u2028"])
def test_a_subject_of_several_lines_is_permanent(tmp_path: Path, separator: str) -> None:
    templates = templates_of(tmp_path, WELCOME)
    error = refusal(templates, Permanent, name=f"Ann{separator}Bcc: eve@example.com", guests=[])
    assert error == "template welcome.subject.txt: gives no subject of one line"


def test_an_empty_subject_is_permanent(tmp_path: Path) -> None:
    templates = templates_of(tmp_path, WELCOME | {"welcome.subject.txt": "{% if False %}x{% endif %}\n"})
    error = refusal(templates, Permanent, name="Ann", guests=[])
    assert error == "template welcome.subject.txt: gives no subject of one line"


@pytest.mark.parametrize(
    ("files", "error"),
    [
        ({}, "template welcome.subject.txt: not found"),
        ({"welcome.txt": "Hi"}, "template welcome.subject.txt: not found"),
        ({"welcome.subject.txt": "Hello"}, "template welcome.txt: not found, and welcome.html neither"),
        (
            {"welcome.subject.txt": "Hello", "welcome.html": '{% extends "layout.html" %}'},
            "template welcome.html: needs layout.html, which is not found",
        ),
        (
            {"welcome.subject.txt": "Hello", "welcome.txt": "Hi\n{% fi %}"},
            "template welcome.txt: line 2: Encountered unknown tag 'fi'.",
        ),
        (
            {"welcome.subject.txt": "Hello", "welcome.txt": '{% include "foot.txt" %}', "foot.txt": "{{"},
            "template foot.txt: line 1: unexpected 'end of template'",
        ),
    ],
)
def test_an_error_that_a_deployment_can_fix_is_transient(tmp_path: Path, files: dict[str, str], error: str) -> None:
    assert refusal(templates_of(tmp_path, files), Transient) == error


def test_a_template_added_by_a_deployment_is_found(tmp_path: Path) -> None:
    templates = templates_of(tmp_path, {})
    refusal(templates, Transient)
    templates_of(tmp_path, WELCOME)
    assert Email.from_template(templates, "welcome", CONTEXT).subject.startswith("Welcome")


def test_a_template_name_cannot_leave_the_directory(tmp_path: Path) -> None:
    templates_of(tmp_path, WELCOME)
    templates = templates_of(tmp_path / "inner", {"other.txt": "Hi"})
    with pytest.raises(Transient, match="not found"):
        Email.from_template(templates, "../welcome", CONTEXT)


def test_the_application_can_add_filters(tmp_path: Path) -> None:
    templates = templates_of(tmp_path, {"welcome.subject.txt": "{{ 5 | euro }}", "welcome.txt": "Hi"})
    templates.environment.filters["euro"] = lambda amount: f"{amount:.2f} €"
    assert Email.from_template(templates, "welcome", {}).subject == "5.00 €"


def test_a_missing_directory_is_named_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no-such-place' is not a directory"):
        Templates(tmp_path / "no-such-place")
    with pytest.raises(ConfigurationError, match="no package 'email' with a directory 'templates'"):
        Templates(package="email")
    with pytest.raises(ConfigurationError, match="no package 'no_such_package' with a directory 'mails'"):
        Templates("mails", package="no_such_package")


@pytest.mark.slow
def test_a_missing_jinja_is_reported_with_its_install_command() -> None:
    program = (
        "import sys; sys.modules['jinja2'] = None\n"
        "from pgoutbox import MissingExtraError, Templates\n"
        "try: Templates('.')\n"
        "except MissingExtraError as error: print(error)\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout == "e-mail from templates needs an optional dependency: pip install 'pgoutbox[templates]'\n"
