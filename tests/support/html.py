"""Pages as elements."""

from __future__ import annotations

from html.parser import HTMLParser

VOID = {"meta", "col", "img", "br", "link", "input"}


class Page(HTMLParser):
    """A page as elements with attributes and the text inside each token, table cell and title."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[tuple[str, dict[str, str | None], list[str]]] = []
        self.elements: list[tuple[str, dict[str, str | None], str]] = []
        self.feed(html)
        assert not self.open, [tag for tag, _, _ in self.open]

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag in VOID:
            self.elements.append((tag, dict(attributes), ""))
        else:
            self.open.append((tag, dict(attributes), []))

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attributes), ""))

    def handle_data(self, data: str) -> None:
        for _, _, text in self.open:
            text.append(data)

    def handle_endtag(self, tag: str) -> None:
        name, attributes, text = self.open.pop()
        assert name == tag, f"</{tag}> closes <{name}>"
        self.elements.append((name, attributes, "".join(text)))

    def of(self, name: str, css: str | None = None) -> list[tuple[dict[str, str | None], str]]:
        return [
            (attributes, text)
            for tag, attributes, text in self.elements
            if tag == name and (css is None or css in (attributes.get("class") or "").split())
        ]
