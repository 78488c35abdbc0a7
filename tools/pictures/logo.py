"""The logo: one text (a line) that becomes several voices (its branches, which end in notes)."""

from tools.pictures.svg import dot, fork, path, picture, text

VOICES = ((20, 98, "first"), (40, 112, "third"), (60, 104, "second"), (80, 92, "first"))
"""Height, end and colour of each branch."""


def logo() -> str:
    """Returns the mark with the name."""
    voices = [path(fork(38, 50, x, y), f"stroke {kind} voice") for y, x, kind in VOICES]
    notes = [dot(x, y, 6.5, kind) for y, x, kind in VOICES]
    trunk = path("M10 50H40", "stroke ink voice")
    name = text(136, 66, "motet", "name", size=54, width=158)
    style = ".voice{stroke-width:5;stroke-linecap:round}.name{font-weight:700}"
    return picture(300, 100, "Motet", [*voices, trunk, *notes, name], style=style, frame=False)
