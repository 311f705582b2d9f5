"""The JSON of Grafana panels (Grafana 11 and 12) and their layout on the grid of 24 columns."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

WIDTH = 24
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}


@dataclass(frozen=True, slots=True)
class Panel:
    """A panel without its position. `kind` is Grafana's panel type; `queries` are (expression, legend)."""

    kind: str
    title: str
    description: str
    queries: Sequence[tuple[str, str]]
    unit: str = "short"
    width: int = 8
    height: int = 7
    options: dict[str, Any] = field(default_factory=dict)
    defaults: dict[str, Any] = field(default_factory=dict)
    target_options: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Row:
    """A row's title and its panels, from left to right."""

    title: str
    panels: Sequence[Panel]


def graph(
    title: str, description: str, unit: str, *queries: tuple[str, str],
    stacked: bool = False, limit: float | None = None, width: int = 8, signed: bool = False,
) -> Panel:  # fmt: skip
    """Return a time series panel. `limit` draws the threshold of an alert; the axis starts at 0 unless values are `signed`."""
    custom = {
        "drawStyle": "line", "lineWidth": 1, "fillOpacity": 30 if stacked else 8, "showPoints": "never", "spanNulls": False,
        "stacking": {"mode": "normal" if stacked else "none", "group": "A"},
        "thresholdsStyle": {"mode": "off" if limit is None else "line"},
    }  # fmt: skip
    options = {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }
    defaults = {"custom": custom, **({} if signed else {"min": 0}), **_thresholds(limit)}
    return Panel("timeseries", title, description, queries, unit, width, options=options, defaults=defaults)


def stat(
    title: str, description: str, unit: str, query: str, *, limit: float | None = None, low: bool = False
) -> Panel:
    """Return a stat panel: red above its limit, or below it if `low`."""
    options = {
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "colorMode": "value", "graphMode": "area", "justifyMode": "auto", "orientation": "auto", "textMode": "auto",
    }  # fmt: skip
    return Panel(
        "stat", title, description, [(query, title)], unit, 4, 4, options=options, defaults=_thresholds(limit, low=low)
    )


def state_timeline(title: str, description: str, query: tuple[str, str], *, one: str, zero: str) -> Panel:
    """Return a state timeline of a gauge that is 1 (green) or 0 (red), with a word for each."""
    mapping = {
        "1": {"text": one, "index": 0, "color": "green"},
        "0": {"text": zero, "index": 1, "color": "red"},
    }
    options = {
        "showValue": "auto", "rowHeight": 0.8, "mergeValues": True, "alignValue": "left",
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": False, "calcs": []},
        "tooltip": {"mode": "single", "sort": "none"},
    }  # fmt: skip
    defaults = {"mappings": [{"type": "value", "options": mapping}], "custom": {"fillOpacity": 70, "lineWidth": 0}}
    return Panel("state-timeline", title, description, [query], "none", options=options, defaults=defaults)


def heatmap(title: str, description: str, unit: str, query: str) -> Panel:
    """Return a heatmap of a histogram over time."""
    options = {
        "calculate": False, "cellGap": 1, "showValue": "never", "yAxis": {"axisPlacement": "left", "unit": unit},
        "rowsFrame": {"layout": "auto"}, "legend": {"show": True}, "tooltip": {"mode": "single", "yHistogram": False},
        "color": {"mode": "scheme", "scheme": "Oranges", "steps": 64, "exponent": 0.5, "fill": "dark-orange", "reverse": False},
        "filterValues": {"le": 1e-9}, "exemplars": {"color": "rgba(255,0,255,0.7)"},
    }  # fmt: skip
    return Panel(
        "heatmap", title, description, [(query, "{{le}}")], unit, options=options, target_options={"format": "heatmap"}
    )


def table(
    title: str, description: str, query: str, columns: Sequence[str], *, width: int = 8, height: int = 7
) -> Panel:
    """Return a table of the labels of the current series."""
    selection = {"include": {"names": [*columns]}}
    return Panel(
        "table", title, description, [(query, "")], "none", width, height,
        options={"showHeader": True, "cellHeight": "sm"},
        defaults={"custom": {"align": "auto", "cellOptions": {"type": "auto"}, "inspect": False}},
        target_options={"format": "table", "instant": True, "range": False},
        extra={"transformations": [{"id": "filterFieldsByName", "options": selection}]},
    )  # fmt: skip


def laid_out(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Return the JSON of all rows and panels with their positions and ids."""
    panels: list[dict[str, Any]] = []
    y = 0
    for row in rows:
        position = {"h": 1, "w": WIDTH, "x": 0, "y": y}
        panels.append(
            {
                "id": len(panels) + 1,
                "type": "row",
                "title": row.title,
                "collapsed": False,
                "gridPos": position,
                "panels": [],
            }
        )
        x, y, height = 0, y + 1, 0
        for panel in row.panels:
            if x + panel.width > WIDTH:
                x, y, height = 0, y + height, 0
            position = {"h": panel.height, "w": panel.width, "x": x, "y": y}
            panels.append({"id": len(panels) + 1, **_panel(panel), "gridPos": position})
            x, height = x + panel.width, max(height, panel.height)
        y += height
    return panels


def _panel(panel: Panel) -> dict[str, Any]:
    defaults = {"unit": panel.unit, "color": {"mode": "palette-classic"}, "mappings": [], **panel.defaults}
    if panel.kind == "stat":
        defaults["color"] = {"mode": "thresholds"}
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": DATASOURCE,
        "targets": [_target(number, query, panel.target_options) for number, query in enumerate(panel.queries)],
        "options": panel.options,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        **panel.extra,
    }


def _target(number: int, query: tuple[str, str], options: dict[str, Any]) -> dict[str, Any]:
    expression, legend = query
    return {
        "refId": chr(ord("A") + number),
        "datasource": DATASOURCE,
        "editorMode": "code",
        "expr": expression,
        "legendFormat": legend,
        "range": True,
        **options,
    }


def _thresholds(limit: float | None, *, low: bool = False) -> dict[str, Any]:
    below, above = ("red", "green") if low else ("green", "red")
    steps = [{"color": below, "value": None}] if limit is not None else [{"color": "text", "value": None}]
    if limit is not None:
        steps.append({"color": above, "value": limit})
    return {"thresholds": {"mode": "absolute", "steps": steps}}
