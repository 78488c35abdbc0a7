"""Draws figures: a row of panels, each with a few curves over an axis that doubles. Needs the extra `bench`
(matplotlib)."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

PANEL_INCHES = (4.5, 3.6)
MAX_COLUMNS = 3
DOTS_PER_INCH = 120


@dataclass(frozen=True)
class Curve:
    label: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True)
class PlotPanel:
    title: str
    x_label: str
    y_label: str
    curves: Sequence[Curve]


def save(panels: Sequence[PlotPanel], path: Path) -> None:
    """Saves the picture in the format of the file's suffix."""
    columns = min(len(panels), MAX_COLUMNS)
    lines = -(-len(panels) // columns)
    figure = Figure(figsize=(PANEL_INCHES[0] * columns, PANEL_INCHES[1] * lines), layout="constrained")
    for place, panel in enumerate(panels, start=1):
        draw(panel, figure.add_subplot(lines, columns, place))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=DOTS_PER_INCH)


def draw(panel: PlotPanel, axes: Axes) -> None:
    for curve in panel.curves:
        xs, ys = [x for x, _ in curve.points], [y for _, y in curve.points]
        axes.plot(xs, ys, marker="o", markersize=4, label=curve.label)
    ticks = sorted({x for curve in panel.curves for x, _ in curve.points})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_ylim(bottom=0)
    axes.set(title=panel.title, xlabel=panel.x_label, ylabel=panel.y_label)
    axes.grid(alpha=0.3)
    if len(panel.curves) > 1:
        axes.legend()
