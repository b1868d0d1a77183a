"""A page of HTML as the tests read it."""

from __future__ import annotations

from dataclasses import dataclass, field
from html.parser import HTMLParser


@dataclass
class Form:
    """A form, and the values with which it is sent as it stands."""

    action: str
    fields: dict[str, str] = field(default_factory=dict)


class Page(HTMLParser):
    """Parse a page: its elements with their attributes, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.forms: list[Form] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in {"a", "bdi", "small", "span", "strong"}:
            self.text += " "
        given = dict(attrs)
        self.elements.append((tag, given))
        if tag == "form":
            self.forms.append(Form(given.get("action") or ""))
        elif tag == "input" and self.forms and given.get("name") and given.get("type") != "checkbox":
            self.forms[-1].fields[str(given["name"])] = given.get("value") or ""

    def handle_data(self, data: str) -> None:
        self.text += data

    @property
    def words(self) -> str:
        """Return the text with single spaces."""
        return " ".join(self.text.split())

    def values(self, tag: str, attribute: str) -> list[str]:
        """Return this attribute of all such elements."""
        return [value for name, attrs in self.elements if name == tag and (value := attrs.get(attribute)) is not None]
