"""The dashboard, checked with the TypeScript types that Grafana publishes."""

import subprocess

import orjson
import pytest
import yaml
from tests.system.faults.system import ROOT

from deploy.grafana.dashboard import dashboard, dashboard_page

from . import environment

pytestmark = pytest.mark.timeout(600)
GRAFANA = ROOT / "deploy" / "grafana"
RAW = "@grafana/schema/dist/esm/raw"
OPTIONS = {
    "timeseries": ("timeseries", "TimeSeriesPanelCfg"),
    "stat": ("stat", "StatPanelCfg"),
    "state-timeline": ("statetimeline", "StateTimelinePanelCfg"),
    "heatmap": ("heatmap", "HeatmapPanelCfg"),
    "table": ("table", "TablePanelCfg"),
}
# JSON has the values of enums. The type of a query is in another package, @grafana/prometheus.
HEAD = f"""
import type {{ Dashboard, Panel, RowPanel, FieldConfig }} from "{RAW}/dashboard/x/dashboard_types.gen";
type Plain<T> = T extends string ? `${{T}}` : T extends number ? T : T extends (infer U)[] ? Plain<U>[]
  : T extends object ? {{ [K in keyof T]: Plain<T[K]> }} : T;
type Query = {{ refId: string; datasource: {{ type: "prometheus"; uid: string }}; expr: string; legendFormat: string;
  editorMode: "code"; range: boolean; instant?: boolean; format?: "table" | "heatmap" }};
type Exact<O, C> = Plain<Omit<Panel, "options" | "fieldConfig" | "targets"> & {{ options: Partial<O>; targets: Query[];
  fieldConfig: {{ defaults: Omit<FieldConfig, "custom"> & {{ custom?: Partial<C> }}; overrides: never[] }} }}>;
"""


def type_errors(model: dict) -> str:
    """Return the compiler's errors for a dashboard; empty if every field is valid."""
    project = environment.grafana_types()
    lines = [HEAD]
    for folder, name in OPTIONS.values():
        module = f"{RAW}/composable/{folder}/panelcfg/x/{name}_types.gen"
        lines.append(f'import type * as {folder} from "{module}";')
    for panel in model["panels"]:
        kind = OPTIONS[panel["type"]][0] if panel["type"] != "row" else "row"
        fields = "never" if kind == "stat" else f"{kind}.FieldConfig"
        shape = "Plain<RowPanel>" if kind == "row" else f"Exact<{kind}.Options, {fields}>"
        lines.append(f"const panel{panel['id']}: {shape} = {orjson.dumps(panel).decode()};")
    whole = {**model, "panels": []}
    lines.append(f"const whole: Plain<Dashboard> = {orjson.dumps(whole).decode()};")
    (project / "dashboard.ts").write_text("\n".join(lines))
    flags = [
        "--noEmit",
        "--strict",
        "--skipLibCheck",
        "--module",
        "esnext",
        "--moduleResolution",
        "node",
        "--target",
        "es2022",
    ]
    done = subprocess.run(
        [project / "node_modules" / ".bin" / "tsc", *flags, "dashboard.ts"],
        cwd=project, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    return done.stdout + done.stderr


def test_every_field_is_valid():
    """Panels, options, fields and queries match the types of @grafana/schema."""
    assert type_errors(orjson.loads(dashboard_page())) == ""


@pytest.mark.parametrize(
    ("break_it", "why"),
    [
        (lambda panel: panel["options"].update(legendary=True), "legendary"),
        (lambda panel: panel["options"]["legend"].update(placement="left"), '"left"'),
        (lambda panel: panel["fieldConfig"]["defaults"]["custom"].update(drawStyle="lines"), '"lines"'),
        (lambda panel: panel["targets"][0].pop("expr"), "expr"),
    ],
    ids=["unknown option", "unknown value", "unknown style", "no query"],
)
def test_an_invalid_field_is_found(break_it, why):
    """The check can fail."""
    broken = orjson.loads(dashboard_page())
    break_it(next(panel for panel in broken["panels"] if panel["type"] == "timeseries"))

    assert why in type_errors(broken)


def test_panels_do_not_overlap():
    """And each has a title, a description and a unit."""
    taken: dict[tuple[int, int], int] = {}
    for panel in dashboard()["panels"]:
        position = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(position["x"], position["x"] + position["w"])
            for y in range(position["y"], position["y"] + position["h"])
        }
        assert position["x"] + position["w"] <= 24
        assert not cells & taken.keys(), panel["title"]
        taken |= dict.fromkeys(cells, panel["id"])
        if panel["type"] != "row":
            assert panel["title"]
            assert panel["description"].endswith(".")
            assert panel["fieldConfig"]["defaults"]["unit"]
            assert all(target["legendFormat"] for target in panel["targets"]) or panel["type"] == "table"


def test_provisioning_matches_the_dashboard():
    """The folder that compose mounts, and a data source of the type that the dashboard uses."""
    (provider,) = yaml.safe_load((GRAFANA / "provisioning/dashboards/tokentape.yml").read_text())["providers"]
    (source,) = yaml.safe_load((GRAFANA / "provisioning/datasources/prometheus.yml").read_text())["datasources"]
    asked = {panel["datasource"]["type"] for panel in dashboard()["panels"] if "datasource" in panel}

    assert (provider["type"], provider["options"]["path"]) == ("file", "/etc/grafana/dashboards")
    assert {source["type"]} == asked == {"prometheus"}
    assert source["isDefault"]
