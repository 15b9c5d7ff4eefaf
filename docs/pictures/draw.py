#!/usr/bin/env python3
"""Draws the pictures of this folder, which the pages show and the crate's documentation includes.

usage: python3 docs/pictures/draw.py [--check]

  --check   write nothing; fail if a picture is not what this script draws

Each is one HTML block in Markdown too: its first line is one whole tag, and no line is empty. Nothing in it has an
id, since several stand in one page. Colours are attributes, so that a picture is whole without its style; the style
only darkens it, for readers who ask for that (in rustdoc by its theme), and every rule begins with a name of ours.
"""
import pathlib
import sys
from html import escape

FOLDER = pathlib.Path(__file__).resolve().parent
WIDTH = 720
# What is painted, by day and by night.
COLOURS = {
    "back": ("#ffffff", "#161b22"),
    "edge": ("#d0d7de", "#3d444d"),
    "text": ("#1f2328", "#e6edf3"),
    "soft": ("#57606a", "#9aa4af"),
    "a": ("#cfe3ff", "#1f3f6e"),
    "a-line": ("#0a5bc4", "#6cb0ff"),
    "b": ("#ffe2c2", "#6b3d10"),
    "b-line": ("#a8500a", "#ffab5e"),
    "s": ("#e4e8ec", "#30363d"),
    "bad": ("#c3202b", "#ff7b72"),
    "good": ("#187a36", "#56d364"),
}


def style():
    """The dark colours: where the system asks for them, or the theme of rustdoc does."""
    rules = []
    for kind in ("fill", "stroke"):
        for name, (_, dark) in COLOURS.items():
            rules.append((f".sg-{kind}-{name}", f"{{{kind}:{dark}}}"))
    dark = "".join(f':root:not([data-theme="light"]) {name}{rule}' for name, rule in rules)
    named = "".join(
        f'[data-theme="dark"] {name},[data-theme="ayu"] {name}{rule}' for name, rule in rules
    )
    return f"<style>@media (prefers-color-scheme:dark){{{dark}}}{named}</style>"


def paint(fill=None, stroke=None):
    """Attributes and classes for what is filled and what is drawn along its edge."""
    names, text = [], ""
    for kind, name in (("fill", fill), ("stroke", stroke)):
        text += f' {kind}="{COLOURS[name][0] if name else "none"}"'
        if name:
            names.append(f"sg-{kind}-{name}")
    return f' class="{" ".join(names)}"{text}'


class Picture:
    def __init__(self, name, height, title, description):
        self.name = name
        self.lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 {WIDTH} {height}" '
            f'width="{WIDTH}" style="max-width:100%;height:auto" font-size="13" '
            f'font-family="system-ui,-apple-system,\'Segoe UI\',Roboto,sans-serif" '
            f'aria-label="{escape(description)}">',
            f"<title>{escape(title)}</title>",
            style(),
        ]
        self.box(0.5, 0.5, WIDTH - 1, height - 1, "back", "edge", 8)

    def box(self, x, y, width, height, fill, stroke=None, round=4, dash=False):
        dashes = ' stroke-dasharray="5 4"' if dash else ""
        self.lines.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="{round}"{paint(fill, stroke)}{dashes}/>'
        )

    def line(self, x1, y1, x2, y2, colour, width=1.5, dash=False):
        dashes = ' stroke-dasharray="5 4"' if dash else ""
        self.lines.append(
            f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}"{paint(None, colour)} stroke-width="{width}"{dashes}/>'
        )

    def text(self, x, y, text, colour="text", anchor="start", size=13, bold=False):
        weight = ' font-weight="600"' if bold else ""
        where = "" if anchor == "start" else f' text-anchor="{anchor}"'
        big = "" if size == 13 else f' font-size="{size}"'
        self.lines.append(f'<text x="{x}" y="{y}"{where}{big}{weight}{paint(colour)}>{escape(text)}</text>')

    def texts(self, x, y, lines, colour="text", anchor="start", size=12, step=16):
        for number, line in enumerate(lines):
            self.text(x, y + step * number, line, colour, anchor, size)

    def arrow(self, x1, x2, y, colour, label="", dash=False, below=False, at=None):
        """A message, from left to right or from right to left, with what it says, in its middle or `at` this x."""
        tip = 7 if x2 > x1 else -7
        self.line(x1, y, x2 - tip, y, colour, 1.6, dash)
        self.lines.append(f'<polygon points="{x2},{y} {x2 - tip},{y - 4} {x2 - tip},{y + 4}"{paint(colour)}/>')
        if label:
            middle = (x1 + x2) / 2 if at is None else at
            self.text(middle, y + (15 if below else -6), label, "text", "middle", 12)

    def cross(self, x, y):
        for slope in (6, -6):
            self.line(x - 6, y - slope, x + 6, y + slope, "bad", 2.5)

    def lanes(self, lanes, top, bottom):
        for x, (name, under), fill, stroke in lanes:
            self.box(x - 92, top, 184, 40, fill, stroke)
            self.text(x, top + 17, name, "text", "middle", bold=True)
            self.text(x, top + 33, under, "soft", "middle", 11)
            self.line(x, top + 40, x, bottom, "edge")

    def write(self):
        return "\n".join(self.lines + ["</svg>"]) + "\n"


def lease():
    p = Picture(
        "lease",
        400,
        "The life of a lease",
        "The life of a lease: granted for 30 seconds, renewed every 10, deleted when it is released; when its holder "
        "dies, nobody renews it, and a second after its end others may have the key, with the next fence.",
    )

    def at(seconds):
        return 34 + seconds * 14.2

    def axis(y):
        p.line(at(0), y, at(46), y, "edge")
        for seconds in (0, 10, 20, 30, 40):
            p.line(at(seconds), y, at(seconds), y + 5, "soft", 1)
            p.text(at(seconds), y + 18, f"{seconds} s", "soft", "middle", 11)

    p.text(34, 30, "Released", bold=True)
    y = 66
    p.texts(at(0), y - 10, ["lock(): granted"], "a-line")
    p.texts(at(10), y - 10, ["renewed"], "a-line", "middle")
    p.texts(at(20), y - 10, ["renewed"], "a-line", "middle")
    p.texts(at(26), y - 10, ["drop(guard): the row is deleted"], "a-line")
    p.box(at(0), y, at(26) - at(0), 28, "a", "a-line")
    p.text(at(0) + 10, y + 19, "held by A, fence 7")
    p.box(at(26), y, at(46) - at(26), 28, "back", "edge", dash=True)
    p.text(at(36), y + 19, "free at once", "soft", "middle")
    for seconds in (10, 20):
        p.line(at(seconds), y - 4, at(seconds), y + 28, "a-line")
    for number, start in enumerate((0, 10, 20)):
        level = y + 38 + 10 * number
        end = min(start + 30, 46)
        p.line(at(start), level, at(end), level, "a-line", 1.5, dash=start == 20)
        if start < 20:
            p.line(at(end), level - 4, at(end), level + 4, "a-line", 2)
    axis(y + 88)
    p.texts(at(0), y + 78, ["↑ until when the lease lasts, unless it is renewed"], "soft", size=11)

    p.line(20, 200, WIDTH - 20, 200, "edge", 1)
    p.text(34, 226, "Its holder dies, or hangs, or is cut off", bold=True)
    y = 270
    p.texts(at(0), y - 10, ["granted"], "a-line")
    p.texts(at(10), y - 10, ["renewed"], "a-line", "middle")
    p.box(at(0), y, at(15) - at(0), 28, "a", "a-line")
    p.text(at(0) + 10, y + 19, "held by A, fence 7")
    p.line(at(10), y - 4, at(10), y + 28, "a-line")
    p.box(at(15), y, at(40) - at(15), 28, "s", "a-line", dash=True)
    p.text(at(27.5), y + 19, "nobody renews it; others still see it held", "soft", "middle")
    p.cross(at(15), y + 14)
    p.box(at(40), y, at(41) - at(40), 28, "s", "soft", 0)
    p.box(at(41), y, at(46) - at(41), 28, "b", "b-line")
    p.text(at(43.5), y + 19, "B, 8", "text", "middle")
    p.texts(at(41), y - 26, ["others may be granted,", "with fence 8"], "b-line", "middle")
    p.line(at(40), y + 28, at(40), y + 44, "soft")
    p.texts(at(40) - 6, y + 44, ["30 s after the last renewal: A, if it runs, knows that the lock is lost"], "soft", "end", 11)
    p.texts(at(40) + 8, y + 44, ["+ 1 s of tolerance"], "soft", size=11)
    axis(y + 66)
    p.texts(34, y + 112, ["Until when a lease lasts is decided by the server's clock alone."], "soft", size=12)
    return p


def take_over():
    p = Picture(
        "takeover",
        540,
        "A takeover",
        "A takeover: process A holds the key and is paused; nobody renews its lease; process B asks, waits, and is "
        "granted the key under the next fence; when A wakes up, it knows that its lock is lost.",
    )
    a, s, b = 132, 368, 604
    p.lanes(
        [
            (a, ("process A", "holder"), "a", "a-line"),
            (s, ("PostgreSQL", "the row of the key"), "s", "soft"),
            (b, ("process B", "waiter"), "b", "b-line"),
        ],
        20,
        520,
    )
    p.box(s - 5, 92, 10, 270, "a", "a-line", 2)
    p.box(s - 5, 362, 10, 24, "s", "soft", 2)
    p.box(s - 5, 414, 10, 106, "b", "b-line", 2)
    p.arrow(a, s - 5, 92, "a-line", 'lock("k")')
    p.arrow(s - 5, a, 114, "a-line", "granted, fence 7, 30 s", dash=True, below=True)
    p.arrow(a, s - 5, 160, "a-line", "renew, every 10 s")
    p.arrow(s - 5, a, 182, "a-line", "30 s from now", dash=True, below=True)
    p.box(a - 5, 212, 10, 246, "s", "bad", 2, dash=True)
    p.texts(a - 14, 232, ["paused:", "a debugger,", "a frozen VM,", "a laptop", "asleep"], "bad", "end")
    p.arrow(b, s + 5, 232, "b-line", 'lock("k")')
    p.arrow(s + 5, b, 254, "b-line", "held: wait, look again", dash=True, below=True)
    p.line(a - 9, 352, a + 9, 352, "a-line", 2)
    p.texts(a + 14, 306, ["30 s after it sent its last", "confirmed renewal, A's own", "clock says: lost. If it ran,", "lost() would fire now."], "a-line")
    p.texts(s + 14, 354, ["30 s after that renewal"], "soft", size=11)
    p.texts(s + 14, 378, ["1 s of tolerance, for everyone"], "soft", size=11)
    p.arrow(b, s + 5, 414, "b-line", "tries again")
    p.arrow(s + 5, b - 5, 436, "b-line", "granted, fence 8", dash=True, below=True)
    p.texts(a + 14, 474, ["A wakes up: is_held() is false,", "lost() fires; a fenced transaction", "under fence 7 is refused."], "a-line")
    p.texts(b - 14, 492, ["B works"], "b-line", "end")
    p.box(b - 5, 436, 10, 84, "b", "b-line", 2)
    return p


def fenced():
    p = Picture(
        "fenced-transaction",
        640,
        "A fenced transaction, in time and too late",
        "A fenced transaction. In time: while A's transaction is open, nobody newer is granted the key, and B has it "
        "after the commit. Too late: B was granted fence 42, so A's fence_transaction fails, and its commit is "
        "answered with a rollback.",
    )
    a, s, b = 132, 368, 604
    p.lanes(
        [
            (a, ("process A", "holds fence 41"), "a", "a-line"),
            (s, ("PostgreSQL", "locks and data"), "s", "soft"),
            (b, ("process B", "wants the same key"), "b", "b-line"),
        ],
        20,
        620,
    )
    p.text(20, 92, "In time", "good", bold=True)
    p.arrow(a, s - 5, 122, "a-line", "BEGIN, fence_transaction()")
    p.arrow(s - 5, a, 144, "a-line", "fence 41 is the newest", dash=True, below=True)
    p.box(s - 5, 122, 10, 142, "a", "a-line", 2)
    p.texts(a - 14, 190, ["reads, writes;", "may be paused"], "a-line", "end")
    p.arrow(b, s + 5, 172, "b-line", 'lock("k")')
    p.arrow(s + 5, b, 194, "b-line", "held, even if A's lease is over", dash=True, below=True)
    p.arrow(a, s - 5, 242, "a-line", "COMMIT")
    p.arrow(s - 5, a, 264, "a-line", "committed", dash=True, below=True)
    p.arrow(b, s, 284, "b-line", "tries again")
    p.arrow(s, b, 306, "b-line", "granted, fence 42", dash=True, below=True)
    p.texts(s - 14, 310, ["(A's lease is released or over)"], "soft", "end", 11)

    p.line(20, 342, WIDTH - 20, 342, "edge", 1)
    p.text(20, 370, "Too late", "bad", bold=True)
    p.box(a - 5, 384, 10, 76, "s", "bad", 2, dash=True)
    p.texts(a - 14, 404, ["paused until", "its lease", "is over"], "bad", "end")
    p.arrow(b, s, 400, "b-line", 'lock("k")')
    p.arrow(s, b, 422, "b-line", "granted, fence 42", dash=True, below=True)
    p.arrow(a, s, 478, "a-line", "BEGIN, fence_transaction()")
    p.arrow(s, a, 500, "bad", "error: Aborted", dash=True, below=True)
    p.arrow(a, s, 552, "a-line", "COMMIT, if A goes on all the same")
    p.arrow(s, a, 574, "bad", "ROLLBACK", dash=True, below=True)
    p.texts(s + 14, 482, ["41 is not the newest any more: the", "statement fails in the server, and", "with it the whole transaction"], "soft")
    p.texts(s + 14, 578, ["nothing of A's was written"], "soft")
    return p


def lock():
    p = Picture(
        "lock",
        626,
        "One lock(): threads and messages",
        "One lock() and its release: the calling thread waits for its turn in the process, sends one message to take "
        "the key and one to let it go; a worker thread renews all locks of the client in one message; a timer thread "
        "fires lost() at the deadline if no renewal was confirmed.",
    )
    t, w, s = 132, 368, 604
    left, right = (t + w) / 2, (w + s) / 2
    p.lanes(
        [
            (t, ("your thread", "lock(), then your code"), "a", "a-line"),
            (w, ("threads of the client", "worker, timer, listener"), "b", "b-line"),
            (s, ("PostgreSQL", "two tables"), "s", "soft"),
        ],
        20,
        606,
    )
    p.texts(t + 14, 84, ["its turn in this process: first come,", "first served; the others ask nothing"], "a-line", size=11, step=14)
    p.arrow(t, s, 126, "a-line", "acquire: one message", at=left)
    p.arrow(s, t + 5, 148, "a-line", "held by somebody else", dash=True, below=True, at=left)
    p.box(t - 5, 148, 10, 86, "s", "soft", 2, dash=True)
    p.texts(t - 14, 176, ["sleeps, and", "looks again", "5 to 250 ms", "apart"], "soft", "end", 11, 14)
    p.arrow(s, w, 190, "b-line", "NOTIFY: it is free", dash=True)
    p.arrow(w, t + 5, 222, "b-line", "listener: wake up")
    p.arrow(t, s, 262, "a-line", "acquire: one message", at=left)
    p.text(right, 256, "look, fence + 1, row, commit", "text", "middle", 11)
    p.arrow(s, t + 5, 284, "a-line", "granted: fence, end", dash=True, below=True, at=left)
    p.box(t - 5, 284, 10, 226, "a", "a-line", 2)
    p.texts(t - 14, 312, ["LockGuard:", "your code", "works;", "is_held() only", "compares the", "clock"], "a-line", "end", 11, 14)
    p.texts(w + 14, 322, ["every third of the ttl:"], "soft", size=11)
    p.arrow(w, s, 346, "b-line", "worker: renew all locks")
    p.arrow(s, w, 368, "b-line", "ttl from now, for each", dash=True, below=True)
    p.arrow(w, t + 5, 424, "bad", "timer: lost()", dash=True)
    p.texts(w + 14, 420, ["only if no renewal was confirmed", "by the deadline; no I/O for that"], "soft", size=11, step=14)
    p.arrow(t, s, 510, "a-line", "drop(guard): one message", at=left)
    p.text(right, 504, "delete the row, commit", "text", "middle", 11)
    p.texts(right, 524, ["and NOTIFY, if a process waits"], "soft", "middle", 11)
    p.arrow(s, t, 552, "a-line", "released", dash=True, below=True, at=left)
    p.texts(w + 14, 580, ["if that failed: the worker goes on", "until the lease is over"], "soft", size=11, step=14)
    return p


PICTURES = (lease, take_over, fenced, lock)


def main(arguments):
    if arguments not in ([], ["--check"]):
        print(__doc__.split("\n\n")[1], file=sys.stderr)
        return 2
    stale = []
    for draw in PICTURES:
        picture = draw()
        path, text = FOLDER / f"{picture.name}.svg", picture.write()
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            stale.append(path.name)
            if not arguments:
                path.write_text(text, encoding="utf-8")
    if arguments and stale:
        print(f"not what docs/pictures/draw.py draws: {', '.join(stale)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
