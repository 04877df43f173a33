"""The grid as a plot: one panel per workload, one line per policy, tokens per second over those of `off`.

Needs matplotlib, which is imported when the plot is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench.pace.grid import GridCell
from engine.errors import ConfigError

PANEL_WIDTH, PANEL_HEIGHT = 4.2, 3.4
COLUMNS = 3


def plot(cells: Sequence[GridCell], path: Path) -> None:
    """Write a PNG file.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise ConfigError("--plot: matplotlib is not installed; pip install matplotlib") from None
    workloads = list(dict.fromkeys(cell.workload for cell in cells))
    policies = list(dict.fromkeys(cell.policy for cell in cells))
    columns = min(COLUMNS, len(workloads))
    rows = -(-len(workloads) // columns)
    figure = Figure(figsize=(PANEL_WIDTH * columns, PANEL_HEIGHT * rows + 0.6), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    for panel, workload in zip(panels, workloads, strict=False):
        mine = [cell for cell in cells if cell.workload == workload]
        off = {cell.streams: cell.tokens_per_s for cell in mine if cell.policy == "off"}
        for index, policy in enumerate(policies):
            points = [(c.streams, c.tokens_per_s / off.get(c.streams, 1.0)) for c in mine if c.policy == policy]
            style = {"linewidth": 2.4, "zorder": 3} if policy == "goodput" else {"linewidth": 1.2}
            panel.plot(*zip(*points, strict=True), marker="o", markersize=3, label=policy, color=f"C{index}", **style)
        panel.set_xscale("log", base=2)
        panel.set_title(workload)
        panel.set_xlabel("streams")
        panel.set_ylabel("tokens/s over off" if off else "tokens/s")
        panel.grid(visible=True, alpha=0.3)
        counts = sorted({cell.streams for cell in mine})
        panel.set_xticks(counts, [str(count) for count in counts])
    for panel in panels[len(workloads) :]:
        panel.set_visible(False)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    figure.savefig(path, dpi=130)
