"""Small charts as SVG text, and HTML pages that need nothing but themselves."""

from collections.abc import Sequence
from html import escape

WIDTH, LEFT, RIGHT, TOP, BOTTOM = 760, 64, 12, 26, 40
STYLE = (
    "body{font-family:sans-serif;margin:2em;max-width:1100px}table{border-collapse:collapse;font-size:12px}"
    "td,th{border:1px solid #ddd;padding:3px 6px;text-align:left;vertical-align:top}svg{display:block}"
)
COLOURS = ("#1f77b4", "#d95f02", "#1b9e77", "#7570b3", "#e7298a", "#666666")


def _frame(title: str, x_label: str, y_label: str, height: int, body: Sequence[str]) -> str:
    middle = (LEFT + WIDTH - RIGHT) / 2
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'font-family="sans-serif" font-size="11"><title>{escape(title)}</title>'
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>'
        f'<text x="{LEFT}" y="16" font-size="13" font-weight="bold">{escape(title)}</text>{"".join(body)}'
        f'<text x="{middle}" y="{height - 6}" text-anchor="middle">{escape(x_label)}</text>'
        f'<text transform="translate(12 {(TOP + height - BOTTOM) / 2}) rotate(-90)" text-anchor="middle">'
        f"{escape(y_label)}</text>"
        "</svg>"
    )


def _grid(ticks: Sequence[tuple[float, str]], height: int) -> list[str]:
    """Horizontal lines at heights given as shares of the plot, with their labels."""
    lines = []
    for share, label in ticks:
        y = height - BOTTOM - share * (height - BOTTOM - TOP)
        lines.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>'
            f'<text x="{LEFT - 5}" y="{y + 4:.1f}" text-anchor="end">{escape(label)}</text>'
        )
    return lines


def bars(
    title: str,
    heights: Sequence[float],
    *,
    top: float,
    labels: Sequence[str] = (),
    colours: Sequence[str] = (),
    x_label: str = "",
    y_label: str = "",
    ticks: Sequence[tuple[float, str]] = (),
    height: int = 240,
) -> str:
    """One bar per entry of `heights`, in which `top` is a full bar.

    A bar's label is shown when the pointer rests on it.
    """
    step = (WIDTH - LEFT - RIGHT) / max(len(heights), 1)
    body = _grid(ticks or [(share, f"{share * top:g}") for share in (0, 0.25, 0.5, 0.75, 1)], height)
    for index, value in enumerate(heights):
        size = max(value / top * (height - BOTTOM - TOP), 1)
        text = f"<title>{escape(labels[index])}</title>" if labels else ""
        body.append(
            f'<rect x="{LEFT + index * step + 0.5:.1f}" y="{height - BOTTOM - size:.1f}" '
            f'width="{max(step - 1, 0.5):.1f}" height="{size:.1f}" '
            f'fill="{colours[index] if colours else COLOURS[0]}">{text}</rect>'
        )
    return _frame(title, x_label, y_label, height, body)


def lines(
    title: str,
    series: dict[str, Sequence[tuple[float, float]]],
    *,
    x_label: str = "",
    y_label: str = "",
    ticks: Sequence[tuple[float, str]] = (),
    x_ticks: Sequence[tuple[float, str]] = (),
    height: int = 300,
) -> str:
    """Named lines of (x, y) points; the axes span the points and `ticks`, which are values with their labels."""
    points = [point for line in series.values() for point in line]
    xs, ys = [x for x, _ in points] + [x for x, _ in x_ticks], [y for _, y in points] + [y for y, _ in ticks]
    (x_low, x_high), (y_low, y_high) = (min(xs), max(xs)), (min(ys), max(ys))
    x_span, y_span = (x_high - x_low) or 1, (y_high - y_low) or 1
    body = _grid([((y - y_low) / y_span, label) for y, label in ticks], height)

    def place(x: float, y: float) -> tuple[float, float]:
        return (
            LEFT + (x - x_low) / x_span * (WIDTH - LEFT - RIGHT),
            height - BOTTOM - (y - y_low) / y_span * (height - BOTTOM - TOP),
        )

    for x, label in x_ticks:
        tick_x = place(x, y_low)[0]
        body.append(f'<text x="{tick_x:.1f}" y="{height - BOTTOM + 14}" text-anchor="middle">{escape(label)}</text>')
    for index, (name, points) in enumerate(series.items()):
        colour = COLOURS[index % len(COLOURS)]
        path = " ".join("{:.1f},{:.1f}".format(*place(x, y)) for x, y in points)
        body.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        legend = f'x="{WIDTH - RIGHT - 4}" y="{TOP + 12 + 14 * index}" text-anchor="end"'
        body.append(f'<text {legend} fill="{colour}">{escape(name)}</text>')
    return _frame(title, x_label, y_label, height, body)


def header(names: Sequence[str]) -> str:
    return f"<tr>{''.join(f'<th>{escape(name)}</th>' for name in names)}</tr>"


def page(title: str, body: str) -> str:
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title><style>{STYLE}</style>'
        f"<h1>{escape(title)}</h1>{body}</html>\n"
    )
