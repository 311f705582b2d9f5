"""Names in pages, messages, docstrings, comments and files of deploy/ exist: in the settings, the routes, the commands, …"""

import pytest
from tests.support import names
from tests.support.names import Text

# Owner -> names that are not ours, or that a text cites because they do not exist.
FOREIGN: dict[str, set[str]] = {
    "agents": {"/root/count", "--print", "--provider", "openai_base_url"},
    "AReaL": {"compute_logp"},
    "Atropos": {"POST /scored_data", "health_check"},
    "a field of a step, with the name of a section of the settings": {"sampling.constrained"},
    "benchmarks and examples": {"GET /counts", "POST /load_weights"},
    "Docker and kubectl": {
        "--build", "--build-arg", "--detach", "--health-cmd", "--namespace", "--no-recreate", "--profile", "--rm", "--scale",
        "--stop-timeout", "/data", "/tmp", "/var/lib/tokentape", "TOKENTAPE_PORT", "tokentape_agents",
    },
    "a user and a group": {"tokentape tokentape"},
    "Linux": {"tcpi_unacked"},
    "OpenAI's hosted tools": {"code_interpreter", "file_search", "image_generation", "local_shell"},
    "Osmosis' rollout servers": {"POST /rollout", "POST /v1/rollout/init"},
    "processors of images": {"image_token_id", "load_images"},
    "Python and its packages": {"preexec_fn", "render_jinja_template"},
    "Prometheus": {"tokentape_reward_amount"},
    "routers in front of engines": {
        "--routing-logic", "--session-key", "consistent_hash", "consistent_hashing", "optional_pre_call_checks",
        "session_affinity", "session_id_header",
    },
    "SGLang": {
        "--enable-cache-report", "--enable-return-routed-experts", "--sampling-mask-max-tokens", "sampling_logprobs_mode",
        "--tool-strict-level", "normalize_assistant_tool_call_arguments",
    },
    "trainers": {
        "--n-samples-per-prompt", "--rollout-data-postprocess-path", "--rollout-function-path", "--train", "--use-opd",
        "num_iterations", "off_policy_mask_threshold", "reinforce_plus_plus", "rollout_mask_sums", "use_vllm",
        "vllm_importance_sampling_correction",
    },
    "vLLM": {
        "--api-server-count", "--enable-force-include-usage", "--enable-prompt-tokens-details", "--max-num-batched-tokens",
        "--otlp-traces-endpoint", "--override-generation-config", "--return-sampling-mask",
        "--return-tokens-as-token-ids",
    },
}  # fmt: skip
_FOREIGN = frozenset().union(*FOREIGN.values())

KINDS = {
    "settings": (names.settings_in, names.is_setting),
    "routes": (names.routes_in, names.is_route),
    "commands": (names.commands_in, names.is_command),
    "options": (names.options_in, names.is_option),
    "variables": (names.variables_in, names.is_variable),
    "metrics": (names.metrics_in, names.is_metric),
    "fields": (names.fields_in, names.is_field),
}


def wrong_in(kind: str, text: Text) -> list[str]:
    """Return the names of a kind in a text that do not exist."""
    found, exists = KINDS[kind]
    return [name for name in found(text) if name not in _FOREIGN and not exists(name)]


@pytest.mark.parametrize("kind", KINDS)
def test_names_in_texts_exist(kind):
    """A name of another program belongs in FOREIGN, under the program's name."""
    assert {text.path: wrong for text in names.texts() if (wrong := wrong_in(kind, text))} == {}


@pytest.mark.parametrize(
    ("kind", "path", "text", "wrong"),
    [
        ("settings", "docs/a.md", "Set `agents.public_url`, not `agents.url`.", "agents.public_url"),
        ("settings", "docs/a.md", "engines.endpoints[].uri is `engines.endpoints[].url`", "engines.endpoints[].uri"),
        ("settings", "proxy/a.py", "raise policies.NAME.modles or policies.judge.models", "policies.NAME.modles"),
        ("settings", "deploy/a.yaml", "# store.durabilty, store.durability and sampling.cap.any", "store.durabilty"),
        ("routes", "docs/a.md", "`POST /rollouts/{id}/finnish`, `POST /rollouts/r1/finish`", "POST /rollouts/{id}/finnish"),
        ("routes", "proxy/a.py", "call POST /policy, or PUT /policy?x=1.", "POST /policy"),
        ("routes", "docs/a.md", "`DELETE /typo`; `DELETE /{uuid}`", "DELETE /typo"),
        ("routes", "docs/a.md", "`/trees` or `/tree`, below `/rollouts/{id}/v1/…`", "/trees"),
        ("routes", "docs/a.md", "`POST /v1beta/models/m:counts`, `POST /v1beta/models/m:countTokens`",
         "POST /v1beta/models/m:counts"),
        ("commands", "docs/a.md", "`tokentape rollout remove R`, `tokentape rollout delete R`", "tokentape rollout remove"),
        ("commands", "proxy/a.py", "run tokentape verify", "tokentape verify"),
        ("commands", "docs/a.md", "`tokentape show R --logprob`, `tokentape show R --logprobs`", "tokentape show --logprob"),
        ("options", "docs/a.md", "`--older-then`, `--older-than 1h`", "--older-then"),
        ("options", "proxy/a.py", "use --older-then or --older-than", "--older-then"),
        ("variables", "deploy/a.yaml", "TOKENTAPE_STORE_URL, TOKENTAPE_STORE__URL, TOKENTAPE_URL", "TOKENTAPE_STORE_URL"),
        ("metrics", "docs/a.md", "`tokentape_step_total` `tokentape_steps_total`, tokentape_store_*", "tokentape_step_total"),
        ("metrics", "deploy/a.yaml", "tokentape_reward_buckets tokentape_reward_bucket", "tokentape_reward_buckets"),
        ("fields", "docs/a.md", "```text\n$ # public_ulr: http://x, drain_timeout_s: 1\n```", "public_ulr"),
        ("fields", "examples/a.py", "Set `public_ulr`, not public_uri, or `drain_timeout_s`.", "public_ulr"),
    ],
)  # fmt: skip
def test_a_wrong_name_of_each_kind_is_found(kind, path, text, wrong):
    """And the right ones beside it are not."""
    assert wrong_in(kind, Text(path, text)) == [wrong]


def test_names_of_other_programs_are_in_use():
    """And do not exist here."""
    used = {
        name for text in names.texts() for found, exists in KINDS.values() for name in found(text) if not exists(name)
    }

    assert set() == _FOREIGN - used
