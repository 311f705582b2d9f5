"""promtool's own checks of the deployed files, and of a real /metrics."""

import subprocess

import pytest

from .scene import DEPLOYED

pytestmark = pytest.mark.timeout(600)  # the first test waits for the whole run


def promtool(binaries, *words, told: str | None = None, cwd=DEPLOYED) -> str:
    done = subprocess.run(
        [binaries / "promtool", *words], cwd=cwd, input=told, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_the_rules_are_rules(binaries):
    """Their expressions parse, and their templates can be filled in."""
    assert "SUCCESS" in promtool(binaries, "check", "rules", "rules.yml")


def test_the_configuration_is_one(binaries, tmp_path):
    """Once the key is where it says; without it Prometheus would not start."""
    (tmp_path / "key").write_text("k")
    config = (DEPLOYED / "prometheus.yml").read_text().replace("/run/secrets/control_key", str(tmp_path / "key"))
    (tmp_path / "prometheus.yml").write_text(config)
    (tmp_path / "rules.yml").write_text((DEPLOYED / "rules.yml").read_text())

    assert "SUCCESS" in promtool(binaries, "check", "config", "prometheus.yml", cwd=tmp_path)


def test_each_alert_fires_when_it_must_and_not_when_it_must_not(binaries):
    """The cases of rules.test.yml; tests/test_monitoring.py sees to it that each alert has both."""
    assert "SUCCESS" in promtool(binaries, "test", "rules", "rules.test.yml")


def test_a_case_that_is_wrong_fails(binaries, tmp_path):
    """The cases look at the rules: with another threshold they do not hold."""
    rules = (DEPLOYED / "rules.yml").read_text()
    (tmp_path / "rules.test.yml").write_text((DEPLOYED / "rules.test.yml").read_text())
    (tmp_path / "rules.yml").write_text(rules.replace("instance:tokentape_held_bytes:ratio > 0.8", "vector(0) > 0.95"))

    with pytest.raises(AssertionError, match="TokenTapeMemoryPressure"):
        promtool(binaries, "test", "rules", "rules.test.yml", cwd=tmp_path)


def test_what_the_proxy_tells_is_well_said(binaries, seen):
    """Names, units and help as Prometheus' own guide has them; counters with labels that begin at 0 and all."""
    assert "" == promtool(binaries, "check", "metrics", told=seen.metrics).strip()
