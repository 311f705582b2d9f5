"""mini-swe-agent, which runs real commands in its working directory."""

from pathlib import Path

from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel
from weather import MODEL, TASK, report

agent = DefaultAgent(
    LitellmModel(model_name=f"openai/{MODEL}", cost_tracking="ignore_errors"),
    LocalEnvironment(),
    system_template="You can run commands.",
    instance_template="{{task}}",
    step_limit=6,
)
agent.run(TASK)
report(Path("fixed.txt").read_text())
