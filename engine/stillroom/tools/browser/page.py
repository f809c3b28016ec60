"""Renders a web page for a model in parts: its text, and its links, buttons and fields.

All of this is untrusted, so it is put between two marks that no page can know in advance.
"""

from dataclasses import dataclass, field

import msgspec
from playwright.async_api import CDPSession, Page
from playwright.async_api import Error as PlaywrightError

from stillroom import bounds
from stillroom.fences import fenced, new_mark, printable, warning

_MAX_HTML_CHARS = bounds.PAGE_HTML.limit
_MAX_TEXT_CHARS = bounds.PAGE_TEXT.limit
_MAX_ELEMENTS = bounds.PAGE_ELEMENTS.limit
# A main content shorter than this is likely a banner and not the page's text.
_MIN_MAIN_CHARS = 200
REF_ATTRIBUTE = "data-stillroom-ref"

# The share of a reply's characters that is for the text; the rest is for the list of elements.
_TEXT_SHARE = 0.75
_ATTEMPTS = 3

# Runs in an isolated world, where a page can change neither it nor the built-ins that it calls.
# Properties of `document` are read from its prototype, since a form field called `body` would
# hide `document.body`.
_SNAPSHOT = """
(limits => {
  const get = name =>
    Object.getOwnPropertyDescriptor(Document.prototype, name).get.call(document);
  const all = selector => Document.prototype.querySelectorAll.call(document, selector);
  const tidy = (text, most) => (text || '').replace(/\\s+/g, ' ').trim().slice(0, most);
  const root = get('documentElement'), body = get('body');
  const navigation = performance.getEntriesByType('navigation')[0];
  const page = {
    url: location.href.slice(0, 2000),
    title: tidy(get('title'), 300),
    status: navigation && navigation.responseStatus || 0,
    html: root ? root.outerHTML.slice(0, limits.html) : '',
    text: body ? (body.innerText || body.textContent || '').slice(0, limits.text) : '',
    elements: [],
  };
  for (const old of all(`[${limits.attribute}]`)) old.removeAttribute(limits.attribute);
  const isShown = element => element.getClientRects().length > 0 &&
    getComputedStyle(element).visibility === 'visible' && !element.disabled;
  const kindOf = element => {
    const tag = element.tagName.toLowerCase(), role = element.getAttribute('role');
    if (tag === 'a') return 'link';
    if (tag === 'input') {
      const type = element.type;
      return ['submit', 'button', 'image', 'reset'].includes(type) ? 'button' : type;
    }
    if (tag === 'textarea' || element.isContentEditable) return 'text';
    if (tag === 'select') return 'select';
    return role === 'link' ? 'link' : 'button';
  };
  const nameOf = element => {
    const image = element.querySelector('img[alt]');
    const label = element.labels && element.labels[0];
    const isField = element.tagName === 'INPUT' || element.tagName === 'SELECT' ||
      element.tagName === 'TEXTAREA';
    const isButton = element.tagName === 'INPUT' && kindOf(element) === 'button';
    return tidy(element.getAttribute('aria-label'), 120) ||
      tidy(label && label.innerText, 120) || tidy(isButton && element.value, 120) ||
      tidy(!isField && element.innerText, 120) || tidy(image && image.alt, 120) ||
      tidy(element.getAttribute('placeholder'), 120) || tidy(element.title, 120) ||
      tidy(element.getAttribute('name'), 120);
  };
  const detailOf = (element, kind) => {
    if (kind === 'link') return tidy(element.href, 200);
    if (kind === 'select')
      return tidy('of ' + Array.from(element.options).slice(0, 20).map(
        option => (option.selected ? '*' : '') + tidy(option.label, 40)).join(' | '), 400);
    if (kind === 'checkbox' || kind === 'radio') return element.checked ? 'checked' : '';
    if (kind === 'password' || kind === 'button' || kind === 'file') return '';
    return element.value ? 'holds ' + tidy(element.value, 120) : '';
  };
  const selector = 'a[href],button,input:not([type=hidden]),textarea,select,summary,' +
    '[role=button],[role=link],[role=tab],[role=menuitem],[onclick],[contenteditable=true]';
  for (const element of all(selector)) {
    if (page.elements.length >= limits.elements) break;
    if (!isShown(element)) continue;
    const kind = kindOf(element);
    page.elements.push({kind, name: nameOf(element), detail: detailOf(element, kind)});
    element.setAttribute(limits.attribute, String(page.elements.length));
  }
  return page;
})(%s)
"""


class Element(msgspec.Struct, frozen=True, kw_only=True):
    """A link, button or field. Its number is its position in the list, from 1."""

    kind: str
    name: str
    detail: str

    def line(self, ref: int) -> str:
        """Returns the element's line in the list."""
        return " ".join(filter(None, (f"[{ref}]", self.kind, f'"{self.name}"', self.detail)))


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a page at one moment."""

    url: str
    title: str
    status: int
    """The HTTP status of the response; 0 if unknown."""
    html: str
    text: str
    elements: list[Element]


async def take_snapshot(page: Page) -> Snapshot:
    """Reads the page's current state and numbers its elements.

    Raises playwright's Error if the page cannot be read.
    """
    for attempt in range(_ATTEMPTS):
        try:
            return await _take_snapshot(page)
        except PlaywrightError:
            # Reading fails while the browser navigates to another page.
            if attempt == _ATTEMPTS - 1 or page.is_closed():
                raise
            await page.wait_for_load_state("domcontentloaded")
    raise AssertionError("unreachable")


async def _take_snapshot(page: Page) -> Snapshot:
    """Runs the snapshot script in an isolated world of the page."""
    limits = {
        "html": _MAX_HTML_CHARS,
        "text": _MAX_TEXT_CHARS,
        "elements": _MAX_ELEMENTS,
        "attribute": REF_ATTRIBUTE,
    }
    cdp: CDPSession = await page.context.new_cdp_session(page)
    tree = await cdp.send("Page.getFrameTree")
    world = await cdp.send(
        "Page.createIsolatedWorld",
        {"frameId": tree["frameTree"]["frame"]["id"], "worldName": "stillroom"},
    )
    reply = await cdp.send(
        "Runtime.evaluate",
        {
            "expression": _SNAPSHOT % msgspec.json.encode(limits).decode(),
            "contextId": world["executionContextId"],
            "returnByValue": True,
        },
    )
    await cdp.detach()
    try:
        return msgspec.convert(reply["result"].get("value"), type=Snapshot)
    except msgspec.ValidationError as error:
        raise PlaywrightError(f"the page cannot be read: {error}") from error


@dataclass(frozen=True, slots=True)
class Document:
    """A page's text and elements in parts of a bounded length."""

    url: str
    title: str
    texts: list[str]
    """The text of each part."""
    lists: list[str]
    """The list of elements of each part; there may be fewer or more lists than texts."""
    notes: list[str] = field(default_factory=list[str])
    """Notes by the tool itself, shown outside the marks."""

    @property
    def num_parts(self) -> int:
        """The number of parts, at least 1."""
        return max(len(self.texts), len(self.lists), 1)

    def render_part(self, number: int) -> str:
        """Returns one part between two marks; parts are numbered from 1."""
        mark = new_mark()
        lines = [
            f"Title: {self.title}",
            f"URL: {self.url}",
            "",
            _part_at(self.texts, number) or "(no text)",
        ]
        listed = _part_at(self.lists, number)
        if listed:
            lines += ["", "Links, buttons and fields:", listed]
        shown = fenced("\n".join(lines), mark, name="page")
        lines = [warning(mark, writer="a website"), *self.notes, shown]
        if self.num_parts > 1:
            lines.append(f"This is part {number} of {self.num_parts}.")
            if number < self.num_parts:
                lines.append(f"browse_read with page={number + 1} shows the next part.")
        return "\n".join(lines)


def make_document(snapshot: Snapshot, main_text: str, *, max_chars: int) -> Document:
    """Splits a page into parts whose text and list together have at most `max_chars`.

    `main_text` is the page's extracted main content. If it is very short, the whole text of the
    page is used instead.
    """
    text = main_text.strip()
    full_text = snapshot.text.strip()
    if len(text) < _MIN_MAIN_CHARS and len(text) < len(full_text) / 2:
        text = full_text
    text = printable(text)
    listed = printable("\n".join(e.line(n) for n, e in enumerate(snapshot.elements, start=1)))
    list_chars = min(len(listed), max(int(max_chars * (1 - _TEXT_SHARE)), max_chars - len(text)))
    notes: list[str] = []
    if snapshot.status >= 400:
        notes.append(f"The server returned HTTP status {snapshot.status}.")
    return Document(
        url=printable(snapshot.url),
        title=printable(snapshot.title),
        texts=split_text(text, max(max_chars - list_chars, 1)),
        lists=split_text(listed, max(list_chars, 1)),
        notes=notes,
    )


def split_text(text: str, max_chars: int) -> list[str]:
    """Splits a text at line ends if possible, else anywhere, into parts of at most `max_chars`."""
    parts: list[str] = []
    start = 0
    while len(text) - start > max_chars:
        # The search begins after `start`, so that no part is empty.
        end = text.rfind("\n", start + max(max_chars // 2, 1), start + max_chars)
        if end < 0:
            end = start + max_chars
        parts.append(text[start:end].strip("\n"))
        start = end
    last = text[start:].strip("\n")
    return [*parts, last] if last else parts


def _part_at(parts: list[str], number: int) -> str:
    return parts[number - 1] if number <= len(parts) else ""
