"""mini-swe-agent with its default prompts, which runs real commands in its working directory."""

from pathlib import Path

import yaml
from minisweagent.agents.default import DefaultAgent
from minisweagent.config import builtin_config_dir
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel
from weather import MODEL, TASK, report

settings = yaml.safe_load((builtin_config_dir / "mini.yaml").read_text())
templates = {name: text for name, text in settings["agent"].items() if name.endswith("_template")}
agent = DefaultAgent(
    LitellmModel(model_name=f"openai/{MODEL}", cost_tracking="ignore_errors"),
    LocalEnvironment(),
    step_limit=6,
    **templates,
)
agent.run(TASK)
report(Path("fixed.txt").read_text())
