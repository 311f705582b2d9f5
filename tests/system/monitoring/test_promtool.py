"""promtool's checks of the deployed files and of a real /metrics."""

import subprocess

import pytest

from .scene import DEPLOYED

pytestmark = pytest.mark.timeout(600)  # the first test runs the scene


def promtool(binaries, *words, stdin: str | None = None, cwd=DEPLOYED) -> str:
    done = subprocess.run(
        [binaries / "promtool", *words], cwd=cwd, input=stdin, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_the_rules_are_valid(binaries):
    """Expressions and templates parse."""
    assert "SUCCESS" in promtool(binaries, "check", "rules", "rules.yml")


def test_the_configuration_is_valid(binaries, tmp_path):
    """With a key file; Prometheus does not start without it."""
    (tmp_path / "key").write_text("k")
    config = (DEPLOYED / "prometheus.yml").read_text().replace("/run/secrets/control_key", str(tmp_path / "key"))
    (tmp_path / "prometheus.yml").write_text(config)
    (tmp_path / "rules.yml").write_text((DEPLOYED / "rules.yml").read_text())

    assert "SUCCESS" in promtool(binaries, "check", "config", "prometheus.yml", cwd=tmp_path)


def test_each_alert_fires_when_it_should_and_only_then(binaries):
    """rules.test.yml; tests/telemetry/test_rules_and_dashboard.py checks that each alert has both cases."""
    assert "SUCCESS" in promtool(binaries, "test", "rules", "rules.test.yml")


def test_a_wrong_rule_fails_its_test(binaries, tmp_path):
    """With another threshold rules.test.yml fails."""
    rules = (DEPLOYED / "rules.yml").read_text()
    (tmp_path / "rules.test.yml").write_text((DEPLOYED / "rules.test.yml").read_text())
    (tmp_path / "rules.yml").write_text(
        rules.replace("instance:tokentape_in_flight_bytes:ratio > 0.8", "vector(0) > 0.95")
    )

    with pytest.raises(AssertionError, match="TokenTapeMemoryPressure"):
        promtool(binaries, "test", "rules", "rules.test.yml", cwd=tmp_path)


def test_promtool_accepts_the_metrics_of_the_proxy(binaries, seen):
    """Names, units and help texts follow Prometheus' conventions."""
    assert promtool(binaries, "check", "metrics", stdin=seen.metrics).strip() == ""
